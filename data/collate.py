"""Packing: whole conversations into fixed rows, documents isolated, in an order fixed by (seed, step) alone.

row    | tokens of conversation 7 | conversation 2 | conversation 9 | padding |
doc      0 0 0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1    2 2 2 2 2 2 2    -1 -1
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from data.layout import Sample
from drafters.contract import Batch, answer_anchors
from drafters.sampling import ANCHOR_STREAM, counter_uniform


def pack(lengths: Sequence[int], row_tokens: int, order: Sequence[int]) -> list[list[int]]:
    """First-fit rows of whole conversations. lengths in tokens; order: conversation indices. Returns indices per row.

    Only the 32 newest open rows are tried, so packing is linear and row order still follows `order`. Raises
    ValueError when a conversation is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(
                f"conversation {index} has {length} tokens, a row holds {row_tokens}: raise batch.row_tokens"
            )
        start = max(0, len(rows) - 32)
        place = next((r for r in range(start, len(rows)) if room[r] >= length), None)
        if place is None:
            rows.append([])
            room.append(row_tokens)
            place = len(rows) - 1
        rows[place].append(index)
        room[place] -= length
    return rows


class Plan:
    """Which conversations stand in which row of which micro-step, for any step, without state.

    Each epoch is a new shuffle of all conversations, packed into rows; `rows` rows make one global micro-batch and
    the last, short batch of an epoch is kept. Equal (seed, step) give equal batches whatever the number of ranks.
    """

    def __init__(self, lengths: Sequence[int], row_tokens: int, rows: int, seed: int) -> None:
        if not lengths:
            raise ValueError("nothing to train on: the feature store is empty")
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        self.lengths, self.row_tokens, self.rows, self.seed = list(lengths), row_tokens, rows, seed
        self._starts = [0]
        self._epochs: list[list[list[list[int]]]] = []

    @staticmethod
    def generator(seed: int, epoch: int) -> torch.Generator:
        """What an epoch's order is drawn from."""
        return torch.Generator().manual_seed(seed * 1_000_003 + epoch)

    def _epoch(self, number: int) -> list[list[list[int]]]:
        order = torch.randperm(len(self.lengths), generator=self.generator(self.seed, number)).tolist()
        rows = pack(self.lengths, self.row_tokens, order)
        return [rows[i : i + self.rows] for i in range(0, len(rows), self.rows)]

    def _extend(self, step: int) -> None:
        while self._starts[-1] <= step:
            self._epochs.append(self._epoch(len(self._epochs)))
            self._starts.append(self._starts[-1] + len(self._epochs[-1]))

    def batch(self, step: int) -> list[list[int]]:
        """Rows of conversation indices of global micro-step `step` (0-based)."""
        self._extend(step)
        epoch = bisect_right(self._starts, step) - 1
        return self._epochs[epoch][step - self._starts[epoch]]

    def steps(self, epochs: int) -> int:
        """Micro-steps in the first `epochs` epochs."""
        while len(self._epochs) < epochs:
            self._extend(self._starts[-1])
        return self._starts[epochs]


def production_order(count: int, seed: int) -> list[int]:
    """Conversations in the order in which a plan's first epoch begins with them: that of a queue's shards."""
    return torch.randperm(count, generator=Plan.generator(seed, 0)).tolist()


@dataclass(frozen=True)
class Collate:
    """Turns samples of a plan's rows into a Batch.

    row_tokens: T. anchor_multiple: A is the largest anchor count of the batch rounded up to this (coarse on a GPU,
    where fixed shapes spare recompilation). dtype of the features (None: the samples' own, which Batch.to widens where
    the batch goes). anchors: at most so many a row, drawn without replacement from those allowed, by the batch's seed
    (None: all).
    """

    row_tokens: int
    anchor_multiple: int = 32
    dtype: torch.dtype | None = torch.float32
    anchors: int | None = None

    def __call__(
        self,
        rows: Sequence[Sequence[Sample]],
        seed: int = 0,
        progress: float = 0.0,
        first_row: int = 0,
        row_step: int = 1,
    ) -> Batch:
        """rows of samples (whole conversations) -> Batch of len(rows) rows; the other arguments are Batch's. Raises
        ValueError on an empty batch."""
        first = next((sample for row in rows for sample in row), None)
        if first is None:
            raise ValueError("a batch needs at least one sample")
        shape, (layers, width) = (len(rows), self.row_tokens), first.aux.shape[1:]
        whole = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "positions", "turns", "top1")}
        documents, lse = torch.full(shape, -1), torch.zeros(shape)
        aux = torch.zeros(*shape, layers, width, dtype=self.dtype or first.aux.dtype)
        last = torch.zeros(*shape, first.last.shape[-1], dtype=self.dtype or first.last.dtype)
        top_ids, top_logp = _tops(shape, first)
        for r, row in enumerate(rows):
            start = 0
            for document, sample in enumerate(row):
                place = slice(start, start + len(sample.tokens))
                whole["tokens"][r, place], whole["turns"][r, place] = sample.tokens, sample.turns
                whole["positions"][r, place] = torch.arange(len(sample.tokens))
                whole["top1"][r, place], lse[r, place] = sample.top1, sample.lse
                documents[r, place] = document
                aux[r, place], last[r, place] = sample.aux, sample.last
                if top_ids is not None and top_logp is not None:
                    top_ids[r, place] = cast(Tensor, sample.top_ids)
                    top_logp[r, place] = cast(Tensor, sample.top_logp)
                start = place.stop
        allowed = answer_anchors(whole["turns"], documents)
        if self.anchors is not None:
            allowed = draw_anchors(allowed, self.anchors, seed, first_row + row_step * torch.arange(len(rows)))
        anchors = gather_anchors(allowed, self.anchor_multiple)
        return Batch(
            tokens=whole["tokens"],
            positions=whole["positions"],
            documents=documents,
            turns=whole["turns"],
            aux=aux,
            last=last,
            top1=whole["top1"],
            lse=lse,
            anchors=anchors,
            seed=seed,
            progress=progress,
            first_row=first_row,
            row_step=row_step,
            top_ids=top_ids,
            top_logp=top_logp,
        )


def _tops(shape: tuple[int, int], like: Sample) -> tuple[Tensor | None, Tensor | None]:
    """Empty top_ids and top_logp of a batch, where samples have them."""
    if like.top_ids is None:
        return None, None
    whole = (*shape, like.top_ids.shape[-1])
    return torch.zeros(whole, dtype=torch.int64), torch.zeros(whole)


def draw_anchors(allowed: Tensor, count: int, seed: int, numbers: Tensor | None = None) -> Tensor:
    """At most `count` of a row's allowed positions, evenly likely, by (seed, row number, position) alone. allowed
    [B, T] bool -> the same shape. numbers [B] of the rows (None: 0..B-1). ValueError unless count >= 1."""
    if count < 1:
        raise ValueError(f"anchors per row must be at least 1, got {count}")
    rows, tokens = allowed.shape
    numbers = torch.arange(rows) if numbers is None else numbers
    place = numbers[:, None] * (1 << 20) + torch.arange(tokens)
    keys = counter_uniform(torch.full_like(place, seed), place, ANCHOR_STREAM)
    keys = torch.where(allowed, keys, 2.0)
    chosen = keys.topk(min(count, tokens), dim=1, largest=False).indices
    return allowed & torch.zeros_like(allowed).scatter_(1, chosen, True)


def gather_anchors(allowed: Tensor, multiple: int) -> Tensor:
    """All allowed positions as [B, A] indices, -1 padded, A rounded up to `multiple`. allowed [B, T] bool."""
    rows, tokens = allowed.shape
    count = int(allowed.sum(1).max()) if rows else 0
    width = min(-(-max(count, 1) // multiple) * multiple, max(tokens, 1))
    position = torch.where(allowed, torch.arange(tokens), tokens)
    anchors = position.sort(1).values[:, :width]
    return torch.where(anchors < tokens, anchors, -1)
