"""Two real processes over gloo: the run of one process, sharded weights, lost ranks, signals, other world sizes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator

from tests import checks, ranks
from tests.prepared import overrides, prepare_tiny, trace, train
from training.optimizers import OptimizerSettings
from training.ranks import own_device, stay_on_this_machine
from training.train import TrainerSettings, build_trainer

STEPS = 6
WAIT = 240.0  # seconds for a process on a busy machine; what is bounded is asserted by itself


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("prepared"))


def keys(prepared: Path, **more: object) -> list[str]:
    base = {
        "trainer.max_steps": STEPS,
        "trainer.accumulate": 2,
        "trainer.checkpoint_every": 2,
        "trainer.accelerator": "cpu",
        "batch.row_tokens": 32,
        "batch.rows": 2,
        "acceptance.every": 0,
    }
    return overrides(prepared, **base | more)


def two(prepared: Path, **more: object) -> list[str]:
    return keys(prepared, **{"trainer": "ddp", "trainer.devices": 2} | more)


@pytest.fixture(scope="module")
def alone(prepared, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    assert ranks.finish(ranks.start(out, keys(prepared), 1), WAIT) == [0], ranks.words(out, 0)
    return out


def same_trace(one: Path, other: Path) -> None:
    """Losses and gradients of every step, to float32's rounding of sums in another order."""
    left, right = trace(one), trace(other)
    assert [step for step, _ in left] == [step for step, _ in right] == [str(n) for n in range(1, STEPS + 1)]
    assert [float(v) for _, v in left] == pytest.approx([float(v) for _, v in right], rel=2e-4)


def test_two_ranks_are_one(prepared, alone, tmp_path):
    """Unequal token counts, a last batch with an empty rank, two micro-batches a window: the same loss and gradient,
    the same rows and anchors, nothing twice and nothing left out."""
    codes = ranks.finish(ranks.start(tmp_path, two(prepared), 2), WAIT)
    assert codes == [0, 0], ranks.words(tmp_path, 0) + ranks.words(tmp_path, 1)
    same_trace(alone, tmp_path)
    wanted, first, second = ranks.seen(alone, 0), ranks.seen(tmp_path, 0), ranks.seen(tmp_path, 1)
    assert len(wanted["gradients"]) == STEPS
    for one, a, b in zip(wanted["gradients"], first["gradients"], second["gradients"], strict=True):
        assert a == pytest.approx(one, rel=1e-3, abs=1e-3 * one[0])
        assert a == b
    empty = 0
    for (step, rows, anchors), (_, mine, kept), (_, others, theirs) in zip(
        wanted["ids"], first["ids"], second["ids"], strict=True
    ):
        assert (mine, others) == (rows[0::2], rows[1::2]), f"micro-step {step}"
        assert not {name for row in mine for name in row} & {name for row in others for name in row}
        assert kept[: len(mine)] == anchors[0::2]
        assert theirs[: len(others)] == anchors[1::2]
        empty += not others
    assert empty, "no micro-step left a rank without rows: this shows too little"
    assert sorted(p.name for p in tmp_path.iterdir() if "metrics" in p.name) == ["metrics.csv"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_world_size_goes_on_with_the_same_trace(prepared, alone, tmp_path, before, after):
    def words(count: int, **more: object) -> list[str]:
        return two(prepared, **more) if count == 2 else keys(prepared, **more)

    # Stopped by a time limit would not be exact; by a signal after its fourth step it is.
    started = ranks.start(tmp_path, words(before), before, "signalled_at_step_3" if before == 2 else "signalled_alone")
    codes = ranks.finish(started, WAIT)
    assert codes == [143] * before, ranks.words(tmp_path, 0)
    assert len(trace(tmp_path)) == 4
    assert ranks.finish(ranks.start(tmp_path, words(after), after), WAIT) == [0] * after, ranks.words(tmp_path, 0)
    same_trace(alone, tmp_path)


def test_a_killed_rank_ends_the_other_and_one_process_goes_on(prepared, alone, tmp_path):
    processes = ranks.start(tmp_path, two(prepared), 2, "die_at_step_3")
    processes[1].join(WAIT)
    assert processes[1].exitcode == -9
    assert ranks.finish(processes[:1], 60.0) == [1], "rank 0 must end within a minute of the loss"
    said = ranks.words(tmp_path, 0)
    assert "rank 0 of 2 lost another rank" in said
    assert "last.ckpt, with any number of ranks" in said
    assert ranks.finish(ranks.start(tmp_path, keys(prepared), 1), WAIT) == [0], ranks.words(tmp_path, 0)
    same_trace(alone, tmp_path)


def test_gloo_stays_on_the_machine(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    stay_on_this_machine(2)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    stay_on_this_machine(1)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_a_rank_s_own_device(monkeypatch):
    """That of Lightning: its place in the devices that are named, or counted."""
    for rank, named in ((0, 2), (1, 5)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        for counted in (8, "auto", "8"):
            assert own_device(counted) == rank
        for listed in ([2, 5], "2,5", "2, 5,"):
            assert own_device(listed) == named
    monkeypatch.delenv("LOCAL_RANK")
    assert own_device("3,") == 3


def test_a_target_is_loaded_onto_its_rank_s_own_device(prepared, tmp_path, monkeypatch):
    """The one that Lightning gives the drafter; the GPUs are made up."""

    class Chosen(Exception):
        """Carries the device, and ends the run before anything is loaded."""

    def choose(device: int) -> None:
        raise Chosen(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    for rank, named in ((0, 2), (1, 3)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(Chosen) as chosen:
            train(prepared, tmp_path / str(rank), **{"trainer.devices": "[2,3]"})
        assert chosen.value.args == (named,)


def test_auto_is_the_targets_kind_of_device(monkeypatch, tmp_path):
    """On a machine with another kind, as MPS is, the drafter stays where the target is."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = build_trainer(TrainerSettings(progress=False), OptimizerSettings(), [], tmp_path, [], 1)
    assert isinstance(trainer.accelerator, CPUAccelerator)


def test_a_rank_with_other_settings_is_refused(prepared, tmp_path):
    codes = ranks.finish(ranks.start(tmp_path, two(prepared), 2, "other_seed_on_rank_1"), WAIT)
    assert codes == [1, 1]
    assert "rank 1 of 2 runs something else: seed: 99 there, 0 on rank 0" in ranks.words(tmp_path, 0)


def test_rank_0_says_which_drafter_is_best(prepared, tmp_path):
    """Every rank takes part in gathering the best weights or none does, whatever each measured."""
    words = two(prepared, **{"acceptance.every": 2})
    codes = ranks.finish(ranks.start(tmp_path, words, 2, "other_taus_on_rank_1"), WAIT)
    assert codes == [0, 0], ranks.words(tmp_path, 0) + ranks.words(tmp_path, 1)
    assert [ranks.seen(tmp_path, rank)["tau"] for rank in (0, 1)] == [[3.0], [3.0]]
    assert [path.name for path in tmp_path.glob("best-*")] == [f"best-{STEPS:08d}"]


def test_fsdp2_is_the_same_run(prepared, alone, tmp_path):
    """Sharded weights and optimizer; its checkpoint is an ordinary one."""
    words = two(prepared, trainer="fsdp2")
    codes = ranks.finish(ranks.start(tmp_path, words, 2), WAIT)
    assert codes == [0, 0], ranks.words(tmp_path, 0) + ranks.words(tmp_path, 1)
    same_trace(alone, tmp_path)
    assert ranks.seen(tmp_path, 0)["shards"][0] > 0, "nothing was sharded"
    wanted, found = ranks.seen(alone, 0), ranks.seen(tmp_path, 1)
    for one, a in zip(wanted["gradients"], found["gradients"], strict=True):
        assert a == pytest.approx(one, rel=1e-3, abs=1e-3 * one[0])
    assert found["tau"] == wanted["tau"]


def test_the_command_starts_its_own_ranks(prepared, alone, tmp_path):
    """`headstart train trainer=ddp`: Lightning starts rank 1 from what the command line was; one run folder, one log,
    and a folder whose name has an equals sign."""
    out = tmp_path / "a=b"
    command = [sys.executable, "-m", "headstart", "train", *two(prepared), f'hydra.run.dir="{out}"']
    with open(tmp_path.parent / "command.txt", "w+") as said:
        started = subprocess.Popen(command, cwd=checks.ROOT, stdout=said, stderr=said, start_new_session=True)
        try:
            code = started.wait(3 * WAIT)
        finally:
            with contextlib.suppress(ProcessLookupError):  # rank 1, should it have outlived rank 0
                os.killpg(started.pid, signal.SIGKILL)
        said.seek(0)
        assert code == 0, said.read()
    assert [p.name for p in tmp_path.iterdir()] == ["a=b"]
    assert sorted(p.name for p in out.iterdir() if "metrics" in p.name) == ["metrics.csv"]
    same_trace(alone, out)
    assert json.loads((out / "run.json").read_text())["command"].startswith("headstart train")
