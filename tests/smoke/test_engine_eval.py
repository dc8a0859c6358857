"""`headstart eval engine=...` from end to end, on servers that are a fake engine: report, page, traces, refusals."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from checkpoints.files import read_json
from checkpoints.folder import save_drafter
from checkpoints.run import ROOT
from data.target import Target
from drafters.eagle3 import Eagle3
from eval import engines
from eval.engine_dialects import DIALECTS, Setup
from eval.engines import Voice, run_engines
from eval.evaluate import cost_of, run
from eval.hardware import HardwareSettings
from eval.hardware_measured import Measured, StepTable
from eval.sections import sections
from eval.serving import SimulateSettings
from tests import fake_engine
from tests.doubles import save_tiny
from tests.unit.test_serving_engines import client, served

ROWS = [
    {"id": "a", "domain": "json", "messages": [{"role": "user", "content": "give me a json object"}]},
    {"id": "b", "domain": "prose", "messages": [{"role": "user", "content": "write a line"}]},
    {"id": "c", "domain": "json", "messages": [{"role": "user", "content": "json!"}]},
]
FOLLOWED = {"question_id": 7, "category": "chat", "turns": ["hello", "and then?"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A saved target, a saved head, and a file of prompts."""
    root = tmp_path_factory.mktemp("serving")
    source = save_tiny(root / "target")
    target = Target.load(str(source), dtype="float32")
    torch.manual_seed(0)
    head = Eagle3(target.parts, None, num_slots=fake_engine.SLOTS, layers=[0, 2, 4])
    save_drafter(root / "head", head, target_identity=target.identity)
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "turns.jsonl").write_text(json.dumps(FOLLOWED) + "\n")
    return source, root / "head", root / "prompts.jsonl"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM and SGLang start a fake engine. plain, drafted: further words for each server."""
    words: dict[str, Any] = {"plain": [], "drafted": [], "setups": []}

    def command(setup: Setup, port: int, drafted: bool) -> list[str]:
        words["setups"].append(setup)
        more = ["--drafted", *words["drafted"]] if drafted else words["plain"]
        return [sys.executable, fake_engine.__file__, "--port", str(port), "--delay", "0.001", *more]

    for name, dialect in list(DIALECTS.items()):
        monkeypatch.setitem(DIALECTS, name, replace(dialect, command=command))
    return words


def composed(folders: tuple[Path, Path, Path], *more: str, engine: str = "vllm") -> Any:
    source, head, prompts = folders
    words = ["target=any", f"target.name={source}", "target.dtype=float32", f"drafter_dir={head}", f"prompts={prompts}"]
    words += [f"engine={engine}", f"engine.python={sys.executable}", "max_new_tokens=8", "repeats=2"]
    with initialize_config_module("conf", version_base="1.3"):
        return compose("eval", [*words, "concurrency=[1,2]", "per_user=2", *more])


def test_the_command_measures_both_servers_and_writes_the_report(
    folders: tuple[Path, Path, Path], fake: dict[str, Any], tmp_path: Path
) -> None:
    run(composed(folders, f"traces={tmp_path / 'traces.json'}"), tmp_path)
    report = read_json(tmp_path / "report.json")
    # Rounds of 8 tokens accept 2, 0, 3, the last cut by a token: tests/fake_engine.py.
    assert report["tau"] == pytest.approx(7 / 3)
    assert report["tau_verified"] == pytest.approx(1 + 5 / 3)
    assert report["alpha"] == pytest.approx([2 / 3, 1.0, 0.5])
    assert report["domains"] == {"json": pytest.approx(7 / 3), "prose": pytest.approx(7 / 3)}
    assert report["greedy_identical"] is True
    assert report["near_ties"] == 0
    assert report["prompts"] == 3
    assert report["num_slots"] == 3
    assert report["speedup"] > 0
    levels = report["engine"]["levels"]
    assert [one["concurrency"] for one in levels] == [1, 2]
    # Three prompts a pass at one user; four requests at two, two for each.
    assert [one["drafter"]["requests"] for one in levels] == [6, 8]
    assert [one["same_answers"] for one in levels] == [6, 8]
    for one in levels:
        assert one["drafter"]["tau_counted"] == pytest.approx(1 + 5 / 3)
        assert one["baseline"]["tau"] is None
        # Three rounds an answer, told and counted alike: nobody else was served.
        assert one["drafter"]["rounds"] == one["drafter"]["rounds_counted"] == 3 * one["drafter"]["requests"]
        assert one["speedup"]["low"] <= one["speedup"]["value"] <= one["speedup"]["high"]
        assert one["drafter"]["tokens_per_s"]["value"] > 0
    assert report["engine"]["version"] == "fake-1"
    assert set(report["engine"]["commands"]) == {"drafter", "baseline"}
    # What is served, and beside it what the head was made for.
    assert report["target"]["name"] == str(folders[0])
    assert report["target"]["served"] == {"baseline": "fake", "drafter": "fake"}
    assert "weights" not in report["target"]
    made_for = read_json(folders[1] / "config.json")["target"]
    assert report["drafter"]["made_for"] == made_for
    assert report["target"]["hidden_size"] == made_for["hidden_size"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 5
    assert "Engine" in page
    assert "it served others" not in page
    levels[0]["drafter"]["rounds_counted"] += 1
    said = next(one for one in sections(report) if one.title == "Engine")
    assert said.lines[-1] == "The server counted 43 rounds, our requests told 42: it served others too."
    assert "| 2 | baseline |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "engine.png").exists()
    assert (tmp_path / "server_drafter.log").exists()
    assert read_json(tmp_path / "run.json")["config"]["concurrency"] == [1, 2]
    # The drafter is our own folder: it was exported for the engine first.
    setup = fake["setups"][-1]
    assert setup.drafter == (tmp_path / "export").resolve()
    assert setup.provenance["engine"] == "vllm"
    assert setup.max_num_seqs == 2
    how = SimulateSettings("sglang", "llama-3.1-8b", [1.0], ["static"], traces=str(tmp_path / "traces.json"))
    # The last round of each answer was cut by a token and still counts the three drafts that it kept.
    assert how.rounds().tau == pytest.approx(1 + 5 / 3)
    assert how.rounds().num_slots == 3


def test_answers_that_differ_are_no_near_tie(
    folders: tuple[Path, Path, Path], fake: dict[str, Any], tmp_path: Path
) -> None:
    """The planted fault: a drafter that changes the third token. The same command ends with status 1."""
    fake["drafted"] = ["--fault", "other"]
    report = run_engines(composed(folders, "limit=1", "concurrency=[1]", "repeats=1"), tmp_path)
    assert report is not None
    assert report.greedy_identical is False
    assert {one.position for one in report.differences or []} == {2}
    assert report.levels[0].same_answers == 0


def test_sglang_and_no_baseline(folders: tuple[Path, Path, Path], fake: dict[str, Any], tmp_path: Path) -> None:
    config = composed(folders, "baseline=false", "concurrency=[2]", "repeats=1", engine="sglang")
    config.drafter_dir = str(_exported_for_sglang(folders[1], tmp_path))
    fake["drafted"] = ["--info", "/nowhere"]
    report = run_engines(config, tmp_path)
    assert report is not None
    assert report.differences is None
    assert report.whole.speed.speedup is None
    assert report.whole.acceptance.tau == pytest.approx(7 / 3, abs=0.2)
    assert report.levels[0].drafter.tau_counted == pytest.approx(7 / 3)
    assert len(fake["setups"]) == 1
    said = next(one for one in sections(report.as_dict()) if one.title == "Engine")
    assert said.lines[0].startswith("sglang unknown. ")


def _exported_for_sglang(head: Path, folder: Path) -> Path:
    """An export as SGLang's table writes it (the tiny head reads layers that SGLang has to be told)."""
    export = folder / "sglang"
    export.mkdir()
    target = read_json(head / "config.json")["target"]
    command = "python -m sglang.launch_server --speculative-algorithm X --speculative-draft-model-path GONE"
    provenance = {"engine": "sglang", "command": command, "architecture": "a", "num_slots": 3, "speculative": None}
    (export / "headstart.json").write_text(json.dumps(provenance | {"whole": False, "target": target, "measured": {}}))
    return export


def test_later_turns_follow_the_first_server_s_answers(
    folders: tuple[Path, Path, Path], fake: dict[str, Any], tmp_path: Path
) -> None:
    config = composed(folders, "concurrency=[1]", "repeats=1", f"prompts={folders[2].with_name('turns.jsonl')}")
    report = run_engines(config, tmp_path)
    assert report is not None
    assert report.whole.turns == 2
    assert report.whole.prompts == 1
    assert report.levels[0].drafter.requests == 2
    assert report.greedy_identical is True


def test_running_servers_are_joined_and_left_running(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Both by url, the prediction beside the measurement; by url alone there is no baseline."""
    (tmp_path / "predicted.json").write_text('{"c=2": 1.5}')
    with served() as drafted, served(drafted=False) as plain:
        urls = [f"http://127.0.0.1:{one.server_port}" for one in (drafted, plain)]
        both = composed(folders, f"url={urls[0]}", f"baseline_url={urls[1]}", f"predicted={tmp_path}/predicted.json")
        report = run_engines(both, tmp_path)
        alone = run_engines(composed(folders, f"url={urls[0]}", "concurrency=[1]", "repeats=1"), tmp_path / "alone")
        assert client(drafted).version() == "fake-1"
    assert report is not None
    assert alone is not None
    assert report.engine["commands"] == {"baseline": f"joined at {urls[1]}", "drafter": f"joined at {urls[0]}"}
    (point,) = report.predicted or []
    assert point["predicted"] == 1.5
    assert report.levels[1].speedup is not None
    assert point["measured"] == report.levels[1].speedup.value
    assert alone.levels[0].baseline is None
    assert alone.differences is None


def test_print_says_how_to_start_and_starts_nothing(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_engines(composed(folders, "start=print", "server_args=[--enforce-eager]", "target.revision=main"), tmp_path)
        is None
    )
    said = capsys.readouterr().out
    assert said.count("vllm.entrypoints.openai.api_server") == 2
    assert said.count("--speculative-config") == 1
    assert said.count("--enforce-eager") == 2
    assert said.count("--revision main") == 2
    assert "url=http://127.0.0.1:8000 baseline_url=http://127.0.0.1:8001" in said
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay=true"], "replay cannot be set"),
        (["verification=typical"], "verification cannot be set"),
        (["start=no"], "start must be"),
        (["+nothing=1"], "nothing"),
    ],
)
def test_what_a_server_cannot_do_is_refused(
    folders: tuple[Path, Path, Path], tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run_engines(composed(folders, *words), tmp_path)


def test_transformers_is_no_server_and_other_exports_are_refused(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="is no server"):
        run_engines(composed(folders, engine="transformers"), tmp_path)
    export = _exported_for_sglang(folders[1], tmp_path)
    config = composed(folders, "start=print")
    config.drafter_dir = str(export)
    with pytest.raises(ValueError, match="exported for sglang, not for vllm"):
        run_engines(config, tmp_path)
    provenance = read_json(export / "headstart.json")
    provenance["engine"], provenance["target"]["hidden_size"] = "vllm", 4096
    (export / "headstart.json").write_text(json.dumps(provenance))
    with pytest.raises(ValueError, match="hidden_size 32 instead of 4096"):
        run_engines(config, tmp_path)


def test_a_voice_says_what_its_target_says(folders: tuple[Path, Path, Path]) -> None:
    how = engines.TargetSettings(str(folders[0]), "float32")
    voice, target = Voice.load(how), Target.load(how.name, "float32")
    assert voice.eos_ids == target.eos_ids
    assert voice.source == target.source
    assert ROOT.is_dir()


def test_traces_of_our_own_loop_are_read_by_simulate(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, head, prompts = folders
    words = ["target=any", f"target.name={source}", "target.dtype=float32", f"drafter_dir={head}", f"prompts={prompts}"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", [*words, "max_new_tokens=12", f"traces={tmp_path / 'traces.json'}", "baseline=false"])
        replayed = compose("eval", [*words, "max_new_tokens=4", "traces=x.json", "replay=true"])
    run(config, tmp_path)
    report, traces = read_json(tmp_path / "report.json"), read_json(tmp_path / "traces.json")
    how = SimulateSettings("sglang", "llama-3.1-8b", [1.0], ["static"], traces=str(tmp_path / "traces.json"))
    assert how.rounds().num_slots == 3
    assert len(traces["kept"]) == report["rounds"]
    assert how.rounds().tau == pytest.approx(report["tau_verified"])
    with pytest.raises(ValueError, match="replay must be false"):
        run(replayed, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["traces=x.json", "schedule=static"],
            "traces need all slots of every round: schedule must be none, got static",
        ),
        (["traces=x.json", "tree=dynamic"], "traces are of chains: tree must be none, got dynamic"),
        (["calibrate=true", "tree=dynamic"], "calibrate=true is for chains: tree must be none, got dynamic"),
        (["predicted={predicted}"], "predicted speedup 'code'.*this report measured json, prose, all"),
        (["predicted={predicted}", "baseline=false"], "this report measured nothing"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    (tmp_path / "predicted.json").write_text('{"code": 1.5}')
    given = ["target=any", f"target.name={folders[0]}", f"drafter_dir={folders[1]}", f"prompts={folders[2]}"]
    given += [one.format(predicted=tmp_path / "predicted.json") for one in words]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", given)
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=said):
        run(config, tmp_path)


@pytest.mark.parametrize(
    ("engine", "words", "said"),
    [
        ("sglang", ["traces=x.json"], "which sglang does not tell"),
        ("vllm", ["predicted={predicted}"], "predicted speedup 'c=3'.*this report measured c=1, c=2"),
        ("vllm", ["predicted={predicted}", "baseline=false"], "this report measured nothing"),
    ],
)
def test_servers_are_not_started_for_what_cannot_be(
    folders: tuple[Path, Path, Path], fake: dict[str, Any], tmp_path: Path, engine: str, words: list[str], said: str
) -> None:
    (tmp_path / "predicted.json").write_text('{"c=3": 1.5}')
    words = [one.format(predicted=tmp_path / "predicted.json") for one in words]
    config = composed(folders, *words, engine=engine)
    if engine == "sglang":
        config.drafter_dir = str(_exported_for_sglang(folders[1], tmp_path))
    with pytest.raises(ValueError, match=said):
        run_engines(config, tmp_path)
    assert not fake["setups"]


def test_the_report_is_there_when_traces_cannot_be_kept(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """One new token an answer: no rounds at all."""
    given = ["target=any", f"target.name={folders[0]}", f"drafter_dir={folders[1]}", f"prompts={folders[2]}"]
    given += ["target.dtype=float32", "max_new_tokens=1", "baseline=false", "limit=1", "traces=x.json"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("eval", given)
    with pytest.raises(ValueError, match="no whole round"):
        run(config, tmp_path)
    assert (tmp_path / "report.json").exists()


def test_step_times_of_a_table_reach_the_schedule(tmp_path: Path) -> None:
    steps = StepTable([1], [1, 2], [[1.0, 1.2]])
    table = Measured(steps, StepTable([1], [1], [[0.05]]), None, 8).save(tmp_path / "steps.json")
    bare = Measured(steps, None, None, 8).save(tmp_path / "bare.json")
    found = cost_of(None, tmp_path, HardwareSettings({}, {}, str(table)), "x")  # type: ignore[arg-type]
    assert found.target_seconds(1, 2, 8) == pytest.approx(1.2)
    assert found.draft_seconds(1, 1, 8) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="no times of a drafter"):
        cost_of(None, tmp_path, HardwareSettings({}, {}, str(bare)), "x")  # type: ignore[arg-type]
