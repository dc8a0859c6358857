"""Chains of slots over packed rows: what an anchor's row sees, and which chains training takes one slot deeper."""

import torch
from torch import Tensor

from drafters.contract import Batch
from drafters.sampling import TRAIN_STREAM, counter_uniform


def visible_rows(batch: Batch, rows: Tensor) -> Tensor:
    """Which step-1 rows [B, A, T - 1] each anchor row [B, A] may see: not later than itself, in its document."""
    columns = torch.arange(batch.tokens.shape[1] - 1, device=rows.device)
    same = batch.documents.gather(1, rows)[..., None] == batch.documents[:, None, :-1]
    return (columns <= rows[..., None]) & same


def fewer(batch: Batch, alive: Tensor, place: Tensor | None, count: int) -> Tensor:
    """Which of the current anchors go one slot deeper: [B, count] ascending indices into them.

    alive [B, A] marks anchors with a supervised next slot; those are drawn first, by random keys of (batch seed,
    anchor), so that equal keys make deeper draws subsets of shallower ones. place [B, A'] indices of the current
    anchors (None: all).
    """
    keys = counter_uniform(torch.full_like(batch.anchors, batch.seed), _flat(batch), TRAIN_STREAM)
    keys = torch.where(alive, keys, 2.0)
    if place is not None:
        keys = keys.gather(1, place)
    return keys.topk(count, dim=1, largest=False).indices.sort(1).values


def narrow(mask: Tensor, k: int, place: Tensor) -> Tensor:
    """Slot mask [B, A, K] without slots k.. (from 0) of the anchors that are not in place [B, A']."""
    kept = torch.zeros_like(mask[:, :, 0]).scatter_(1, place, True)
    return torch.cat([mask[:, :, :k], mask[:, :, k:] & kept[..., None]], 2)


def pick(states: Tensor, chosen: Tensor) -> Tensor:
    """states [B, G, A, d] at anchors [B, A'] -> [B, G, A', d]."""
    return states.gather(2, chosen[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def spread(states: Tensor, place: Tensor | None, anchors: int) -> Tensor:
    """states [B, A', D] back to their anchors: [B, A, D], zero elsewhere. place [B, A'] (None: all are there)."""
    if place is None:
        return states
    whole = states.new_zeros(len(states), anchors, states.shape[-1])
    return whole.scatter(1, place[..., None].expand_as(states), states)


def _flat(batch: Batch) -> Tensor:
    """A number for every anchor of the micro-step: row number * 2^20 + position."""
    return batch.row_numbers[:, None] * (1 << 20) + batch.anchors
