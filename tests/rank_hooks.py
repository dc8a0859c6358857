"""What tests look at and break inside the processes of tests.ranks."""

import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from data.module import Steps
from training import marks, module
from training.acceptance import AcceptanceCallback


def watch(seen: dict[str, list[Any]]) -> None:
    """Note the ids and anchors of every micro-step on this rank, and a digest of every optimizer step's gradient."""
    seen |= {"ids": [], "gradients": [], "shards": []}
    plain, divide = Steps.__getitem__, module.divide_gradients

    def item(self: Steps, step: int) -> Any:
        batch, rows = plain(self, step), self.plan.batch(step)[self.rank :: self.ranks]
        kept = [anchors[anchors >= 0].tolist() for anchors in batch.anchors]
        if self.total > 1:  # not the batch that a warm start is solved from
            seen["ids"].append([step, [[self.source.ids[i] for i in row] for row in rows], kept])
        return batch

    def divided(parameters: Iterable[torch.nn.Parameter], denominator: torch.Tensor, over: int) -> None:
        found = list(parameters)
        divide(found, denominator, over)
        whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in found if p.grad is not None]
        # Sums weighed by place: equal only for equal gradients, and small enough for a file.
        digest = [float((g.flatten() * torch.linspace(1, 2, g.numel())).sum()) for g in whole]
        seen["gradients"].append([float(torch.stack([g.norm() for g in whole]).norm()), *digest])
        seen["shards"].append(sum(isinstance(p, DTensor) for p in found))

    Steps.__getitem__ = item  # type: ignore[method-assign]
    module.divide_gradients = divided


def die_at_step_3(rank: int) -> None:
    """Rank 1 is killed by the machine inside the window of its fourth step."""
    plain = module.DrafterModule.on_before_optimizer_step

    def before(self: Any, optimizer: Any) -> None:
        if rank == 1 and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, optimizer)

    module.DrafterModule.on_before_optimizer_step = before  # type: ignore[method-assign]


def signalled_at_step_3(rank: int) -> None:
    """Rank 1 alone is asked to stop while it works on its fourth step."""
    plain = module.DrafterModule.training_step

    def step(self: Any, batch: Any, index: int) -> Any:
        if rank == 1 and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, batch, index)

    module.DrafterModule.training_step = step  # type: ignore[method-assign]


def other_seed_on_rank_1(rank: int) -> None:
    """Rank 1 was started with other settings."""
    plain = marks.plain
    marks.plain = lambda config: plain(config) | ({"seed": 99} if rank == 1 else {})


def other_taus_on_rank_1(rank: int) -> None:
    """Every measurement is better than the one before on rank 0, and worse on rank 1."""
    plain = AcceptanceCallback.measure

    def measure(self: AcceptanceCallback, drafter: Any) -> Any:
        made = plain(self, drafter)
        return replace(made, tau=1.0 + len(self.history) if rank == 0 else 9.0 - len(self.history))

    AcceptanceCallback.measure = measure  # type: ignore[method-assign]


def out_of_memory_on_rank_1(rank: int) -> None:
    """Rank 1 has no memory left in its third step."""
    plain = module.DrafterModule.training_step

    def step(self: Any, batch: Any, index: int) -> Any:
        if rank == 1 and self.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, batch, index)

    module.DrafterModule.training_step = step  # type: ignore[method-assign]


def signalled_alone(rank: int) -> None:
    """A run of one process is asked to stop while it works on its fourth step."""
    signalled_at_step_3(rank + 1)
