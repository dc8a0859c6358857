"""What the processes of a distributed run must agree on, and how a run ends that another process has left.

Everything here does nothing in a run of one process.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# What gloo, NCCL and the rendezvous store say when the other side is gone; torch has no exception class of its own.
GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|socket|timed? ?out"
    r"|remote (process|end)|nccl|gloo|watchdog|heartbeat|rank .* (failed|exited)|process group",
    re.IGNORECASE,
)


NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


class RankLost(RuntimeError):
    """Another process of the run has ended or no longer answers."""


def launched_outside() -> bool:
    """Whether torchrun or srun started this process, rather than Lightning."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_NTASKS" in os.environ


def stay_on_this_machine(nodes: int) -> None:
    """On one node let gloo's connections use the loopback interface alone, unless the environment says otherwise."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if nodes == 1 and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def own_device(devices: int | str | list[int]) -> int:
    """The GPU of this process, of those that trainer.devices names ([2, 3] or "2,3") or counts."""
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    named = devices.split(",") if isinstance(devices, str) else devices
    if isinstance(named, int) or (isinstance(devices, str) and "," not in devices):
        return rank
    return [int(one) for one in named if str(one).strip()][rank]


def several() -> bool:
    """Whether a process group of more than one rank is up."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def all_gathered(value: Any) -> list[Any]:
    """Every rank's value, in rank order; empty for one process. Every rank must call it."""
    if not several():
        return []
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def agree(mine: Mapping[str, Any]) -> None:
    """ValueError on every rank, naming what differs from rank 0, unless all ranks hold the same values."""
    held = all_gathered(dict(mine))
    for rank, theirs in enumerate(held):
        differing = [f"{key}: {theirs.get(key)!r} there, {held[0][key]!r} on rank 0" for key in held[0]]
        differing = [line for key, line in zip(held[0], differing, strict=True) if theirs.get(key) != held[0][key]]
        if differing:
            raise ValueError(f"rank {rank} of {len(held)} runs something else: {'; '.join(differing)}")


@contextmanager
def explained(out: Path, batch: Any) -> Iterator[None]:
    """Turn what a lost rank and a full memory raise into errors that say what happened and what to do. batch: the
    settings that decide how much memory a step takes."""
    onward = f"the same command goes on from {out / 'checkpoints' / 'last.ckpt'}"
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = (str(error).splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY.search(said):
            raise torch.OutOfMemoryError(
                f"out of memory with batch.rows {batch.rows}, batch.row_tokens {batch.row_tokens}: {onward} when "
                f"memory is free; else start anew with fewer batch.rows (and more trainer.accumulate), shorter rows, "
                f"fewer anchors of the drafter, or trainer=fsdp2. ({said})"
            ) from error
        if not several() or not (isinstance(error, distributed.DistError) or GONE.search(said)):
            raise
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        raise RankLost(
            f"rank {rank} of {ranks} lost another rank, which ended or no longer answers; look at that rank's own last "
            f"words. When it can run again, {onward}, with any number of ranks. ({said})"
        ) from error
