"""The queue: several producers, readers that wait, back-pressure, and what happens when one side dies."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import data.features
import data.queue
from checkpoints.files import read_json, sha256_file, write_json
from data.collate import Collate, Plan, production_order
from data.conversations import Conversation
from data.convert import convert
from data.features import FeatureStore, capture, new_header, observe
from data.layout import StoreSettings
from data.module import BatchSettings, PackedData
from data.queue import Producer, QueueSettings, QueueSource, living, queue_header
from data.target import Target
from tests.doubles import VOCAB_SIZE, tiny_target
from training.train import feature_source

LAYERS = (0, 3)
SHARD = 4000
SILENT = 1.0  # where something dies; elsewhere nothing may seem dead on a slow machine


def conversations(count: int = 16) -> list[Conversation]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(4, VOCAB_SIZE, (12,), generator=draw).tolist() for _ in range(count)]
    return [Conversation(f"row-{i}", "chat", tokens, [0] * 4 + [1] * 8) for i, tokens in enumerate(made)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def producer(target: Target, folder: Path, said: list[str] | None = None, **asked: Any) -> Producer:
    settings = QueueSettings(True, **asked)
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
    return QueueSource(folder, conversations(), target.identity, LAYERS, target.parts)


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
    packed = PackedData(source, BatchSettings(rows=2, row_tokens=24))
    packed.total = packed.plan.steps(2)
    source.follow(packed.plan, packed.total)
    found = [packed.steps[step] for step in range(packed.total)]
    for thread in threads:
        thread.join(60)
    assert sum(wrote) == len(both[0].plan)
    rows = conversations()
    plain = capture(target, rows, LAYERS, tmp_path / "store", batch_tokens=64)
    collate = Collate(24, dtype=None)
    for step, batch in enumerate(found):
        wanted = collate([[plain[i] for i in row] for row in packed.plan.batch(step)], seed=step)
        assert torch.equal(batch.tokens, wanted.tokens)
        torch.testing.assert_close(batch.aux, wanted.aux, atol=2**-6, rtol=2**-6)
    assert source.store.truth is not None
    assert source.store.truth >= 0.99
    whole = FeatureStore.open(tmp_path / "queue", target.identity, parts=target.parts)
    assert whole.ids == [one.id for one in rows]
    assert list((tmp_path / "queue").glob("claim-*")) == []
    assert list((tmp_path / "queue").glob("producer-*")) == []
    source.close()


def test_producers_wait_for_readers_and_shards_are_freed(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    one = producer(tiny_target(), tmp_path, said, ahead=2, free=True)  # its own, for tests that follow a failed one
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    wait_for(lambda: said)
    assert shards(tmp_path) == [0, 1]
    assert "2 shards are ready; producing goes on when readers pass some" in said[0]
    source = reader(target, tmp_path)
    packed = PackedData(source, BatchSettings(rows=1, row_tokens=12))
    source.follow(packed.plan, packed.plan.steps(1))
    most = 0
    for step in range(packed.plan.steps(1)):
        source.samples([i for row in packed.plan.batch(step) for i in row])
        most = max(most, len(shards(tmp_path)))
        # A deleted shard that is still mapped takes its space for the whole run.
        assert all(number >= source._said[0] for number in source.store._readers)
    thread.join(60)
    assert not thread.is_alive()
    assert most <= 4
    first = packed.plan.batch(0)[0]
    source._say(len(one.plan), 0)
    one._free()
    refusal = "shard 0 was freed: a queue with free=true serves one run, .* it cannot be resumed"
    with pytest.raises(ValueError, match=refusal):
        source.samples(first)
    source.close()
    again = reader(target, tmp_path)
    with pytest.raises(ValueError, match=refusal):
        again.follow(packed.plan, packed.plan.steps(1))
    again.close()


def test_a_run_beyond_the_epoch_that_is_kept_is_refused(target: Target, tmp_path: Path) -> None:
    producer(target, tmp_path, ahead=100, free=True).run()
    source = reader(target, tmp_path)
    plan = PackedData(source, BatchSettings(rows=1, row_tokens=12)).plan
    with pytest.raises(ValueError, match=r"keeps one epoch, 16 micro-steps, the run takes 18: set trainer\.max_steps"):
        source.follow(plan, 18)
    source.follow(plan, 16)


def test_loader_processes_free_what_they_have_passed(target: Target, tmp_path: Path) -> None:
    """The trainer's own process reads the first batch, for a warm start and check 4, and nothing later."""
    one = producer(target, tmp_path, ahead=100, free=True)
    one.run()
    source = reader(target, tmp_path)
    packed = PackedData(source, BatchSettings(rows=1, row_tokens=12, workers=1))
    assert len(packed.first.tokens) == 1
    packed.total = packed.plan.steps(1)
    source.follow(packed.plan, packed.total)
    assert source.store.truth is not None, "check 4 must not be left to a loader process"
    assert list(tmp_path.glob("reader-*")) == []
    assert len(list(packed.train_dataloader())) == packed.total
    assert len(list(tmp_path.glob("reader-*"))) == 1
    one._free()
    assert shards(tmp_path) == [len(one.plan) - 1]


def test_a_silent_producer_is_named_and_its_shard_taken_over(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    one = producer(target, tmp_path, said, silent_s=SILENT)
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


def test_of_several_takers_of_a_dead_claim_one_has_it(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have seen the dead claim; the first takes it over while the second still looks, and a third comes in whenever
    the second has moved a file."""
    said: list[str] = []
    first, second, third = (producer(target, tmp_path, said) for _ in range(3))
    first.name, second.name, third.name = "first", "second", "third"
    claim, real_age, real_rename = tmp_path / "claim-00001.json", data.queue.age, os.rename
    claim.write_text(json.dumps({"process": "dead"}))
    os.utime(claim, (time.time() - 600, time.time() - 600))
    holders: list[Producer] = []

    def try_it(one: Producer) -> None:
        holders.extend([one] if one._take(1) else [])

    def look(path: Path, folder: Path) -> float | None:
        old = real_age(path, folder)
        if path == claim:
            monkeypatch.setattr(data.queue, "age", real_age)
            try_it(first)
        return old

    def move(source: Any, place: Any) -> None:
        real_rename(source, place)
        if holders == [first]:
            try_it(third)

    monkeypatch.setattr(data.queue, "age", look)
    monkeypatch.setattr(os, "rename", move)
    try_it(second)
    try_it(third)
    assert holders == [first]
    assert read_json(tmp_path / "claim-00001-1.json") == {"process": "first"}
    assert len(said) == 1
    assert "producer dead was silent" in said[0]


def test_a_producer_that_was_overtaken_leaves_the_shard(target: Target, tmp_path: Path) -> None:
    """It slept for longer than silent_s; the one that took its shard over then dies, and it takes it back."""
    said: list[str] = []
    one = producer(target, tmp_path, said)
    make, other = one.make, tmp_path / "claim-00000-1.json"

    def slow(start: int, stop: int) -> Any:
        if start == 0 and not other.exists():
            other.write_text(json.dumps({"process": "other"}))
            os.utime(other, (time.time() - 600, time.time() - 600))
        return make(start, stop)

    one.make = slow
    assert one.run() == len(one.plan)
    assert len(said) == 1
    assert "producer other was silent for 6" in said[0]
    assert list(tmp_path.glob("claim-*")) == []
    assert len(FeatureStore.open(tmp_path, target.identity, parts=target.parts)) == 16


def test_a_finished_queue_is_a_store(target: Target, tmp_path: Path) -> None:
    """In the conversations' own order: for training with features=store and for converting."""
    rows = conversations()
    producer(target, tmp_path / "features", seed=5).run()
    assert production_order(16, 5) != list(range(16))
    drafter: Any = SimpleNamespace(needs=SimpleNamespace(layers=LAYERS))
    source = feature_source(BatchSettings(), tmp_path, target, drafter, rows)
    assert source.ids == [one.id for one in rows]
    for index, sample in enumerate(source.samples(range(16))):
        assert (sample.id, sample.tokens.tolist()) == (rows[index].id, rows[index].tokens)
    assert feature_source(BatchSettings(), tmp_path, target, drafter, rows[:3]).ids == ["row-0", "row-1", "row-2"]
    changed = [*rows[:-1], Conversation("row-15", "chat", rows[0].tokens, rows[0].turns)]
    for others in (rows[::-1], changed):
        with pytest.raises(ValueError, match=r"the features are not those of conversations\.jsonl"):
            feature_source(BatchSettings(), tmp_path, target, drafter, others)
    made = convert(target, tmp_path / "features", tmp_path / "int8", "int8")
    assert "queue" not in made.header
    assert made.holds(rows)
    assert made.ids == [one.id for one in rows]
    plain = capture(target, rows, LAYERS, tmp_path / "plain", batch_tokens=64)
    torch.testing.assert_close(made[7].aux, plain[7].aux.float(), atol=0.05, rtol=0.05)
    assert made[7].tokens.tolist() == rows[7].tokens


def test_a_freed_queue_is_no_store(target: Target, tmp_path: Path) -> None:
    one = producer(target, tmp_path, ahead=100, free=True)
    one.run()
    write_json(tmp_path / "reader-stays.json", {"passed": 2, "wants": 2})
    one._free()
    with pytest.raises(ValueError, match="shard-00000.safetensors in .* was freed once it had been read"):
        FeatureStore.open(tmp_path)


def test_a_shards_checksum_is_of_what_was_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer's file has the shard's name at the moment of hashing."""

    def meanwhile(path: Path) -> str:
        (tmp_path / f"shard-{path.stem[-5:]}.safetensors").write_bytes(b"another's")
        return sha256_file(path)

    monkeypatch.setattr(data.features, "sha256_file", meanwhile)
    producer(target, tmp_path).run()
    monkeypatch.undo()
    assert len(FeatureStore.open(tmp_path, target.identity, parts=target.parts)) == 16


def test_files_that_vanish_are_skipped(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ends between the look at its file and its reading; a shard that another producer frees first."""
    one = producer(target, tmp_path, ahead=100, free=True)
    one.run()
    gone, stays = tmp_path / "reader-gone.json", tmp_path / "reader-stays.json"
    for path in (gone, stays):
        write_json(path, {"passed": 2, "wants": 2})

    def ends(path: Path, folder: Path) -> float:
        gone.unlink(missing_ok=True)
        return 0.0

    monkeypatch.setattr(data.queue, "age", ends)
    assert list(living(tmp_path, "reader", 60.0)[0]) == ["stays"]
    stays.write_text("{")
    with pytest.raises(ValueError, match=r"reader-stays\.json is not whole JSON"):
        living(tmp_path, "reader", 60.0)
    monkeypatch.undo()
    write_json(stays, {"passed": 2, "wants": 2})

    def freed_first(path: Path, value: Any) -> None:
        write_json(path, value)
        path.with_suffix(".safetensors").unlink()

    monkeypatch.setattr(data.queue, "write_json", freed_first)
    one._free()
    assert shards(tmp_path) == list(range(2, len(one.plan)))


def test_a_silent_reader_holds_nobody_up(target: Target, tmp_path: Path) -> None:
    one = producer(target, tmp_path, ahead=2)
    for name in ("dead", "lives"):
        write_json(tmp_path / f"reader-{name}.json", {"passed": 0 if name == "dead" else 3, "wants": 3})
    assert (one._passed(), one._limit()) == (0, 4)
    dead = tmp_path / "reader-dead.json"
    os.utime(dead, (time.time() - 600, time.time() - 600))
    assert (one._passed(), one._limit()) == (3, 5)


def die_at_the_second_shard(folder: Path) -> None:
    """A producer that is killed as the out-of-memory killer would."""
    one = producer(tiny_target(), folder, silent_s=SILENT)
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
    process.join(60)
    if process.is_alive():
        process.kill()
        pytest.fail("the producer neither wrote nor died within a minute")
    assert process.exitcode == -signal.SIGKILL
    (name,) = [path.stem.removeprefix("producer-") for path in tmp_path.glob("producer-*.json")]
    source = reader(target, tmp_path)
    assert source.silent_s == SILENT, "the producers' own, by the header"
    order = production_order(16, 0)
    source.samples([order[0]])
    with pytest.raises(RuntimeError, match=rf"shard 1 is missing and no producer lives: {name} \(silent for"):
        source.samples([order[-1], next(i for i in order if source.store.shard_of(i) == 1)])
    source.close()


def test_the_wrong_folder_is_refused(target: Target, tmp_path: Path) -> None:
    producer(target, tmp_path).run()
    with pytest.raises(ValueError, match="holds features of another target: weights"):
        reader(tiny_target(seed=1), tmp_path)
    with pytest.raises(ValueError, match="holds features of other conversations"):
        QueueSource(tmp_path, conversations()[:-1], target.identity, LAYERS)
    with pytest.raises(ValueError, match="holds features of other conversations"):
        QueueSource(tmp_path, conversations()[::-1], target.identity, LAYERS)
    with pytest.raises(ValueError, match=r"holds layers \[0, 3\], not \[2\]"):
        QueueSource(tmp_path, conversations(), target.identity, (2,))
    with pytest.raises(ValueError, match="holds other features: .*queue"):
        producer(target, tmp_path, seed=3).run()
    capture(target, conversations(), LAYERS, tmp_path / "store", batch_tokens=64)
    with pytest.raises(ValueError, match=r"store is no queue's store: train with batch\.features=store"):
        reader(target, tmp_path / "store")


def test_settings_name_what_is_wrong() -> None:
    for wrong, message in (
        ({"ahead": 0}, "ahead must be at least 1"),
        ({"free": True}, "free needs features.queue.ahead"),
        ({"silent_s": 0.0}, "silent_s above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            QueueSettings(**wrong)
