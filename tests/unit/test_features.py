"""The feature store: what it holds, how it resumes, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import data.features
from checkpoints.files import read_json
from data.conversations import Conversation
from data.features import (
    FeatureStore,
    capture,
    estimate_bytes,
    fill,
    length_batches,
    observe,
)
from data.layout import Sample, plan_of, shard_plan
from data.target import Features, Target
from tests.doubles import HIDDEN_SIZE, VOCAB_SIZE, tiny_target

LAYERS = (0, 2, 3)
SMALL = 16_000


def conversations(count: int = 12, seed: int = 0) -> list[Conversation]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(6, 40, (1,), generator=draw))
        tokens = torch.randint(4, VOCAB_SIZE - 3, (length,), generator=draw).tolist()
        made.append(Conversation(f"row-{i}", "chat", tokens, [0] * (length // 2) + [1] * (length - length // 2)))
    return made


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_store_gives_what_the_target_shows(target: Target, tmp_path: Path) -> None:
    rows = conversations()
    store = capture(target, rows, LAYERS, tmp_path, batch_tokens=90, dtype="float32", shard_bytes=SMALL)
    assert store.header["shards"] > 2
    assert store.ids == [row.id for row in rows]
    assert store.lengths == [len(row.tokens) for row in rows]
    assert len(store) == len(rows)
    for index, row in enumerate(rows):
        sample = store[index]
        with torch.inference_mode():
            own = target.model(input_ids=torch.tensor([row.tokens]), output_hidden_states=True)
        assert sample.tokens.tolist() == row.tokens
        assert sample.turns.tolist() == row.turns
        assert sample.tokens.dtype == sample.turns.dtype == sample.top1.dtype == torch.int64
        for place, layer in enumerate(LAYERS):
            torch.testing.assert_close(sample.aux[:, place], own.hidden_states[layer + 1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sample.last, own.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        assert (sample.top1 == own.logits[0].argmax(-1)).float().mean() > 0.95
        torch.testing.assert_close(sample.lse, own.logits[0].logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_online_features_are_the_stored_ones(target: Target, tmp_path: Path) -> None:
    rows = conversations()
    store = capture(target, rows, LAYERS, tmp_path, batch_tokens=90)
    for index, sample in observe(target, rows, LAYERS, batch_tokens=90):
        stored = store[index]
        for name in ("tokens", "turns", "aux", "last", "top1", "lse"):
            assert torch.equal(getattr(sample, name), getattr(stored, name)), name


def test_layer_subset_and_foreign_layer(target: Target, tmp_path: Path) -> None:
    capture(target, conversations(), LAYERS, tmp_path)
    whole, part = FeatureStore.open(tmp_path), FeatureStore.open(tmp_path, target.identity, (2,))
    assert torch.equal(part[3].aux, whole[3].aux[:, 1:2])
    with pytest.raises(ValueError, match=r"holds layers \[0, 2, 3\], not \[1\]"):
        FeatureStore.open(tmp_path, None, (1, 2))


def test_index_beyond_the_end(target: Target, tmp_path: Path) -> None:
    store = capture(target, conversations(3), LAYERS, tmp_path)
    with pytest.raises(IndexError):
        store[3]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("shard_bytes", [SMALL, 1 << 28])
def test_estimate_is_within_two_percent(target: Target, tmp_path: Path, dtype: str, shard_bytes: int) -> None:
    rows = conversations(60)
    capture(target, rows, LAYERS, tmp_path, dtype=dtype, shard_bytes=shard_bytes)
    real = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert abs(estimate_bytes(rows, len(LAYERS), HIDDEN_SIZE, dtype, shard_bytes) / real - 1) < 0.02


def test_plan_and_batches_by_hand() -> None:
    assert shard_plan([3, 3, 5, 9, 1], 10, 60) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert length_batches([5, 2, 9, 2, 4], 10) == [[1, 3], [4, 0], [2]]


def test_other_target_is_refused(target: Target, tmp_path: Path) -> None:
    rows = conversations()
    capture(target, rows, LAYERS, tmp_path)
    other = tiny_target(seed=1)
    with pytest.raises(ValueError, match="weights"):
        FeatureStore.open(tmp_path, other.identity)
    with pytest.raises(ValueError, match="weights"):
        capture(other, rows, LAYERS, tmp_path)
    with pytest.raises(ValueError, match="data"):
        capture(target, conversations(seed=1), LAYERS, tmp_path)
    with pytest.raises(ValueError, match="own argmax on only"):
        FeatureStore.open(tmp_path, None, None, parts=other.parts)


def test_damaged_shards_are_refused_by_name(target: Target, tmp_path: Path) -> None:
    rows = conversations()
    capture(target, rows, LAYERS, tmp_path, shard_bytes=SMALL)
    path = tmp_path / "shard-00001.safetensors"
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-5] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"shard-00001.safetensors .* damaged"):
        FeatureStore.open(tmp_path)
    lazy = FeatureStore.open(tmp_path, verify="lazy")
    assert lazy[0].id == "row-0"
    with pytest.raises(ValueError, match=r"shard-00001.safetensors .* damaged"):
        [lazy[i] for i in range(len(lazy))]
    with pytest.raises(ValueError, match=r"shard-00001.safetensors .* damaged"):
        capture(target, rows, LAYERS, tmp_path, shard_bytes=SMALL)
    path.write_bytes(good[:-100])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors .* torn"):
        FeatureStore.open(tmp_path, verify="lazy")
    path.write_bytes(good)
    beside = tmp_path / "shard-00001.json"
    kept = beside.read_bytes()
    beside.write_text(json.dumps(json.loads(kept) | {"header": "0" * 16}))
    with pytest.raises(ValueError, match=r"shard-00001.safetensors .* foreign"):
        FeatureStore.open(tmp_path)
    beside.unlink()
    with pytest.raises(ValueError, match=r"shard-00001.safetensors .* unfinished"):
        FeatureStore.open(tmp_path)
    capture(target, rows, LAYERS, tmp_path, shard_bytes=SMALL)
    assert path.read_bytes() == good
    assert beside.read_bytes() == kept


def test_a_conversation_is_compared_when_it_is_read(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the whole shard: of a large store each process would read every shard to use a few rows of it."""
    rows = conversations()
    capture(target, rows, LAYERS, tmp_path, dtype="float32")
    path = tmp_path / "shard-00000.safetensors"
    good = path.read_bytes()
    kept = read_json(tmp_path / "shard-00000.json")
    assert len(kept["crc32"]) == len(set(kept["crc32"])) == len(rows)
    monkeypatch.setattr("data.features.sha256_file", lambda path: pytest.fail("a lazy store hashed a shard"))
    aux = FeatureStore.open(tmp_path, verify="lazy")[5].aux.numpy().tobytes()
    flipped = bytearray(good)
    flipped[good.index(aux)] ^= 1
    path.write_bytes(flipped)
    for layers in (None, (3,)):  # the first layer's bytes: also where it is not asked for
        lazy = FeatureStore.open(tmp_path, None, layers, "lazy")
        assert [lazy[i].id for i in range(len(rows)) if i != 5] == [one.id for one in rows if one.id != "row-5"]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"shard-00000.safetensors .* damaged: the checksum of row-5 is not"):
                lazy[5]
    path.write_bytes(good.replace(b'"top1"', b'"top2"'))
    with pytest.raises(ValueError, match="damaged"):
        FeatureStore.open(tmp_path, verify="lazy")[0]
    path.write_bytes(b"\xff" * 9 + good[9:])
    with pytest.raises(ValueError, match="damaged"):
        FeatureStore.open(tmp_path, verify="lazy")[0]


def test_a_store_without_checksums_of_conversations_is_compared_by_shard(target: Target, tmp_path: Path) -> None:
    capture(target, conversations(), LAYERS, tmp_path)
    beside, path = tmp_path / "shard-00000.json", tmp_path / "shard-00000.safetensors"
    kept = read_json(beside)
    del kept["crc32"]
    beside.write_text(json.dumps(kept))
    assert FeatureStore.open(tmp_path, verify="lazy")[3].id == "row-3"
    flipped = bytearray(path.read_bytes())
    flipped[-5] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match="damaged: its sha256 is not the one written"):
        FeatureStore.open(tmp_path, verify="lazy")[0]


def test_no_more_shards_are_open_than_a_system_maps(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = conversations()
    monkeypatch.setattr("data.features.OPEN_SHARDS", 2)
    store = capture(target, rows, LAYERS, tmp_path, shard_bytes=SMALL)
    assert store.header["shards"] > 3
    order = [*range(len(rows)), *range(len(rows) - 1, -1, -1)]
    for index in order:
        assert store[index].tokens.tolist() == rows[index].tokens
        assert len(store._readers) <= 2
    assert list(store._readers)[-1] == 0


class Misreads(Target):
    """A planted fault: the last hidden state is taken before the final norm."""

    def forward(self, tokens, layers, attention_mask=None, positions=None, cache=None):  # type: ignore[no-untyped-def]
        wanted: Sequence[int] = sorted({*layers, 4})
        found = super().forward(tokens, wanted, attention_mask, positions, cache)
        aux = found.aux[:, :, [wanted.index(i) for i in layers]]
        return Features(aux, found.aux[:, :, -1]) if self.armed else Features(aux, found.last)

    armed = False


def test_a_pre_norm_last_hidden_state_fails_check_4(tmp_path: Path) -> None:
    good = tiny_target()
    faulty = Misreads(good.model, good.tokenizer, "tiny")
    faulty.armed = True
    with pytest.raises(ValueError, match="own argmax on only"):
        capture(faulty, conversations(), LAYERS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_overflow_is_an_error_naming_layer_and_dtype(tmp_path: Path) -> None:
    target = tiny_target("granite", embedding_multiplier=1e6)
    with pytest.raises(ValueError, match=r"row-\d+: output of layer 0 reaches .* beyond float16"):
        capture(target, conversations(), LAYERS, tmp_path / "half", dtype="float16")
    assert len(capture(target, conversations(), LAYERS, tmp_path / "brain", dtype="auto")) == 12


KILLED = """
import sys, time
from pathlib import Path
from data import features
from tests.doubles import tiny_target
from tests.unit.test_features import LAYERS, SMALL, conversations
def stop(tokens):
    print("shard", flush=True)
    time.sleep(600)
features.capture(tiny_target(), conversations(), LAYERS, Path(sys.argv[1]), shard_bytes=SMALL, progress=stop)
"""


def test_killed_capture_resumes_to_the_same_bytes(target: Target, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = conversations()
    capture(target, rows, LAYERS, whole, shard_bytes=SMALL)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(killed)], cwd=root, env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"shard\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (killed / "shard-00000.json").exists()
    assert not (killed / "shard-00001.json").exists()
    # A kill may also strike between a shard and its sidecar, or inside a write.
    (killed / "shard-00001.safetensors").write_bytes(b"half a shard")
    (killed / ".tmp-0-shard-00002.safetensors").write_bytes(b"half a file")
    first = (killed / "shard-00000.safetensors").stat().st_mtime_ns
    time.sleep(0.01)
    capture(target, rows, LAYERS, killed, shard_bytes=SMALL)
    assert files(killed) == files(whole)
    assert (killed / "shard-00000.safetensors").stat().st_mtime_ns == first


def test_a_shard_is_made_while_the_one_before_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain = threading.Event(), data.features.finish_shard
    whole = capture(target, conversations(), LAYERS, tmp_path / "whole", shard_bytes=SMALL)

    def make(start: int, stop: int) -> Iterator[tuple[int, Sample]]:
        if start:
            made.set()
        return ((index, whole[start + index]) for index in range(stop - start))

    def finish(folder: Path, number: int, *rest: Any) -> None:
        assert made.wait(60), "shard 0 is written before shard 1 is made"
        plain(folder, number, *rest)

    monkeypatch.setattr("data.features.finish_shard", finish)
    folder, told = tmp_path / "filled", list[int]()
    folder.mkdir()
    plan = plan_of(conversations(), whole.layout, SMALL)
    fill(folder, whole.header, conversations(), plan, make, told.append)
    assert files(folder) == files(whole.folder)
    assert told == [sum(len(one.tokens) for one in conversations()[start:stop]) for start, stop in plan]


def test_a_shard_that_cannot_be_written_ends_the_capture(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.features.write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        capture(target, conversations(), LAYERS, tmp_path, shard_bytes=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["header.json"]


def test_header_says_what_the_store_holds(target: Target, tmp_path: Path) -> None:
    capture(target, conversations(), LAYERS, tmp_path)
    header = read_json(tmp_path / "header.json")
    assert header["layers"] == [0, 2, 3]
    assert header["layer_convention"] == "0 = the first decoder layer's output"
    assert header["last"] == "after the final norm"
    assert (header["dtype"], header["last_dtype"], header["target_dtype"]) == ("bfloat16", "float16", "float32")
    assert header["identity"] == target.identity
