"""`headstart eval` with another loop and with schedules, `headstart bench rounds` and `speedup`, on a tiny target."""

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from checkpoints.folder import load_drafter, save_drafter
from checkpoints.run import settings
from data.target import Target
from eval import bench
from eval.decoder import DecodeSettings
from eval.evaluate import run
from eval.report import beside
from eval.scheduled import ScheduleSettings
from eval.scheduler import Load
from eval.speedups import Measuring, measure_rounds, measure_speedups
from tests import checks
from tests.doubles import save_tiny

SCHEDULES = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "conf" / "schedule").glob("*.yaml"))


class Flat:
    """Every pass takes a second."""

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return 1.0

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        return 0.0

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name a saved target, a saved head with confidences, and prompts."""
    root = tmp_path_factory.mktemp("decoding")
    source = save_tiny(root / "target")
    target = Target.load(str(source), dtype="float32")
    torch.manual_seed(0)
    save_drafter(root / "head", checks.build("dspark", target, num_slots=3), target_identity=target.identity)
    rows = [{"id": c, "domain": "a", "messages": [{"role": "user", "content": c}]} for c in ("xy", "z")]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [f"target.name={source}", f"drafter_dir={root / 'head'}", f"prompts={root / 'prompts.jsonl'}"]
    return ["target=any", "target.dtype=float32", "max_new_tokens=6", *named]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_composes(name: str) -> None:
    with initialize_config_module("conf", version_base="1.3"):
        how = settings(ScheduleSettings, compose("eval", [f"schedule={name}"]).schedule, "schedule")
    assert how.name == (None if name == "none" else name)
    if how.name is not None:
        assert how.make(3, Flat()).depth(Load(2, 10.0)) in range(4)


@pytest.mark.parametrize("schedule", ["none", "threshold", "prefix"])
def test_schedules_are_lossless(schedule: str, words: list[str], tmp_path: Path) -> None:
    loop = "halves" if schedule in ("none", "prefix") else "null"
    with initialize_config_module("conf", version_base="1.3"):
        run(compose("eval", [*words, f"schedule={schedule}", f"loop={loop}"]), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["greedy_identical"] is True
    assert report["settings"]["loop"] == ("halves" if loop == "halves" else "steady")
    assert report["settings"]["schedule"] == (None if schedule == "none" else schedule)
    assert 0 <= report["verified_slots"] <= 3
    assert report["efficiency"] == pytest.approx(report["tau"] / (report["verified_slots"] + 1))
    assert "slots verified a round" in (tmp_path / "report.md").read_text()


def test_refusals(words: list[str], tmp_path: Path) -> None:
    with initialize_config_module("conf", version_base="1.3"):
        with pytest.raises(ValueError, match="schedule must be none, got static"):
            run(compose("eval", [*words, "schedule=static", "calibrate=true"]), tmp_path)
        with pytest.raises(ValueError, match="a schedule needs loop=steady"):
            run(compose("eval", [*words, "schedule=static", "loop=waiting"]), tmp_path)
        with pytest.raises(ValueError, match="loop must be null, waiting"):
            run(compose("eval", [*words, "loop=eager"]), tmp_path)


def test_bench_rounds_leaves_the_hosts_share(words: list[str], tmp_path: Path) -> None:
    own = [word for word in words if not word.startswith(("prompts", "max_new_tokens"))]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("bench", [*own, "action=rounds", "rows=[2]", "slots=[3]", "context=8", "new_tokens=6"])
    found = json.loads(bench.run(config, tmp_path).read_text())
    assert [one["loop"] for one in found] == ["waiting", "steady"]
    assert all(0 < one["host_share"] < 1 and one["rows"] == 2 and one["slots"] == 3 for one in found)


def test_bench_speedup_sets_the_prediction_beside_the_measurement(words: list[str], tmp_path: Path) -> None:
    own = [word for word in words if not word.startswith("max_new_tokens")]
    own += ["rows=[1,2]", "slots=[1,3]", "context=8", "new_tokens=6", "repeats=1", "seconds=0.01"]
    with initialize_config_module("conf", version_base="1.3"):
        path = bench.run(compose("bench", [*own, "action=speedup"]), tmp_path)
        with pytest.raises(ValueError, match="bench speedup needs drafter_dir"):
            bench.run(compose("bench", ["action=speedup", "drafter_dir=null"]), tmp_path)
    found = json.loads(path.read_text())
    assert [(one["rows"], one["slots"]) for one in found] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(one["error"] == pytest.approx(one["predicted"] / one["measured"] - 1) for one in found)
    assert (tmp_path / "predicted.png").exists()
    assert (tmp_path / "steps.json").exists()
    shown = beside(json.loads((tmp_path / "predicted.json").read_text()), {})
    assert [one["name"] for one in shown] == [one["name"] for one in found]


def test_measured_rounds_all_serve_every_request(words: list[str]) -> None:
    """Without end of turn, counted by hand: a drafter that is never asked leaves one token a round and row."""
    target = Target.load(words[-3].removeprefix("target.name="), dtype="float32")
    done = measure_rounds(target, None, DecodeSettings(1, 6, 2), 0.0, cycle([[4, 5], [6]]))
    assert (done.rounds, done.tokens) == (5, 10)  # the first of six comes with the prompt
    drafter = load_drafter(Path(words[-2].removeprefix("drafter_dir=")), target.parts)
    points = measure_speedups(target, drafter, Flat(), [[4, 5], [6]], Measuring([2], [3], 6, 0.0, 8))
    assert points[0].predicted == pytest.approx(points[0].tau)  # all passes cost the same, drafting nothing
    assert 1 <= points[0].tau <= 4
