"""A stage of progressive self-forcing: a drafter of K slots learns from a frozen one of K / 2, run twice.

The second run stands behind tokens that the frozen drafter made up, so no feature store knows their features: the
target reads them, all anchors' branches in one pass beside the row that they grow from.

    row       t0 t1 A  t3 t4 B  t6        documents as packed, causal
    branches  .  .  A  f1 f2              sees the row up to its anchor, and itself
              .  .  .  .  .  B  f1 f2
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from checkpoints.folder import load_drafter
from data.target import Target
from drafters.contract import Batch, Drafter
from eval.cache import check_cacheable


@dataclass(frozen=True)
class Stage:
    """half: folder of the frozen drafter. share: of the anchors that learn its labels; the others keep the target's
    own. start: begin from its tensors."""

    half: str
    share: float = 0.5
    start: bool = True


@runtime_checkable
class Staged(Protocol):
    """What a drafter offers that can learn in stages."""

    def begin_stage(self, half: Any, read: Any, share: float, start: bool = True) -> list[str]: ...


def begin(drafter: Drafter, stage: Stage, target: Target) -> list[str]:
    """Give the drafter its frozen half and a way to read branches. Returns lines to show. ValueError for a drafter
    without stages, or a half that is not its own kind."""
    if not isinstance(drafter, Staged):
        raise ValueError(f"{type(drafter).__name__} does not learn in stages: drafter.stage must be null")
    half = load_drafter(Path(stage.half).expanduser(), target.parts, torch.float32)
    return drafter.begin_stage(half, partial(read_branches, target), stage.share, stage.start)


@torch.no_grad()
def read_branches(target: Target, batch: Batch, branches: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Aux features [B, A, n, L, D] of tokens [B, A, n] that follow each of the batch's anchors, in the batch's dtype.

    Without tokens the target is not run. ValueError for a target whose layers do not all see everything before them.
    """
    rows, anchors, count = branches.shape
    if count == 0:
        return batch.aux.new_zeros(rows, anchors, 0, *batch.aux.shape[2:])
    kinds = check_cacheable(target.model)
    if kinds != {"full_attention"}:
        raise ValueError(
            f"branches are read by targets of full attention alone, this one has {', '.join(sorted(kinds))}"
        )
    starts = batch.positions.gather(1, batch.anchors.clamp_min(0))[..., None]
    places = starts + torch.arange(1, count + 1, device=starts.device)
    tokens = torch.cat([batch.tokens, branches.flatten(1)], 1)
    positions = torch.cat([batch.positions, places.flatten(1)], 1)
    seen = branch_mask(batch.documents, batch.anchors, count)[:, None]
    mask = torch.zeros(seen.shape, dtype=target.dtype, device=seen.device)
    mask = mask.masked_fill(~seen, torch.finfo(target.dtype).min)
    with torch.autocast(starts.device.type, enabled=False):
        aux = target.forward(tokens, layers, mask, positions).aux[:, batch.tokens.shape[1] :]
    return aux.unflatten(1, (anchors, count)).to(batch.aux)


def branch_mask(documents: Tensor, anchors: Tensor, count: int) -> Tensor:
    """Who sees whom in a row followed by its branches. documents [B, T], anchors [B, A], n tokens a branch -> bool
    [B, T + A n, T + A n]."""
    rows, length = documents.shape
    number = anchors.shape[1]
    columns = torch.arange(length, device=documents.device)
    own = torch.arange(number * count, device=documents.device)
    same = documents[:, :, None] == documents[:, None]
    row = torch.cat([same & (columns <= columns[:, None]), same.new_zeros(rows, length, number * count)], 2)
    place = anchors.clamp_min(0)
    home = documents.gather(1, place)[..., None] == documents[:, None]
    before = (home & (columns <= place[..., None])).repeat_interleave(count, 1)
    inside = (own // count == (own // count)[:, None]) & (own <= own[:, None])
    return torch.cat([row, torch.cat([before, inside.expand(rows, -1, -1)], 2)], 1)
