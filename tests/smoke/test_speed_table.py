"""benchmarks/speed_table.py on tiny doubles: its parts end on time, and each leaves what it has."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import speed_table
from benchmarks.speed_table import Table, arguments, decode, engines, main
from checkpoints.files import read_json, write_json
from checkpoints.run import ROOT, machine
from eval.eval_settings import EvalSettings


def table(folder: Path, seconds: float) -> Table:
    return Table(folder, time.monotonic() + seconds, {"machine": machine(), "target": "t"})


def test_the_dry_run_leaves_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_table, "DRY_HEADS", ("eagle3",))
    monkeypatch.setattr(sys, "argv", ["speed_table.py", "--dry-run", "--out", str(tmp_path), "--engine", "vllm"])
    main()
    found = read_json(tmp_path / "table.json")
    assert [(row["loop"], row["batch"], row["head"]) for row in found["harness"]] == [
        (loop, batch, head) for loop in ("waiting", "steady") for batch in (1, 2) for head in ("plain", "eagle3")
    ]
    assert all(row["identical"] == "True" for row in found["harness"] if row["head"] == "eagle3")
    assert [row["batch"] for row in found["steps"]] == [1, 2]
    assert [row["batch"] for row in found["predicted"]] == [1, 2]
    for row in found["predicted"]:
        assert row["error"] == pytest.approx(row["by step times"] / row["measured"] - 1)
    # An engine opens folders; the double has none.
    assert found["notes"] == ["vllm: not run, it needs real weights and HEADSTART_ENGINE_PYTHON"]
    assert (tmp_path / "steps_eagle3.json").exists()
    assert "## Predicted" in (tmp_path / "table.md").read_text()


def test_the_script_says_at_once_what_its_python_lacks(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    script = ROOT / "benchmarks" / "h200.sh"
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(bare), "OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", script, "--dry-run"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "lacks accelerate" in done.stderr
    assert "torch" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_part_is_stopped_on_time_and_the_next_one_runs(tmp_path: Path) -> None:
    found, ran = table(tmp_path, 60), []
    started = time.monotonic()
    speed_table.LEAST_S, before = 0.1, speed_table.LEAST_S
    try:
        found.part("slow", lambda: time.sleep(30), limit=0.3)
    finally:
        speed_table.LEAST_S = before
    assert time.monotonic() - started < 10
    found.part("broken", lambda: json.loads("{"))
    found.part("good", lambda: ran.append(1))
    assert ran == [1]
    assert found.notes[0].startswith("slow: TimeoutError: outlasted")
    assert found.notes[1].startswith("broken: JSONDecodeError")
    assert read_json(tmp_path / "table.json")["notes"] == found.notes


def test_an_answer_that_parts_says_how_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = SimpleNamespace(tokens_per_s=1.0, speedup=1.0, break_even_tau=1.0, draft_ms=1.0, verify_ms=1.0)
    whole = SimpleNamespace(speed=pace, acceptance=SimpleNamespace(tau=1.0))
    told = SimpleNamespace(whole=whole, greedy_identical=False, failures=lambda: ["gap 0.07", "more"], as_dict=dict)
    monkeypatch.setattr(speed_table, "evaluate", lambda *_, **__: told)
    found = table(tmp_path, 60)
    decode(found, Any, ("a", Any), [], EvalSettings(batch_size=2, loop="steady"), {})  # type: ignore[arg-type]
    assert found.harness[0]["identical"] == "False"
    assert found.notes == ["a, steady loop, batch 2: gap 0.07"]


def test_nothing_starts_when_the_time_is_over(tmp_path: Path) -> None:
    found = table(tmp_path, 1.0)
    found.part("late", lambda: pytest.fail("ran"))
    assert found.notes == ["late: not run, no time left"]


def test_engines_share_the_first_head_s_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(words: list[str], **_: Any) -> None:
        calls.append(words)
        out = next(word for word in words if word.startswith("hydra.run.dir=")).split("=", 1)[1]

        def side(rate: float) -> dict[str, Any]:
            latency = {"token_ms": {"p50": 1.0}}
            return {"tokens_per_s": {"value": rate}, "tau_counted": 2.0, "latency": latency}

        plain = side(10.0) if "baseline=true" in words else None
        levels = [{"concurrency": 4, "drafter": side(10.0 + 5 * len(calls)), "baseline": plain}]
        write_json(Path(out) / "report.json", {"engine": {"levels": levels}})

    monkeypatch.setattr(speed_table.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["x", "target", "a", "b", "--out", str(tmp_path), "--engine", "vllm"])
    found = table(tmp_path, 60)
    engines(found, "target", {"a": Path("/a"), "b": Path("/b")}, arguments())
    assert [(row["head"], row["speedup"]) for row in found.engines] == [("a", 1.5), ("b", 2.0)]
    assert ["baseline=true" in one for one in calls] == [True, False]
    assert "concurrency=[1,8,32]" in calls[0]
