"""`headstart eval` with another loop and with schedules, and `headstart bench rounds`, on a tiny target."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from checkpoints.folder import save_drafter
from checkpoints.run import settings
from data.target import Target
from eval import bench
from eval.evaluate import run
from eval.scheduled import ScheduleSettings
from eval.scheduler import Load
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
