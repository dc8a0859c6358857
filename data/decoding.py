"""Many prompts through the target at once: finished rows leave the batch, waiting prompts take their place.

Rows share one key-value buffer of slots x columns. A new prompt's keys are written so that they end at the current
column, so admitting it moves nothing of the others; a finished row only frees its slot. Random numbers are counters
keyed by (request, position), so an answer does not depend on its neighbours, up to the rounding of batched matrix
products.

A target that keeps more than keys and values (linear attention, a recurrent state) has no columns to write beside: its
prompts are answered in groups, with the cache that transformers makes for it.
"""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from data.structure import PLAIN_ATTENTION, layer_kinds
from drafters.sampling import ANSWER_STREAM, Sampling, counter_uniform, draw

PREFILL_TOKENS = 4096  # padded tokens in one prefill pass at most (one row may be longer)
COLUMNS = 256  # the buffer grows by at least this many columns
PADDING = 6  # columns before two tokens that show whether a model blanks padding out


@dataclass(frozen=True)
class Request:
    """id: unique in a run. prompt_ids: at least one. seed: int64, keys this request's random numbers."""

    id: str
    prompt_ids: list[int]
    seed: int


@dataclass
class Generated:
    """response_ids hold the end token when finish_reason is stop; length means max_new_tokens was reached."""

    id: str
    response_ids: list[int]
    finish_reason: str


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [R, H, columns, *] in a fixed buffer; rows see columns first..length."""

    is_sliding = False
    keys: Tensor
    values: Tensor
    dtype: torch.dtype
    device: torch.device

    def __init__(self) -> None:
        super().__init__()
        self.first = self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a slot layer is filled by SlotCache.admit before its first use")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, self.first : end], self.values[:, :, self.first : end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.length - self.first

    def get_max_length(self) -> int:
        return -1

    def rebuild(self, rows: Tensor, offset: int, capacity: int) -> None:
        """A new buffer of the given rows, used columns from `offset` on. Zeros elsewhere: masked, but never NaN."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(len(rows), old.shape[1], capacity, old.shape[3])
            used = old[:, :, self.first : self.length]
            new[:, :, offset : offset + used.shape[2]] = used.index_select(0, rows.to(old.device))
            setattr(self, name, new)
        self.first, self.length = offset, offset + self.length - self.first


class SlotCache(Cache):
    """Key-value cache of `rows` slots. starts[r] is the first column that belongs to row r's request."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.starts = [0] * rows
        super().__init__(layers=[])

    @property
    def slot_layers(self) -> list[SlotLayer]:
        return cast(list[SlotLayer], self.layers)

    @property
    def first(self) -> int:
        return self.slot_layers[0].first

    @property
    def length(self) -> int:
        return self.slot_layers[0].length

    @property
    def capacity(self) -> int:
        return self.slot_layers[0].keys.shape[2]

    def admit(self, slots: list[int], filled: DynamicCache, lengths: list[int]) -> None:
        """Write prefilled rows into free slots. filled: left-padded [n, H, P, *] a layer; lengths: real tokens."""
        padded, need = filled.get_seq_length(), max(lengths)
        if not self.layers:
            self._allocate(filled, need)
        if self.length < need:
            self._rebuild(list(range(self.rows)), self.first + need - self.length, need + COLUMNS)
        end = self.length
        for layer, source in zip(self.slot_layers, filled.layers, strict=True):
            keys, values = _written(source)
            for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                layer.keys[slot, :, end - length : end] = keys[row, :, padded - length :]
                layer.values[slot, :, end - length : end] = values[row, :, padded - length :]
        for slot, length in zip(slots, lengths, strict=True):
            self.starts[slot] = end - length
        for layer in self.slot_layers:
            layer.first = min(layer.first, end - need)

    def settle(self, active: list[int]) -> None:
        """Before a step: hide columns that no active row uses, and make room for one more."""
        first = min(self.starts[row] for row in active)
        for layer in self.slot_layers:
            layer.first = first
        if self.length == self.capacity:
            used = self.length - first
            self._rebuild(list(range(self.rows)), 0, used + max(COLUMNS, used // 2))

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows; row r becomes the index of r in `rows`."""
        self._rebuild(rows, 0, self.length - self.first + COLUMNS)
        self.rows = len(rows)

    def mask(self) -> Tensor:
        """[R, first..length] int64: 1 on the row's own columns and on the column about to be written."""
        columns = torch.arange(self.first, self.length + 1)
        return (columns >= torch.tensor(self.starts)[:, None]).long()

    def _allocate(self, filled: DynamicCache, need: int) -> None:
        for source in filled.layers:
            if type(source) is not DynamicLayer:
                raise ValueError(
                    f"this target keeps a {type(source).__name__} beside its keys and values, which in-process "
                    "answering cannot batch; set answers.backend=server"
                )
            layer, (keys, values) = SlotLayer(), _written(source)
            layer.keys, layer.values = (
                tensor.new_zeros(self.rows, tensor.shape[1], need + COLUMNS, tensor.shape[3])
                for tensor in (keys, values)
            )
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            layer.first = layer.length = need
            self.layers.append(layer)

    def _rebuild(self, rows: list[int], offset: int, capacity: int) -> None:
        moved = offset - self.first
        for layer in self.slot_layers:
            layer.rebuild(torch.tensor(rows), offset, capacity)
        # a free slot's start may lie before the visible columns; it is masked anyway
        self.starts = [max(0, self.starts[row] + moved) for row in rows]


def _written(layer: object) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer that a prefill has filled."""
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


@dataclass
class _Row:
    request: Request
    written: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the last written token."""
        return len(self.request.prompt_ids) + len(self.written) - 1


class Decoder:
    """Continuous batching over a transformers causal language model; logits at the last position only.

    sampling: temperature, top-k, top-p. eos_ids: tokens that end an answer. batch_size: rows at most. `tokens` counts
    what was written so far.
    """

    def __init__(
        self, model: PreTrainedModel, sampling: Sampling, max_new_tokens: int, eos_ids: Iterable[int], batch_size: int
    ) -> None:
        self.model = model.eval()
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.eos_ids = frozenset(eos_ids)
        self.batch_size = batch_size
        self.tokens = 0
        self._plain = layer_kinds(model) <= set(PLAIN_ATTENTION)
        self._device = cast(nn.Embedding, model.get_input_embeddings()).weight.device
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # transformers 5.2x renamed the argument; both spellings are in use.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def run(self, requests: Iterable[Request]) -> Iterator[Generated]:
        """Yield answers as they finish (not in order)."""
        waiting = list(requests)[::-1]
        if not self._plain:
            yield from self._run_groups(waiting)
            return
        rows: list[_Row | None] = [None] * min(self.batch_size, len(waiting))
        cache = SlotCache(len(rows))
        while waiting or any(rows):
            free = [slot for slot, row in enumerate(rows) if row is None]
            if waiting and (len(free) * 8 >= len(rows)):
                self._admit(rows, free, waiting, cache)
            elif not waiting and len(free) * 4 >= len(rows):
                kept = [slot for slot, row in enumerate(rows) if row is not None]
                cache.settle(kept)
                cache.keep(kept)
                rows = [rows[slot] for slot in kept]
                self._step(rows, cache)
            else:
                self._step(rows, cache)
            for slot, row in enumerate(rows):
                if row is not None and (reason := self._finished(row)):
                    rows[slot] = None
                    yield Generated(row.request.id, row.written, reason)

    def _finished(self, row: _Row) -> str | None:
        if row.written[-1] in self.eos_ids:
            return "stop"
        return "length" if len(row.written) >= self.max_new_tokens else None

    @torch.inference_mode()
    def _admit(self, rows: list[_Row | None], free: list[int], waiting: list[Request], cache: SlotCache) -> None:
        """Prefill waiting prompts, left-padded, into free slots, and draw their first tokens."""
        while free and waiting:
            group, tokens, mask = _next_group(waiting, len(free))
            filled = DynamicCache()
            logits = self._forward(tokens, mask, _positions(mask), filled)
            slots, free = free[: len(group)], free[len(group) :]
            cache.admit(slots, filled, [len(row.request.prompt_ids) for row in group])
            for slot, row in zip(slots, group, strict=True):
                rows[slot] = row
            self._draw(logits, group)

    @torch.inference_mode()
    def _step(self, rows: list[_Row | None], cache: SlotCache) -> None:
        """One token for every active row. Free slots run along and are thrown away."""
        active = [slot for slot, row in enumerate(rows) if row is not None]
        cache.settle(active)
        tokens = torch.tensor([[row.written[-1] if row else 0] for row in rows])
        positions = torch.tensor([[row.position if row else 0] for row in rows])
        logits = self._forward(tokens, cache.mask(), positions, cache)
        self._draw(logits[active] if len(active) < len(rows) else logits, [row for row in rows if row is not None])

    def _run_groups(self, waiting: list[Request]) -> Iterator[Generated]:
        """Groups that are read together; a finished row leaves, and the next group begins when the last has."""
        several = self.batch_size > 1 and len(waiting) > 1
        size = self.batch_size if several and self._blanks_padding(waiting[-1].prompt_ids) else 1
        while waiting:
            rows, tokens, mask = _next_group(waiting, size)
            cache, positions = DynamicCache(config=self.model.config), _positions(mask)
            while True:
                self._extend(rows, tokens, mask, positions, cache)
                reasons = [self._finished(row) for row in rows]
                for row, reason in zip(rows, reasons, strict=True):
                    if reason is not None:
                        yield Generated(row.request.id, row.written, reason)
                left = [index for index, reason in enumerate(reasons) if reason is None]
                if not left:
                    break
                if len(left) < len(rows):
                    cache.reorder_cache(cast(Any, torch.tensor(left, device=self._device)))
                    rows, mask = [rows[index] for index in left], mask[left]
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
                tokens = torch.tensor([[row.written[-1]] for row in rows])
                positions = torch.tensor([[row.position] for row in rows])

    @torch.inference_mode()
    def _extend(self, rows: list[_Row], tokens: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> None:
        """Read tokens [R, T] and draw one for every row."""
        self._draw(self._forward(tokens, mask, positions, cache), rows)

    @torch.inference_mode()
    def _blanks_padding(self, prompt: list[int]) -> bool:
        """Whether two tokens (fewer than a short convolution spans) are read the same behind padding as alone: not
        every model masks what its recurrent state takes in."""
        tokens = torch.tensor([prompt[:2]])
        found: list[Tensor] = []
        for padding in (0, PADDING):
            # Not by token 0, whose embedding may be zero.
            padded = functional.pad(tokens, (padding, 0), value=prompt[0])
            mask = functional.pad(torch.ones_like(tokens), (padding, 0))
            cache = DynamicCache(config=self.model.config)
            found.append(self._forward(padded, mask, _positions(mask), cache).float())
        alone, behind = found
        allowed = max(1e-4, 8 * torch.finfo(self.model.dtype).eps) * max(1.0, float(alone.abs().max()))
        return float((alone - behind).abs().max()) <= allowed

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [R, V] of the last column."""
        arguments: dict[str, Any] = {self._cache_name: cache, **self._last_only}
        output = self.model(
            input_ids=tokens.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            use_cache=True,
            **arguments,
        )
        return output.logits[:, -1]

    def _draw(self, logits: Tensor, rows: list[_Row]) -> None:
        seeds = torch.tensor([row.request.seed for row in rows], device=logits.device)
        positions = torch.tensor([row.position + 1 for row in rows], device=logits.device)
        for row, token in zip(rows, next_tokens(logits, self.sampling, seeds, positions).tolist(), strict=True):
            row.written.append(token)
        self.tokens += len(rows)


def _next_group(waiting: list[Request], room: int) -> tuple[list[_Row], Tensor, Tensor]:
    """Take the next prompts, at most `room` and what one prefill pass may hold, off the end of `waiting`. Their rows;
    tokens and mask int64 [n, P], padded on the left."""
    group: list[_Row] = []
    while len(group) < room and waiting:
        longest = max(len(row.request.prompt_ids) for row in [*group, _Row(waiting[-1])])
        if group and longest * (len(group) + 1) > PREFILL_TOKENS:
            break
        group.append(_Row(waiting.pop()))
    lengths = [len(row.request.prompt_ids) for row in group]
    tokens = torch.zeros(len(group), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for index, (row, length) in enumerate(zip(group, lengths, strict=True)):
        tokens[index, -length:] = torch.tensor(row.request.prompt_ids)
        mask[index, -length:] = 1
    return group, tokens, mask


def _positions(mask: Tensor) -> Tensor:
    """Real tokens of each row numbered from 0."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def next_tokens(logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token a row. logits [R, V], seeds and positions [R] int64 -> int64 [R].

    With top-k only the k best logits are looked at, in token-id order, which draws what the full vocabulary would (ties
    at the edge aside, where exactly k stay).
    """
    if sampling.greedy:
        return logits.argmax(-1)
    uniforms = counter_uniform(seeds, positions, ANSWER_STREAM)
    if sampling.top_k is None or sampling.top_k >= logits.shape[-1]:
        return draw(sampling.probs(logits), uniforms)
    ids = logits.topk(sampling.top_k, dim=-1).indices.sort(-1).values
    chosen = draw(sampling.probs(logits.gather(-1, ids)), uniforms)
    return ids.gather(-1, chosen[:, None])[:, 0]
