"""What unrolled drafters share: rows of (hidden, token), slot after slot on the drafter's own output.

    row          t = a - 1           a              a + 1
    hidden       read(features t)    own output 1   own output 2
    token        x_a                 x_{a+1}        x_{a+2}        data in training, drafted when drafting
    slot         1 -> a + 1          2 -> a + 2     3 -> a + 3

Slot k >= 2 stands at rotary position t + k - 1 and sees the step-1 keys of rows <= t and the keys that its own chain
made at steps 2..k: training computes, for all anchors at once, what drafting will compute (EAGLE-3's training-time
test, arXiv 2503.01840; HASS's harmonised context, arXiv 2408.15766).
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import LlamaConfig

from drafters.attention import chain_block_mask, dense_chain, flex_chain, fused
from drafters.branches import Branches, NodeColumns
from drafters.chains import fewer, narrow, pick, spread, visible_rows
from drafters.contract import Batch, Drafter, Proposal, SlotBatch, grid
from drafters.decoder import PlainLayer, key_shape
from drafters.drafting import along, take_rows, write_at
from drafters.layers import Rotary, SharedEmbedding
from drafters.sampling import Sampling

Keys = tuple[Tensor, Tensor]


@dataclass
class DraftState:
    """Drafting state: keys and values [R, G, C, d] of each layer by position, rows read [R], what the newest row read
    of the target [R, D], anchor [R]."""

    keys: list[Tensor]
    values: list[Tensor]
    length: Tensor
    fused: Tensor
    anchor: Tensor


@dataclass
class Seen:
    """What the queries of one step see: step-1 rows `visible` [B, A, T] and `steps` keys of their own chain."""

    visible: Tensor
    steps: int

    @cached_property
    def block_mask(self) -> BlockMask:
        return chain_block_mask(self.visible, self.steps)

    def attend(self, query: Tensor, prefix: Keys, chain: list[Keys]) -> Tensor:
        """query [B, H, A, d] -> [B, H, A, d]. Two equal forms."""
        if fused(query):
            return flex_chain(query, prefix, chain, self.block_mask)
        return dense_chain(query, prefix, chain, self.visible)


class Unrolled(Drafter):
    """Base of drafters whose slots recycle the drafter's own output.

    A subclass builds `embedding`, `rotary` and `layer_config`, and says what a row reads of the target (`read`), how a
    row enters the first layer (`enter`), its layers (`body`), what the head reads (`leave`) and what the next slot
    reads (`_recycle`). keep: share of the chains of the fullest row that training takes one slot deeper. train_steps:
    slots that training makes (None: all K).
    """

    branching = "steps"
    layer_config: LlamaConfig
    embedding: SharedEmbedding
    rotary: Rotary
    keep: float = 1.0
    train_steps: int | None = None

    @abstractmethod
    def read(self, aux: Tensor, last: Tensor) -> Tensor:
        """What rows read of the target: aux [..., L, D] and last [..., D] -> [..., D]."""

    @abstractmethod
    def enter(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """hidden, embedded [..., D] -> what the first layer's attention reads, and the residual [..., D]."""

    @property
    @abstractmethod
    def body(self) -> Sequence[PlainLayer]:
        """The layers; those after the first norm the residual themselves."""

    def leave(self, output: Tensor) -> Tensor:
        """What the head reads of the last layer's output [..., D]."""
        return output

    def _recycle(self, output: Tensor) -> Tensor:
        return output

    @property
    def trained_slots(self) -> int:
        """Slots of the grid: all K, or in training mode the first train_steps."""
        return self.train_steps if self.training and self.train_steps else self.num_slots

    def slots(self, batch: Batch) -> SlotBatch:
        """All steps over all anchors; step 1 makes keys for the whole row, the last layer's queries run at anchors
        only."""
        labels = grid(batch, self.trained_slots)
        inputs, residual, prefix = self._read_rows(batch)
        rows = (batch.anchors - 1).clamp_min(0)
        visible, positions = visible_rows(batch, rows), batch.positions.gather(1, rows)
        final = self.body[-1]
        query = final.self_attn.query(take_rows(inputs, rows), self.rotary, positions)
        output = final.finish(take_rows(residual, rows), Seen(visible, 0).attend(query, prefix[-1], []))
        chains: list[list[Keys]] = [[] for _ in self.body]
        hidden, mask, place = [self.leave(output)], labels.mask, None
        for k in range(1, labels.mask.shape[2]):
            recycled, following = self._recycle(output), self.embedding(labels.prev_ids[:, :, k])
            if self.keep < 1:
                count = max(1, math.ceil(self.keep * positions.shape[1]))
                chosen = fewer(batch, mask[:, :, k], place, count)
                place = chosen if place is None else place.gather(1, chosen)
                mask = narrow(mask, k, place)
                recycled, following = take_rows(recycled, chosen), take_rows(following, place)
                chains = [[(pick(key, chosen), pick(value, chosen)) for key, value in chain] for chain in chains]
                positions, visible = positions.gather(1, chosen), take_rows(visible, chosen)
            entered = self.enter(recycled, following)
            output = self._deeper(entered, positions + k, prefix, chains, Seen(visible, k))
            hidden.append(spread(self.leave(output), place, mask.shape[1]))
        return SlotBatch(torch.stack(hidden, 2), labels.prev_ids, labels.target_ids, mask, labels.teacher)

    def _read_rows(self, batch: Batch) -> tuple[Tensor, Tensor, list[Keys]]:
        """Step 1 over the whole row, up to the last layer's queries: its inputs and residual [B, T - 1, D], and every
        layer's keys and values."""
        fused, embedded = self.read(batch.aux, batch.last), self.embedding(batch.tokens)
        inputs, residual = self.enter(fused[:, :-1], embedded[:, 1:])
        positions, prefix = batch.positions[:, :-1], []
        for i, layer in enumerate(self.body):
            if i > 0:
                inputs = layer.input_layernorm(residual)
            prefix.append(layer.self_attn.keys_values(inputs, self.rotary, positions))
            if i + 1 < len(self.body):
                every = torch.arange(residual.shape[1], device=residual.device).expand(len(residual), -1)
                query = layer.self_attn.query(inputs, self.rotary, positions)
                residual = layer.finish(residual, Seen(visible_rows(batch, every), 0).attend(query, prefix[-1], []))
        return inputs, residual, prefix

    def _deeper(
        self,
        entered: tuple[Tensor, Tensor],
        positions: Tensor,
        prefix: list[Keys],
        chains: list[list[Keys]],
        seen: Seen,
    ) -> Tensor:
        """One later step at positions [B, A] through all layers; adds its keys to the chains. Returns [B, A, D]."""
        inputs, residual = entered
        for i, layer in enumerate(self.body):
            if i > 0:
                inputs = layer.input_layernorm(residual)
            chains[i].append(layer.self_attn.keys_values(inputs, self.rotary, positions))
            query = layer.self_attn.query(inputs, self.rotary, positions)
            residual = layer.finish(residual, seen.attend(query, prefix[i], chains[i]))
        return residual

    def begin(self, requests: int, capacity: int) -> DraftState:
        like = self.body[0].self_attn.o_proj.weight
        groups, width = key_shape(self.layer_config)
        shape = (requests, groups, capacity + self.num_slots + 1, width)
        keys, values = ([like.new_zeros(shape) for _ in self.body] for _ in range(2))
        empty = torch.zeros(requests, dtype=torch.int64, device=like.device)
        return DraftState(keys, values, empty, like.new_zeros(requests, like.shape[0]), empty.clone())

    def observe(self, state: DraftState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        fused = self.read(aux.to(state.fused.dtype), last.to(state.fused.dtype))
        offsets = torch.arange(next_ids.shape[1], device=next_ids.device)
        positions = state.length[:, None] + offsets
        # Entries past a request's length go to the spare last column, which no query ever sees.
        columns = torch.where(offsets < lengths[:, None], positions, state.keys[0].shape[2] - 1)
        inputs, residual = self.enter(fused, self.embedding(next_ids))
        for i, layer in enumerate(self.body):
            if i > 0:
                inputs = layer.input_layernorm(residual)
            self.write(state, i, inputs, positions, columns)
            if i + 1 < len(self.body):
                residual = layer.finish(residual, self.look(state, i, inputs, positions, up_to(state, positions)))
        end = (lengths - 1).clamp_min(0)[:, None]
        fresh = lengths > 0
        state.fused = torch.where(fresh[:, None], take_rows(fused, end)[:, 0], state.fused)
        state.anchor = torch.where(fresh, next_ids.gather(1, end)[:, 0], state.anchor)
        state.length = state.length + lengths

    def propose(self, state: DraftState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        return along(self.branch(state, num_slots), num_slots, self.vocabulary, sampling, seeds, state.length)

    def branch(self, state: DraftState, num_slots: int) -> "UnrolledBranches":
        return UnrolledBranches(self, state)

    def write(self, state: DraftState, i: int, inputs: Tensor, positions: Tensor, columns: Tensor) -> None:
        """Put layer i's keys and values of inputs [R, N, width] at positions [R, N] into columns [R, N]."""
        keys, values = self.body[i].self_attn.keys_values(inputs, self.rotary, positions)
        write_at(state.keys[i], columns, keys)
        write_at(state.values[i], columns, values)

    def look(self, state: DraftState, i: int, inputs: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Layer i's attention of inputs [R, N, width] at positions [R, N] over the columns visible [R, N, C] to each:
        [R, H, N, d]."""
        query = self.body[i].self_attn.query(inputs, self.rotary, positions)
        return dense_chain(query, (state.keys[i], state.values[i]), [], visible)


def up_to(state: DraftState, positions: Tensor) -> Tensor:
    """Columns [R, N, C] up to positions [R, N]."""
    return torch.arange(state.keys[0].shape[2], device=positions.device) <= positions[..., None]


class UnrolledBranches(Branches):
    """The anchor's own row is already among the keys; rows of nodes go to columns that the next observe overwrites."""

    def __init__(self, drafter: Unrolled, state: DraftState) -> None:
        self.drafter, self.state, self.level = drafter, state, 0
        self.columns = NodeColumns(state.length, state.keys[0].shape[2])
        position = (state.length - 1)[:, None]
        self.first = self._run(state.fused[:, None], state.anchor[:, None], position, None, up_to(state, position))[
            :, 0
        ]

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        columns, visible = self.columns.place(parents)
        positions = (self.state.length - 1 + self.level)[:, None].expand_as(tokens)
        return self._run(take_rows(self.hidden, parents), tokens, positions, columns, visible)

    def _run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, columns: Tensor | None, visible: Tensor
    ) -> Tensor:
        """Rows of hidden [R, M, D] and tokens [R, M] through all layers -> logits [R, M, W]."""
        drafter, state = self.drafter, self.state
        inputs, residual = drafter.enter(hidden, drafter.embedding(tokens))
        for i, layer in enumerate(drafter.body):
            if i > 0:
                inputs = layer.input_layernorm(residual)
            if columns is not None:
                drafter.write(state, i, inputs, positions, columns)
            residual = layer.finish(residual, drafter.look(state, i, inputs, positions, visible))
        self.hidden = drafter._recycle(residual)
        logits = drafter.logits(drafter.leave(residual).flatten(0, 1), tokens.flatten())
        return logits.unflatten(0, tokens.shape)
