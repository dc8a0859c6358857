"""The queue: several producers, readers that wait, back-pressure, and what happens when one side dies."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from data.collate import Collate, Plan
from data.conversations import Conversation
from data.features import FeatureStore, capture, new_header, observe
from data.layout import StoreSettings
from data.module import BatchSettings, PackedData
from data.queue import Producer, QueueSettings, QueueSource, production_order, queue_header
from data.target import Target
from tests.doubles import VOCAB_SIZE, tiny_target

LAYERS = (0, 3)
SHARD = 4000
SILENT = 1.0


def conversations(count: int = 16) -> list[Conversation]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(4, VOCAB_SIZE, (12,), generator=draw).tolist() for _ in range(count)]
    return [Conversation(f"row-{i}", "chat", tokens, [0] * 4 + [1] * 8) for i, tokens in enumerate(made)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def producer(target: Target, folder: Path, said: list[str] | None = None, **asked: Any) -> Producer:
    settings = QueueSettings(True, silent_s=SILENT, **asked)
    rows = conversations()
    queued = [rows[i] for i in production_order(len(rows), settings.seed)]
    layout = StoreSettings().layout(len(LAYERS), target.identity["hidden_size"], target.dtype)
    header = new_header(target.identity, target.dtype, queued, LAYERS, layout)
    header |= {"batch_tokens": 64, "shard_bytes": SHARD}
    plan = queue_header(header, queued, settings)
    assert len(plan) > 4

    def make(start: int, stop: int) -> Any:
        return observe(target, queued[start:stop], LAYERS, 64)

    tell = print if said is None else said.append
    return Producer(folder, header, queued, plan, make, settings, tell)


def reader(target: Target, folder: Path) -> QueueSource:
    return QueueSource(folder, conversations(), target.identity, LAYERS, target.parts, SILENT)


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def shards(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("shard-")) for path in folder.glob("shard-*.safetensors"))


def test_order_is_that_of_the_first_epoch() -> None:
    """One conversation a row, one row a step: the plan's steps are the production's order."""
    plan = Plan([4] * 9, 4, 1, seed=7)
    steps = [plan.batch(step)[0][0] for step in range(9)]
    assert steps == production_order(9, 7)
    assert production_order(9, 8) != steps


def test_two_producers_share_the_work_and_training_sees_what_a_store_gives(target: Target, tmp_path: Path) -> None:
    # A target each: two threads would see each other's forward through its hooks.
    both = [producer(tiny_target(), tmp_path / "queue") for _ in range(2)]
    both[0].name, both[1].name = "first", "second"
    wrote: list[int] = []
    threads = [threading.Thread(target=lambda one=one: wrote.append(one.run())) for one in both]
    for thread in threads:
        thread.start()
    wait_for((tmp_path / "queue" / "header.json").exists)
    source = reader(target, tmp_path / "queue")  # before the producers have ended
    data = PackedData(source, BatchSettings(rows=2, row_tokens=24))
    source.follow(data.plan)
    data.total = data.plan.steps(2)
    found = [data.steps[step] for step in range(data.total)]
    for thread in threads:
        thread.join()
    assert sum(wrote) == len(both[0].plan)
    rows = conversations()
    plain = capture(target, rows, LAYERS, tmp_path / "store", batch_tokens=64)
    collate = Collate(24)
    for step, batch in enumerate(found):
        wanted = collate([[plain[i] for i in row] for row in data.plan.batch(step)], seed=step)
        assert torch.equal(batch.tokens, wanted.tokens)
        torch.testing.assert_close(batch.aux, wanted.aux, atol=2**-6, rtol=2**-6)
    assert source.store.truth is not None
    assert source.store.truth >= 0.99
    whole = FeatureStore.open(tmp_path / "queue", target.identity, parts=target.parts)
    assert sorted(whole.ids) == sorted(one.id for one in rows)
    assert list((tmp_path / "queue").glob("claim-*")) == []
    assert list((tmp_path / "queue").glob("producer-*")) == []
    source.close()


def test_producers_wait_for_readers_and_shards_are_freed(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    one = producer(target, tmp_path, said, ahead=2, free=True)
    thread = threading.Thread(target=one.run)
    thread.start()
    wait_for(lambda: said)
    assert shards(tmp_path) == [0, 1]
    assert "2 shards are ready; producing goes on when readers pass some" in said[0]
    source = reader(target, tmp_path)
    data = PackedData(source, BatchSettings(rows=1, row_tokens=12))
    source.follow(data.plan)
    most = 0
    for step in range(data.plan.steps(1)):
        source.samples([i for row in data.plan.batch(step) for i in row])
        most = max(most, len(shards(tmp_path)))
    thread.join()
    assert most <= 4
    first = data.plan.batch(0)[0]
    source._say(len(one.plan), 0)
    one._free()
    with pytest.raises(ValueError, match="shard 0 was freed after the first epoch: train one epoch"):
        source.samples(first)
    source.close()


def test_a_silent_producer_is_named_and_its_shard_taken_over(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    one = producer(target, tmp_path, said)
    tmp_path.mkdir(exist_ok=True)
    claim = tmp_path / "claim-00001.json"
    claim.write_text(json.dumps({"process": "lost-host-17"}))
    os.utime(claim, (time.time() - 60, time.time() - 60))
    one.run()
    assert shards(tmp_path) == list(range(len(one.plan)))
    assert len(said) == 1
    assert "producer lost-host-17 was silent for 6" in said[0]
    assert "shard 1 is taken over" in said[0]


def test_a_living_producer_keeps_its_claim(target: Target, tmp_path: Path) -> None:
    one = producer(target, tmp_path)
    (tmp_path / "claim-00000.json").write_text("{}")
    assert one._next() == 1


def die_at_the_second_shard(folder: Path) -> None:
    """A producer that is killed as the out-of-memory killer would."""
    one = producer(tiny_target(), folder)
    make = one.make

    def stop(start: int, end: int) -> Any:
        if start > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(start, end)

    one.make = stop
    one.run()


def test_a_trainer_whose_producers_died_ends_with_their_names(target: Target, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_at_the_second_shard, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (name,) = [path.stem.removeprefix("producer-") for path in tmp_path.glob("producer-*.json")]
    source = reader(target, tmp_path)
    order = production_order(16, 0)
    source.samples([order[0]])
    with pytest.raises(RuntimeError, match=rf"shard 1 is missing and no producer lives: {name} \(silent for"):
        source.samples([order[-1], next(i for i in order if source._shard_of[source._place[i]] == 1)])
    source.close()


def test_the_wrong_folder_is_refused(target: Target, tmp_path: Path) -> None:
    producer(target, tmp_path).run()
    with pytest.raises(ValueError, match="holds features of another target: weights"):
        reader(tiny_target(seed=1), tmp_path)
    with pytest.raises(ValueError, match="holds features of other conversations"):
        QueueSource(tmp_path, conversations()[:-1], target.identity, LAYERS)
    with pytest.raises(ValueError, match=r"holds layers \[0, 3\], not \[2\]"):
        QueueSource(tmp_path, conversations(), target.identity, (2,))
    with pytest.raises(ValueError, match="holds other features: .*queue"):
        producer(target, tmp_path, seed=3).run()


def test_settings_name_what_is_wrong() -> None:
    for wrong, message in (
        ({"ahead": 0}, "ahead must be at least 1"),
        ({"free": True}, "free needs features.queue.ahead"),
        ({"silent_s": 0.0}, "silent_s above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            QueueSettings(**wrong)
