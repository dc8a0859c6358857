"""Features in other forms through the real commands: estimated, converted, trained on."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from checkpoints.files import read_json
from data import prepare
from data.target import Target
from tests.checks import compose_config
from tests.doubles import save_tiny
from tests.smoke.test_prepare import answers
from training import train

LAYERS = "[0,2,3]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


def run(out: Path, folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """headstart prepare; returns what it returns and what it prints."""
    out.mkdir(exist_ok=True, parents=True)
    fixed = ["target=any", f"target.name={folder}", "target.dtype=float32", f"features.layers={LAYERS}"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("prepare", [*fixed, *overrides])
    console = Console(record=True, width=160)
    return prepare.run(config, out, console), console.export_text()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    out = tmp_path_factory.mktemp("prepared")
    rows = answers(out / "answers_in.jsonl")
    run(out, folder, "data=answers_jsonl", f"data.path={rows}", f"features.folder={out / 'store'}")
    return out


def train_on(prepared: Path, folder: Path, out: Path, *more: str) -> None:
    """Two steps of headstart train."""
    told = [f"prepared={prepared}", "target=any", f"target.name={folder}", "target.dtype=float32", "drafter=eagle3"]
    told += [f"drafter.model.layers={LAYERS}", "drafter.model.num_slots=2", "drafter.vocabulary=40", "batch.rows=1"]
    told += ["trainer.max_steps=2", "trainer.progress=false", "acceptance.every=2", "acceptance.prompts=2"]
    train.run(compose_config("train", *told, "acceptance.max_new_tokens=6", "logger=none", *more), out)


def real_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in store.iterdir())


@pytest.mark.parametrize(
    "form", [["features.precision=int8"], ["features.precision=fp8", "features.topk=4", "features.share_prefixes=true"]]
)
def test_converted_has_the_estimated_size_and_trains(
    tmp_path: Path, folder: Path, prepared: Path, form: list[str]
) -> None:
    out = tmp_path / "out"
    (prepared / "heldout.jsonl").write_text("kept out\n")
    _, printed = run(out, folder, f"convert={prepared}", *form, f"features.folder={tmp_path / 'store'}")
    assert "check 4 on 100.00% of a sample" in printed
    for name in ("conversations.jsonl", "heldout.jsonl"):
        assert (out / name).read_bytes() == (prepared / name).read_bytes()
    source = ["data=answers_jsonl", f"data.path={prepared / 'answers_in.jsonl'}"]
    found, table = run(tmp_path / "estimate", folder, *source, *form, "estimate=true")
    assert "bytes a token" in table
    assert list((tmp_path / "estimate").iterdir()) == []
    assert abs(found["ways"][0]["bytes"] / real_bytes(out / "features") - 1) < 0.02
    train_on(out, folder, tmp_path / "run")
    record = read_json(tmp_path / "run" / "run.json")["fingerprints"]["prepared"]
    assert record["features"]["holds"].startswith("layers int8:32" if "int8" in form[0] else "layers fp8:0")


def test_estimate_reads_no_weights(
    tmp_path: Path, folder: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)
    source = ["data=answers_jsonl", f"data.path={prepared / 'answers_in.jsonl'}"]
    found, _ = run(tmp_path, folder, *source, "estimate=true")
    assert found["tokens"] == read_json(prepared / "prepare.json")["tokens"]
    assert abs(found["ways"][0]["bytes"] / real_bytes(prepared / "features") - 1) < 0.02
    asked, _ = run(tmp_path, folder, "estimate=true", "data=jsonl", f"data.path={prompts(tmp_path)}")
    assert asked["tokens"] > 256


def prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"id": "a", "domain": "d", "messages": [{"role": "user", "content": "hi"}]}\n')
    return path


def test_large_shapes_by_hand(tmp_path: Path, folder: Path) -> None:
    """Qwen3-4B, three layers: 4 x 2560 x 2 + 14 bytes in bfloat16; in fp8 3 x (2560 + 2), and 1.5 x 2560 + 2 x 40 for
    the last hidden state in 12 bits."""
    out, printed = run(
        tmp_path, folder, "estimate=true", "shape=qwen3_4b", "sizes.tokens=1000", "features.layers=[2,18,33]"
    )
    by_name = {one["holds"]: one["bytes_per_token"] for one in out["ways"]}
    assert by_name["layers bfloat16, last hidden state bfloat16"] == 4 * 2560 * 2 + 14
    assert by_name["layers fp8:0, last hidden state int12:64"] == 3 * 2562 + 3840 + 80 + 14
    assert by_name["layers int4:32, top 32 of the target"] == 3 * (1280 + 160) + 32 * 6 + 14
    assert "Qwen3-4B: 3 layers and the teacher of 1,000 tokens" in printed
    with pytest.raises(ValueError, match="needs data, or sizes.tokens"):
        run(tmp_path, folder, "estimate=true", "shape=llama_70b", "features.layers=null")


def test_a_queue_is_prepared_and_trained_on(tmp_path: Path, folder: Path, prepared: Path) -> None:
    source = ["data=answers_jsonl", f"data.path={prepared / 'answers_in.jsonl'}", "features.queue.active=true"]
    run(tmp_path / "out", folder, *source, "features.shard_bytes=20000", f"features.folder={tmp_path / 'queue'}")
    assert len(list((tmp_path / "queue").glob("shard-*.json"))) > 4
    train_on(tmp_path / "out", folder, tmp_path / "run", "batch.features=queue")
    assert read_json(tmp_path / "run" / "run.json")["fingerprints"]["prepared"]["features"]["truth"] == "100.00%"
    assert list((tmp_path / "queue").glob("reader-*")) == []
