"""Faults that break a run in the middle, each caused for real, with the outcome that docs/faults.md promises."""

import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from lightning import Trainer

from checkpoints.files import read_json, read_tensors
from checkpoints.lock import LOCK, only_run
from data import embedded
from data.features import FeatureStore, capture
from data.target import Target
from tests import checks, ranks
from tests.prepared import LAYERS, overrides, prepare_tiny, trace, train
from training import module
from training import train as train_module
from training.keeper import AtomicCheckpoints, check_whole

WAIT = 240.0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory) -> Path:
    """A run of six steps with a checkpoint at its end; tests copy it."""
    out = tmp_path_factory.mktemp("finished")
    train(prepared, out, **SHORT)
    return out


SHORT = {"trainer.max_steps": 6, "trainer.checkpoint_every": 2, "acceptance.every": 3}


def copied(finished: Path, out: Path) -> Path:
    shutil.copytree(finished, out, dirs_exist_ok=True)
    return out


# NaN


def poisoned(monkeypatch, steps: set[int]) -> None:
    """The loss of these optimizer steps is not a number, gradient included."""
    plain = module.slot_terms

    def terms(drafter, slots, batch, target, objective):
        made = plain(drafter, slots, batch, target, objective)
        if batch.seed in steps:
            made.loss = made.loss * float("nan")
        return made

    monkeypatch.setattr(module, "slot_terms", terms)


def test_nan_steps_are_skipped_and_counted(prepared, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, {1, 4})
    train(prepared, tmp_path, **SHORT)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["skipped"] == 2
    assert all(bool(t.isfinite().all()) for t in saved["state_dict"].values())
    said = capsys.readouterr().out
    assert "step 1 skipped, not finite: loss nan" in said
    assert "conversations c" in said
    losses = [float(loss) for _, loss in trace(tmp_path)]
    assert [math.isfinite(loss) for loss in losses] == [True, False, True, True, False, True]


def test_a_skipped_step_changes_nothing(prepared, tmp_path, monkeypatch):
    """Weights and moments are those of before: one step, skipped, leaves the warm start."""
    keys = SHORT | {"trainer.max_steps": 1}
    train(prepared, tmp_path / "still", **keys | {"optimizer.lr": 0, "optimizer.muon_lr": 0})
    poisoned(monkeypatch, {0})
    train(prepared, tmp_path / "skipped", **keys)
    one, other = (read_tensors(tmp_path / name / "drafter" / "model.safetensors") for name in ("still", "skipped"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nan_without_end_ends_the_run(prepared, tmp_path, monkeypatch):
    poisoned(monkeypatch, set(range(2, 99)))
    with pytest.raises(FloatingPointError, match=r"step 4 skipped.*3 steps in a row, more than trainer.max_skipped 2"):
        train(prepared, tmp_path, **SHORT | {"trainer.max_skipped": 2})
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(bool(t.isfinite().all()) for t in saved["state_dict"].values())


# Memory


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_a_full_memory_says_what_to_lower(prepared, finished, tmp_path, monkeypatch, error):
    """The run ends, its checkpoint is whole, and the same command goes on."""
    plain = module.DrafterModule.training_step

    def step(self, batch, index):
        if batch.seed == 4:
            raise error
        return plain(self, batch, index)

    with monkeypatch.context() as patched:
        patched.setattr(module.DrafterModule, "training_step", step)
        with pytest.raises(torch.OutOfMemoryError, match=r"batch.rows 2.*goes on from .*last.ckpt"):
            train(prepared, tmp_path, **SHORT)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    train(prepared, tmp_path, **SHORT)
    assert trace(tmp_path) == trace(finished)


def test_a_full_memory_on_one_rank_ends_both(prepared, tmp_path):
    keys = SHORT | {"trainer": "ddp", "trainer.devices": 2, "trainer.accelerator": "cpu"}
    words = overrides(prepared, **keys)
    assert ranks.finish(ranks.start(tmp_path, words, 2, "out_of_memory_on_rank_1"), WAIT) == [1, 1]
    assert "out of memory with batch.rows 2" in ranks.words(tmp_path, 1)
    assert "lost another rank" in ranks.words(tmp_path, 0)


# Disk


def limited(limit: int, make) -> None:
    """Run `make` while no file may grow beyond `limit` bytes; SIGXFSZ is ignored by Python, so writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_a_checkpoint_keeps_the_one_before(prepared, finished, tmp_path):
    """No file may grow to a checkpoint's size: the write fails in its middle, as on a full disk. Then there is room."""
    last = copied(finished, tmp_path / "kept") / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    with pytest.raises(OSError, match="could not be written, the one before it is whole"):
        limited(40000, lambda: AtomicCheckpoints().save_checkpoint({"x": torch.ones(100000)}, last))
    assert last.read_bytes() == before
    assert [p.name for p in last.parent.iterdir()] == ["last.ckpt"]
    with pytest.raises(OSError, match="could not be written, there is none yet"):
        limited(len(before) // 2, lambda: train(prepared, tmp_path / "run", **SHORT))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    train(prepared, tmp_path / "run", **SHORT)
    assert trace(tmp_path / "run") == trace(finished)


def test_a_disk_that_is_full_while_capturing_is_resumed(prepared, tmp_path):
    """The shard that did not fit is absent, not torn; with room again the store is the uninterrupted one."""
    from data.conversations import read_conversations

    target = Target.load(str(prepared / "target"), "float32")
    texts = read_conversations(prepared / "conversations.jsonl")
    bytes_each = {"dtype": "float32", "shard_bytes": 20000}
    whole = capture(target, texts, LAYERS, tmp_path / "whole", **bytes_each)
    sizes = sorted(p.stat().st_size for p in (tmp_path / "whole").glob("*.safetensors"))
    assert sizes[0] < sizes[-1]
    with pytest.raises(Exception, match=r"(?i)too large|no space|write"):
        limited(sizes[-1] - 1, lambda: capture(target, texts, LAYERS, tmp_path / "full", **bytes_each))
    left = {p.name for p in (tmp_path / "full").iterdir()}
    assert not any(name.startswith(".tmp") for name in left)
    assert len([name for name in left if name.endswith(".safetensors")]) < len(sizes)
    capture(target, texts, LAYERS, tmp_path / "full", **bytes_each)
    assert FeatureStore.open(tmp_path / "full").ids == whole.ids
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "full" / path.name).read_bytes()


def test_a_flipped_bit_in_a_checkpoint_is_refused(prepared, finished, tmp_path):
    out = copied(finished, tmp_path)
    last = out / "checkpoints" / "last.ckpt"
    check_whole(last)
    found = bytearray(last.read_bytes())
    found[len(found) // 2] ^= 1
    last.write_bytes(bytes(found))
    with pytest.raises(ValueError, match=r"last.ckpt is damaged"):
        train(prepared, out, **SHORT)


def test_a_torn_checkpoint_is_refused(prepared, finished, tmp_path):
    out = copied(finished, tmp_path)
    last = out / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"last.ckpt is damaged"):
        train(prepared, out, **SHORT)


def test_conversations_that_are_not_the_stores_are_refused(prepared, tmp_path):
    """A byte of conversations.jsonl changed: ids agree, tokens do not."""
    folder = tmp_path / "prepared"
    shutil.copytree(prepared, folder)
    path = folder / "conversations.jsonl"
    text = path.read_text()
    assert '"tokens":[' in text
    start = text.index('"tokens":[') + len('"tokens":[')
    stop = text.index(",", start)
    path.write_text(text[:start] + str(int(text[start:stop]) % 50 + 5) + text[stop:])
    with pytest.raises(ValueError, match="the features are not those of conversations.jsonl"):
        train(folder, tmp_path / "out", **SHORT | {"target.name": folder / "target"})


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    """A file where the cache should be: as root, which tests may be, permissions stop nobody."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "hub_reachable", lambda: False)
    with pytest.raises(ValueError, match=r"cache .* cannot be written .*HEADSTART_CACHE"):
        embedded.embedded_folder()


def test_a_read_only_store_is_enough_to_train(prepared, tmp_path, monkeypatch):
    """Training opens the prepared folder for reading alone."""
    opened = []
    plain = os.open

    def watching(path, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(prepared)):
            opened.append(path)
        return plain(path, flags, *rest, **named)

    before = {p: p.stat().st_mtime_ns for p in prepared.rglob("*")}
    monkeypatch.setattr(os, "open", watching)
    train(prepared, tmp_path, **SHORT)
    assert opened == []
    assert {p: p.stat().st_mtime_ns for p in prepared.rglob("*")} == before


# Two runs, clocks, signals


def test_two_runs_in_one_folder_are_refused(prepared, tmp_path):
    with only_run(tmp_path):
        code = f"from checkpoints.lock import only_run\nwith only_run({str(tmp_path)!r}): pass"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=checks.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f"another run holds {tmp_path} (process {os.getpid()} on" in done.stderr
        with pytest.raises(ValueError, match="another run holds"):
            train(prepared, tmp_path, **SHORT)
    assert not (tmp_path / "checkpoints").exists()
    with only_run(tmp_path):
        pass


def test_a_killed_holder_leaves_no_lock(tmp_path):
    code = (
        "import time\nfrom checkpoints.lock import only_run\n"
        f"with only_run({str(tmp_path)!r}):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=checks.ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    (tmp_path / ".tmp-drafter").mkdir()
    with only_run(tmp_path):
        assert not (tmp_path / ".tmp-drafter").exists(), "what the killed run left half written"


@pytest.mark.parametrize("skew", [-10 * 365 * 86400, 365 * 86400])
def test_clocks_decide_nothing(prepared, finished, tmp_path, skew):
    """Every file of run and data is ten years old, or from next year, as on a shared file system whose clock differs:
    the finished run is known as finished, its lock is free, its store is whole."""
    out = copied(finished, tmp_path / "run")
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    moment = time.time() + skew
    (out / LOCK).write_text("process 1 on elsewhere")
    for path in [*out.rglob("*"), *data.rglob("*")]:
        os.utime(path, (moment, moment))
    before = (out / "checkpoints" / "last.ckpt").read_bytes()
    found = train(prepared, out, **SHORT)
    assert found["tau"] == max(one["tau"] for one in read_json(finished / "learning_curve.json"))
    assert (out / "checkpoints" / "last.ckpt").read_bytes() == before, "nothing was trained again"
    target = Target.load(str(prepared / "target"), "float32")
    assert len(FeatureStore.open(data / "features", target.identity)) == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_writes_a_checkpoint_and_exits_with_143(prepared, tmp_path, workers):
    """As SLURM preempts, which signals loader processes too: the step that runs is finished and saved, nothing is
    measured, the same command goes on."""
    long = {"trainer.max_steps": 100000, "trainer.checkpoint_every": 100000, "acceptance.every": 0}
    words = overrides(prepared, **SHORT | long | {"batch.workers": workers})
    out = tmp_path / "run"
    (process,) = ranks.start(out, words, 1)
    deadline = time.monotonic() + WAIT
    while not (out / "metrics.csv").exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.pid is not None
    loaders = psutil.Process(process.pid).children(recursive=True)
    assert len(loaders) >= workers
    for pid in [*(one.pid for one in loaders), process.pid]:
        os.kill(pid, signal.SIGTERM)
    assert ranks.finish([process], WAIT) == [143], ranks.words(out, 0)
    assert "stopped by a signal after step" in ranks.words(out, 0)
    step = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert step == len(trace(out)) > 0
    assert not list(out.glob("best-*"))


def test_a_signal_in_the_last_step_loses_no_measurement(prepared, tmp_path, monkeypatch):
    """No run goes on from the last step, so it is measured all the same."""
    plain = module.slot_terms

    def terms(drafter, slots, batch, target, objective):
        if batch.seed == SHORT["trainer.max_steps"] - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(drafter, slots, batch, target, objective)

    monkeypatch.setattr(module, "slot_terms", terms)
    keys = SHORT | {"acceptance.every": 0}
    with pytest.raises(SystemExit) as ended:
        train(prepared, tmp_path, **keys)
    assert ended.value.code == 143
    assert train(prepared, tmp_path, **keys)["step"] == SHORT["trainer.max_steps"]


def test_training_from_a_store_keeps_no_conversation_in_memory(prepared, tmp_path, monkeypatch):
    read, held = train_module.first_conversations, []

    def first(folder, limit):
        held.append(read(folder, limit))
        return held[-1]

    def fit(*_, **__):
        assert held == [[]]
        raise InterruptedError

    monkeypatch.setattr(train_module, "first_conversations", first)
    monkeypatch.setattr(Trainer, "fit", fit)
    with pytest.raises(InterruptedError):
        train(prepared, tmp_path, **SHORT)
    assert read_json(tmp_path / "run.json")["fingerprints"]["prepared"]["conversations"] == 12
