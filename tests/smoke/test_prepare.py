"""headstart prepare on a tiny target: the whole road, the dry run, resuming, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from checkpoints.files import read_json
from data.conversations import read_conversations
from data.features import FeatureStore
from data.prepare import run
from data.target import Target
from tests.doubles import END_ID, save_tiny
from tests.prepared import train

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["hi there", "count to 3", "what is a cat?", "name a bird", "is it (far)?", "go on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


def prepare(out: Path, folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Run prepare as its command would; returns the summary and what was printed."""
    out.mkdir(exist_ok=True)
    small = ["features.layers=[0,2,3]", "answers.max_new_tokens=12", "answers.batch_size=4", "target.dtype=float32"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("prepare", ["target=any", f"target.name={folder}", *small, *overrides])
    console = Console(record=True, width=120)
    return run(config, out, console), console.export_text()


def prompts(path: Path) -> Path:
    rows = [
        {"id": f"q{i}", "domain": "chat", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate([*QUESTIONS, QUESTIONS[0]])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path: Path) -> Path:
    rows = [
        {"id": f"a{i}", "domain": "code", "prompt_ids": [2, 9, 10, 11 + i], "response_ids": [12 + i] * 20 + [END_ID]}
        for i in range(30)
    ]
    rows.append({"id": "short", "domain": "code", "prompt_ids": [2, 9], "response_ids": [END_ID]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_target_answers_and_shows_its_features(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out"
    source = ["data=jsonl", f"data.path={prompts(tmp_path / 'prompts.jsonl')}"]
    summary, printed = prepare(out, folder, *source)
    conversations = read_conversations(out / "conversations.jsonl")
    target = Target.load(str(folder), dtype="float32")
    store = FeatureStore.open(out / "features", target.identity, (0, 3), parts=target.parts)
    assert store.ids == [one.id for one in conversations]
    assert 1 <= len(conversations) <= len(QUESTIONS)
    for index, one in enumerate(conversations):
        sample = store[index]
        assert sample.tokens.tolist() == one.tokens
        assert sample.turns.tolist() == one.turns
        assert sample.aux.shape == (len(one.tokens), 2, 32)
    kept = read_json(out / "prepare.json")
    assert kept == summary
    assert kept["target"]["weights"] == target.identity["weights"]
    assert kept["prompts"]["dropped"] == {"repeated prompt": 1}
    assert kept["answer_tokens"] == sum(one.answer_tokens for one in conversations)
    assert kept["coverage"][-1] == [64, 1.0]
    assert "prompt dropped: repeated prompt" in printed
    assert "draft vocabulary of 64 covers" in printed
    assert read_json(out / "run.json")["fingerprints"]["data"] == kept["data"]
    files = [out / "conversations.jsonl", *(out / "features").iterdir()]
    before = {path: path.read_bytes() for path in files}
    again, _ = prepare(out, folder, *source)
    assert again["answers"]["written"] == 0
    assert {path: path.read_bytes() for path in files} == before


def test_dry_run_prints_the_size_and_writes_no_features(tmp_path: Path, folder: Path) -> None:
    source = ["data=answers_jsonl", f"data.path={answers(tmp_path / 'answers.jsonl')}"]
    summary, printed = prepare(tmp_path / "dry", folder, *source, "dry_run=true")
    assert f"{summary['feature_bytes'] / 1e6:,.1f} MB" in printed
    assert "dropped: fewer than 2 answer tokens" in printed
    assert not (tmp_path / "dry" / "features").exists()
    assert not (tmp_path / "cache").exists()
    prepare(tmp_path / "real", folder, *source)
    real = sum(path.stat().st_size for path in (tmp_path / "real" / "features").iterdir())
    assert abs(summary["feature_bytes"] / real - 1) < 0.02
    before = {path: path.read_bytes() for path in (tmp_path / "real").rglob("*") if path.is_file()}
    prepare(tmp_path / "real", folder, *source, "dry_run=true", "data.limit=2")
    assert {path: path.read_bytes() for path in (tmp_path / "real").rglob("*") if path.is_file()} == before


def test_a_smaller_run_trains_on_its_own_prompts_alone(tmp_path: Path, folder: Path) -> None:
    source = ["data=jsonl", f"data.path={prompts(tmp_path / 'prompts.jsonl')}", "features.write=false"]
    prepare(tmp_path / "out", folder, *source)
    whole = read_conversations(tmp_path / "out" / "conversations.jsonl")
    some, _ = prepare(tmp_path / "out", folder, *source, "data.limit=2")
    assert some["answers"]["written"] == 0
    found = read_conversations(tmp_path / "out" / "conversations.jsonl")
    assert found == [one for one in whole if one.id in ("q0", "q1")]
    assert 0 < len(found) < len(whole)


def test_several_processes_without_a_plan_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", f"hydra.run.dir={tmp_path / 'out'}"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "prepare runs as one process" in line
    assert "features.queue.active=true" in line


def test_dry_run_before_any_answer_gives_a_bound(tmp_path: Path, folder: Path) -> None:
    source = ["data=jsonl", f"data.path={prompts(tmp_path / 'prompts.jsonl')}"]
    bound, printed = prepare(tmp_path / "out", folder, *source, "dry_run=true")
    assert "at most" in printed
    assert list((tmp_path / "out").iterdir()) == []
    real, _ = prepare(tmp_path / "out", folder, *source, "features.write=false")
    assert real["features"] is None
    assert real["feature_bytes"] <= bound["feature_bytes_at_most"]


def test_heldout_rows_stay_out(tmp_path: Path, folder: Path) -> None:
    source = ["data=answers_jsonl", f"data.path={answers(tmp_path / 'answers.jsonl')}", "data.heldout=5"]
    summary, _ = prepare(tmp_path / "out", folder, *source, "features.write=false")
    train = read_conversations(tmp_path / "out" / "conversations.jsonl")
    held = read_conversations(tmp_path / "out" / "heldout.jsonl")
    assert (len(train), len(held), summary["conversations"]) == (25, 5, 25)
    assert {one.id for one in train} | {one.id for one in held} == {f"a{i}" for i in range(30)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+features.tyop=1", r"unknown key\(s\) in features: tyop"),
        ("+tyop=1", r"unknown top-level key\(s\): tyop"),
        ("answered_by=nobody", "answered_by must be one of auto, target, source, got 'nobody'"),
        ("features.precision=int3", "a precision of features must be one of auto, bfloat16"),
        ("features.topk=-1", "topk must be a whole number"),
        ("features.layers=[3,9]", r"ids in 0\.\.4, got \[3, 9\]"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, folder: Path, override: str, message: str) -> None:
    source = ["data=answers_jsonl", f"data.path={answers(tmp_path / 'answers.jsonl')}"]
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "out", folder, *source, override)


def test_a_target_with_a_recurrent_state_answers_and_is_trained_for(tmp_path: Path) -> None:
    folder, asked = save_tiny(tmp_path / "target", "qwen3_next"), prompts(tmp_path / "prompts.jsonl")
    summary, _ = prepare(tmp_path / "out", folder, "data=jsonl", f"data.path={asked}")
    assert summary["answers"]["written"] == len(QUESTIONS)
    more = {"target.name": folder, "heldout.path": asked, "acceptance.prompts": 2, "acceptance.every": 0}
    found = train(tmp_path / "out", tmp_path / "run", **more | {"trainer.max_steps": 4})
    assert found["tau"] >= 1
