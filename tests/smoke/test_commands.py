"""The commands end to end, in this process, on a tiny random target: prepare, a sweep of train, eval."""

import json
import sys
from pathlib import Path

import pytest

import headstart
from checkpoints.folder import save_drafter
from data.target import Target
from tests import checks
from tests.doubles import save_tiny

LAYERS = "[0,2,4]"
TOPICS = ("a red bird", "two plus two", "the sea", "a list", "def f(x)", "rain")


def command(patch: pytest.MonkeyPatch, *arguments: str) -> None:
    patch.setattr(sys, "argv", ["headstart", *arguments])
    headstart.main()


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as context:
        context.setenv("HYDRA_FULL_ERROR", "1")
        yield context


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, patch, target) -> Path:
    out = tmp_path_factory.mktemp("prepared")
    patch.setenv("HEADSTART_CACHE", str(out / "cache"))
    prompts = out / "prompts.jsonl"
    rows = [
        {"id": f"p{i}", "domain": "toy", "messages": [{"role": "user", "content": f"say {topic}"}]}
        for i, topic in enumerate(TOPICS)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(
        patch,
        "prepare",
        "target=any",
        f"target.name={target}",
        "data=jsonl",
        f"data.path={prompts}",
        "answers.max_new_tokens=16",
        "answers.temperature=1.0",
        f"features.layers={LAYERS}",
        f"hydra.run.dir={out}",
    )
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, patch, target, prepared) -> list[Path]:
    """Two runs of one sweep."""
    out = tmp_path_factory.mktemp("trained")
    command(
        patch,
        "train",
        "-m",
        "debug=fast",
        "target=any",
        f"target.name={target}",
        f"prepared={prepared}",
        "drafter.vocabulary=48",
        f"drafter.model.layers={LAYERS}",
        "drafter.model.num_slots=2",
        "trainer.progress=false",
        "trainer.accelerator=cpu",
        "optimizer.lr=1e-3,1e-2",
        f"hydra.sweep.dir={out}",
    )
    return [out / "0", out / "1"]


def test_prepare_leaves_conversations_features_and_its_record(prepared):
    assert (prepared / "features" / "header.json").exists()
    assert len((prepared / "conversations.jsonl").read_text().splitlines()) == len(TOPICS)
    run = json.loads((prepared / "run.json").read_text())
    assert run["config"]["answers"]["max_new_tokens"] == 16
    assert run["fingerprints"]["target"]["name"]
    assert run["packages"]["torch"]


def test_a_sweep_trains_each_run_in_its_own_folder(trained):
    rates = [json.loads((run / "run.json").read_text())["config"]["optimizer"]["lr"] for run in trained]
    assert rates == [1e-3, 1e-2]
    for run in trained:
        assert json.loads((run / "drafter" / "config.json").read_text())["num_slots"] == 2
        assert (run / "metrics.csv").exists()


def test_eval_reports_the_drafter_and_proves_it_lossless(patch, tmp_path, target, trained):
    command(
        patch,
        "eval",
        "target=any",
        f"target.name={target}",
        "target.dtype=float32",
        f"drafter_dir={trained[0] / 'drafter'}",
        "limit=1",
        "max_new_tokens=8",
        f"hydra.run.dir={tmp_path}",
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["greedy_identical"] is True
    assert report["num_slots"] == 2
    assert 1 <= report["tau"] <= 3
    assert len(report["alpha"]) == 2


def test_export_writes_what_an_engine_loads(patch, tmp_path, trained):
    command(patch, "export", f"drafter_dir={trained[0] / 'drafter'}", "engine=vllm", f"hydra.run.dir={tmp_path}")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["draft_vocab_size"] == 48


def test_demo_gathers_its_report(patch, tmp_path, capsys):
    """The stages are pretended; what is tested is the order, the commands and what becomes of their outputs."""
    started = []
    really = headstart.subprocess.run

    def pretend(line, **options):
        if line[1:3] != ["-m", "headstart"]:
            return really(line, **options)
        started.append(line[3])
        folder = Path(line[4].removeprefix("hydra.run.dir="))
        if line[3] == "eval":
            found = {"tau": 1.5, "accepted": 0.5, "alpha": [0.5], "domains": {"toy": 1.5}, "greedy_identical": True}
            speeds = {"near_ties": 0, "tokens_per_s": 3.0, "baseline_tokens_per_s": 2.0, "speedup": 1.5}
            counts = {"prompts": 4, "num_slots": 1, "seconds": {"drafter": 1.0}}
            (folder / "report.json").write_text(json.dumps(found | speeds | counts))
        if line[3] == "export":
            (folder / "config.json").write_text("{}")
        return headstart.subprocess.CompletedProcess(line, 0)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(headstart.subprocess, "run", pretend)
        command(context, "demo", f"out={tmp_path}")
        command(context, "demo", f"out={tmp_path}")
    assert started == [
        "prepare",
        "train",
        "eval",
        "export",
        "export",
        "export",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert sorted(report["export_dirs"]) == ["sglang", "vllm", "vllm_speculators"]
    assert all(Path(folder).is_relative_to(tmp_path) for folder in report["export_dirs"].values())
    assert set(report["seconds"]) == {"prepare", "train", "eval", "export", "total"}
    assert report["drafter_dir"] == str(tmp_path / "train" / "drafter")
    assert "1.50x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"prepared": {"thinking": False}, "conversations": 3}, False),  # as training declares it
        ({"prepared": {"thinking": None}, "conversations": 3}, None),
        ({"imported_from": "x", "thinking": "unknown"}, None),  # as an import declares it
    ],
)
def test_verify_asks_in_the_thinking_mode_of_the_training_data(data, wanted, target, tmp_path, monkeypatch):
    opened = Target.load(target, "float32")
    drafter = checks.build("eagle3", opened)
    save_drafter(tmp_path / "head", drafter, target_identity=opened.identity, data=data)
    seen = []

    def spy(_tokenizer, thinking, _ends):
        seen.append(thinking)
        raise StopIteration

    monkeypatch.setattr("data.chat.Template", spy)
    config = checks.compose_config("export", f"drafter_dir={tmp_path / 'head'}", f"target_path={target}")
    with pytest.raises(StopIteration):
        headstart.measure_reference(config, tmp_path)
    assert seen == [wanted]


class Loaded(Exception):
    """The target would be loaded now, with these arguments."""


@pytest.fixture
def unloadable(patch):
    def load(*_args, **words):
        raise Loaded(words)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(Target, "load", load)
        yield


def test_import_and_verify_load_the_target_as_train_and_eval_do(unloadable, patch, target, trained, tmp_path):
    how = ["target.device_map=auto", "target.dtype=bfloat16", "target.revision=main", "target.offload_folder=here"]
    wanted = {"device_map": "auto", "dtype": "bfloat16", "revision": "main", "offload_folder": "here", "name": target}
    head = f"drafter_dir={trained[0] / 'drafter'}"
    words = [head, *how, f"hydra.run.dir={tmp_path}", f"engine.python={sys.executable}"]
    with pytest.raises(Loaded) as named:
        command(patch, "export", "import", *words, "target=any", f"target.name={target}")
    with pytest.raises(Loaded) as imported:
        command(patch, "export", "import", *words, f"target_path={target}")
    with pytest.raises(Loaded) as verified:
        command(patch, "export", "verify", *words, f"target_path={target}")
    for found in (named, imported, verified):
        assert wanted.items() <= found.value.args[0].items()
    with pytest.raises(Loaded) as plain:
        command(patch, "export", "verify", head, words[-1], words[-2], f"target_path={target}")
    assert plain.value.args[0]["dtype"] == "float32", "so that no near tie of ours decides"


def test_verify_asks_for_the_engine_before_it_loads_the_target(unloadable, patch, target, trained, tmp_path):
    words = [f"drafter_dir={trained[0] / 'drafter'}", f"target_path={target}", f"hydra.run.dir={tmp_path}"]
    for engine, why in (
        (["engine=vllm", "engine.python=/nowhere/python"], "/nowhere/python is no executable file"),
        (["engine=sglang", f"engine.python={sys.executable}"], "sglang is not run from here"),
        (["engine=vllm", f"engine.python={sys.executable}", "weights=int3"], "int3"),
    ):
        with pytest.raises(ValueError, match=why):
            command(patch, "export", "verify", *words, *engine)
