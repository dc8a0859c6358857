"""The target's KV cache for several requests of different lengths whose drafted tokens may be rejected.

Every layer keeps all positions in a buffer that is written in place. Columns are shared by the rows; `visible` says
which columns a row may attend to. Rejected drafts leave holes, which are dropped by moving a row's columns to the
right. Layers with a window measure distance in columns, so for them a hole is never left standing; full attention
takes positions from the rotary embedding alone, so there the move waits until holes take a quarter of the width.
"""

from copy import copy
from typing import Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from data.structure import PLAIN_ATTENTION, layer_kinds

HOLES_ALLOWED = 0.25


class BufferedLayer(DynamicLayer):
    """A layer that keeps every position; `keys` and `values` are views of buffers that grow by doubling."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append key_states and value_states [R, H, S, d]; returns all keys and values [R, H, width, d]."""
        start = 0 if self.keys is None else self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if self._buffers is None or stop > self._buffers[0].shape[-2]:
            grown = [x.new_empty(*x.shape[:-2], max(stop, 2 * start), x.shape[-1]) for x in (key_states, value_states)]
            if self._buffers is not None:
                for new, old in zip(grown, self._buffers, strict=True):
                    new[..., :start, :] = old[..., :start, :]
            self._buffers = (grown[0], grown[1])
            self.is_initialized, self.device = True, key_states.device
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:stop, :] = states
        self.narrow(stop)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def narrow(self, width: int) -> None:
        """Show the first `width` columns."""
        if self._buffers is not None:
            self.keys, self.values = (buffer[..., :width, :] for buffer in self._buffers)

    def move(self, start: int, columns: Tensor) -> None:
        """Copy, in row r, the columns columns[r] to start, start + 1, ... columns [R, n] int64."""
        if self._buffers is None:
            return
        columns = columns.to(self._buffers[0].device)
        for buffer in self._buffers:
            index = columns[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            buffer[..., start : start + columns.shape[1], :] = buffer.gather(2, index)

    def gather(self, columns: Tensor) -> None:
        """Keep, in row r, the columns columns[r]. columns [R, width] int64."""
        if self._buffers is None:
            return
        columns = columns.to(self._buffers[0].device)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        for buffer in self._buffers:
            buffer[..., : columns.shape[1], :] = buffer.transpose(1, 2)[rows, columns].transpose(1, 2)
        self.narrow(columns.shape[1])

    def copy(self, rows: Tensor) -> "BufferedLayer":
        """A layer of its own that holds these rows. rows [R'] int64, repeats allowed."""
        other = BufferedLayer()
        if self._buffers is not None and self.keys is not None:
            width = self.keys.shape[-2]
            keys, values = (buffer[rows.to(buffer.device), ..., :width, :] for buffer in self._buffers)
            other._buffers, other.is_initialized, other.device = (keys, values), True, keys.device
            other.narrow(width)
        return other

    def select(self, rows: Tensor) -> None:
        """Keep these rows. rows [R'] int64."""
        if self._buffers is not None and self.keys is not None:
            width = self.keys.shape[-2]
            keys, values = (buffer[rows.to(buffer.device)] for buffer in self._buffers)
            self._buffers = (keys, values)
            self.narrow(width)


class RowCache:
    """Cache of R requests.

    cache: what the target extends. visible [R, width] int64: 1 where a column holds a token of the row. lengths [R]
    int64 (device) and host_lengths: tokens held by each row.
    """

    def __init__(self, model: PreTrainedModel, prompt_mask: Tensor) -> None:
        """prompt_mask [R, T]: 1 on tokens, 0 on left padding. ValueError for targets without a plain KV cache."""
        kinds = check_cacheable(model)
        self.cache = DynamicCache()
        self.cache.layer_class_to_replicate = BufferedLayer
        self.visible = prompt_mask
        self.lengths = prompt_mask.sum(1)
        self.host_lengths: list[int] = self.lengths.tolist()
        self._holes_allowed = 0.0 if kinds - {"full_attention"} else HOLES_ALLOWED

    @property
    def layers(self) -> list[BufferedLayer]:
        return self.cache.layers  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all layers."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer._buffers or ())

    def mask(self, new: int) -> Tensor:
        """Attention mask [R, width + new] for `new` tokens to come in every row."""
        return torch.cat([self.visible, self.visible.new_ones(len(self.visible), new)], 1)

    def keep(self, counts: list[int], new: int) -> None:
        """Of the last `new` columns that the target wrote, keep the first counts[r] of row r."""
        top = max(counts)
        kept = torch.tensor(counts, device=self.visible.device)
        fresh = torch.arange(top, device=kept.device) < kept[:, None]
        self.visible = torch.cat([self.visible, fresh.to(self.visible.dtype)], 1)
        self.lengths = self.lengths + kept
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]
        width = self.visible.shape[1]
        if top < new:
            for layer in self.layers:
                layer.narrow(width)
        longest = max(self.host_lengths)
        holes = min(counts) < top if self._holes_allowed == 0 else width - longest > self._holes_allowed * longest
        if holes:
            self._compact(longest)

    def keep_nodes(self, nodes: Tensor, counts: list[int]) -> None:
        """Of the columns that the target wrote last, keep nodes[r, :counts[r]] of row r, in that order. nodes [R, n]
        int64."""
        start = self.visible.shape[1]
        for layer in self.layers:
            layer.move(start, start + nodes)
            layer.narrow(start + nodes.shape[1])
        self.keep(counts, nodes.shape[1])

    def select(self, rows: list[int]) -> None:
        """Keep these rows and drop the others; padding that no row needs any more goes too."""
        index = torch.tensor(rows, device=self.visible.device)
        self.visible, self.lengths = self.visible[index], self.lengths[index]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        for layer in self.layers:
            layer.select(index)
        if self.visible.shape[1] > (1 + HOLES_ALLOWED) * max(self.host_lengths):
            self._compact(max(self.host_lengths))

    def branches(self, rows: list[int], lengths: list[int]) -> Self:
        """A cache of its own whose row i holds the first lengths[i] tokens of row rows[i]; this one stays as it is."""
        index = torch.tensor(rows, device=self.visible.device)
        other = copy(self)
        other.cache = DynamicCache()
        other.cache.layers = [layer.copy(index) for layer in self.layers]
        other.lengths = torch.tensor(lengths, device=index.device)
        other.host_lengths = list(lengths)
        visible = self.visible[index]
        other.visible = visible * (visible.cumsum(1) <= other.lengths[:, None]).to(visible.dtype)
        other._compact(max(lengths))
        return other

    def _compact(self, width: int) -> None:
        """Move every row's tokens to the right, in order, in `width` columns."""
        columns = self.visible.sort(dim=1, stable=True).indices[:, -width:]
        self.visible = self.visible.gather(1, columns)
        for layer in self.layers:
            layer.gather(columns)


def check_cacheable(model: PreTrainedModel) -> set[str]:
    """Kinds of attention in the target; ValueError when its cache holds more than keys and values by position."""
    kinds = layer_kinds(model)
    if foreign := sorted(kinds - set(PLAIN_ATTENTION)):
        raise ValueError(
            f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}: what {', '.join(foreign)} keeps cannot "
            f"be taken back after a rejection, so drafts cannot be verified in this process, which takes layers of "
            f"{', '.join(PLAIN_ATTENTION)}; export the drafter and serve both in an engine that takes it back: "
            f"headstart eval engine=vllm"
        )
    return kinds
