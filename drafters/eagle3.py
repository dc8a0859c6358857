"""EAGLE-3 (arXiv 2503.01840, section 3), with the two switches of EAGLE-3.1 (arXiv 2605.09992).

One decoder layer reads, at row t, the fused features of position t and the embedding of the token at t + 1, and
predicts the token at t + 2. In the words of the grid: the anchor is at a = t + 1 and slot 1 predicts a + 1. Slot k >=
2 recycles the layer's own output of slot k - 1 in place of features ("training-time test"), at rotary position t + k
- 1, and sees the step-1 keys of rows <= t plus its own chain's keys.

    row          t = a - 1        a              a + 1
    hidden       fc(features t)   own output 1   own output 2
    token        x_a              x_{a+1}        x_{a+2}        data in training, drafted when drafting
    slot         1 -> a + 1       2 -> a + 2     3 -> a + 3

Deviations from the paper are choices in yaml and off by default: `fc_norm` (a norm on each captured layer before the
fusion, 3.1), `norm_output` (recycle the normed output, 3.1), `norm_before_residual` (residual starts after the norm).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.attention import chain_block_mask, dense_chain, flex_chain
from drafters.chains import fewer, narrow, pick, spread, visible_rows
from drafters.contract import (
    Batch,
    Drafter,
    Needs,
    Proposal,
    SlotBatch,
    TargetParts,
    check_layers,
    default_layers,
    grid,
)
from drafters.decoder import FusedLayer, key_shape, take_block, take_head, take_norm
from drafters.drafting import choose, take_rows, write_at
from drafters.layers import Rotary, SharedEmbedding, SharedHead, layer_config, layer_settings
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary


@dataclass
class DraftState:
    """Drafting state: keys and values [R, G, C, d] by position, rows read [R], last fused features [R, D], anchor
    [R]."""

    keys: Tensor
    values: Tensor
    length: Tensor
    fused: Tensor
    anchor: Tensor


class Eagle3(Drafter):
    """EAGLE-3 drafter.

    target: frozen parts of the target (embedding, and the head when head="target"). vocabulary: None means all target
    tokens. num_slots: K, steps of the training-time test and tokens drafted. layers: captured target layers, null for
    the default three. head: "own" trains a head over the draft vocabulary, "target" shares the frozen one. layer:
    overrides of the decoder layer's sizes (drafters.layers.LAYER_KEYS). keep: share of the chains of the
    fullest row that training takes one slot deeper, drawn anew each step and nested (emptier rows keep more: the room
    is there). It stands in for the paper's 0.8^k loss weights at a fraction of the work.
    """

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 7,
        layers: list[int] | None = None,
        head: Literal["own", "target"] = "own",
        switches: dict[str, bool] | None = None,
        layer: dict[str, Any] | None = None,
        keep: float = 1.0,
    ) -> None:
        super().__init__()
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {keep}")
        if head not in ("own", "target"):
            raise ValueError(f'head must be "own" or "target", got {head!r}')
        depth = target.config.num_hidden_layers
        self.num_slots, self.keep = num_slots, keep
        self.needs = Needs(check_layers(tuple(layers), depth) if layers else default_layers(depth))
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.head = head
        self.switches = {"fc_norm": False, "norm_output": False, "norm_before_residual": False}
        unknown = sorted(set(switches or {}) - set(self.switches))
        if unknown:
            raise ValueError(f"unknown switch(es) {', '.join(unknown)}; allowed: {', '.join(self.switches)}")
        self.switches |= switches or {}
        self.layer_config = config = layer_config(target.config, layer)
        size, count = config.hidden_size, len(self.needs.layers)
        if self.switches["fc_norm"]:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(count))
        self.fc = nn.Linear(count * size, size, bias=False)
        self.midlayer = FusedLayer(config, self.switches["norm_before_residual"])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head: nn.Module = (
            nn.Linear(size, len(self.vocabulary), bias=False)
            if head == "own"
            else SharedHead(target, self.vocabulary.ids.to(target.head.device))
        )
        self.embedding = SharedEmbedding(target)
        self.rotary = Rotary(config)

    def settings(self) -> dict[str, Any]:
        return {
            "num_slots": self.num_slots,
            "layers": list(self.needs.layers),
            "head": self.head,
            "switches": dict(self.switches),
            "layer": layer_settings(self.layer_config),
            "keep": self.keep,
        }

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [..., L, D] -> fused features [..., D]."""
        if self.switches["fc_norm"]:
            aux = torch.stack([norm(aux[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        return self.fc(aux.flatten(-2))

    def project(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, G, N, d] of attention inputs [B, N, 2D] at positions [B, N]."""
        return self.midlayer.self_attn.keys_values(joined, self.rotary, positions)

    def query(self, joined: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [B, H, N, d]."""
        return self.midlayer.self_attn.query(joined, self.rotary, positions)

    def slots(self, batch: Batch) -> SlotBatch:
        """Training-time test of K steps over all anchors; queries run at anchors only, keys over the whole row."""
        labels = grid(batch, self.num_slots)
        embedded = self.embedding(batch.tokens)
        joined, residual = self.midlayer.join(self.fuse(batch.aux)[:, :-1], embedded[:, 1:])
        prefix = self.project(joined, batch.positions[:, :-1])
        rows = (batch.anchors - 1).clamp_min(0)
        joined, residual = take_rows(joined, rows), take_rows(residual, rows)
        visible, positions = visible_rows(batch, rows), batch.positions.gather(1, rows)
        chain: list[tuple[Tensor, Tensor]] = []
        hidden, mask, place, output = [], labels.mask, None, residual
        for k in range(self.num_slots):
            if k > 0:
                recycled, following = self._recycle(output), self.embedding(labels.prev_ids[:, :, k])
                if self.keep < 1:
                    count = max(1, math.ceil(self.keep * positions.shape[1]))
                    chosen = fewer(batch, mask[:, :, k], place, count)
                    place = chosen if place is None else place.gather(1, chosen)
                    mask = narrow(mask, k, place)
                    recycled, following = take_rows(recycled, chosen), take_rows(following, place)
                    chain = [(pick(key, chosen), pick(value, chosen)) for key, value in chain]
                    positions, visible = positions.gather(1, chosen), take_rows(visible, chosen)
                joined, residual = self.midlayer.join(recycled, following)
                chain.append(self.project(joined, positions + k))
            attended = self._attend(self.query(joined, positions + k), prefix, chain, visible)
            output = self.midlayer.finish(residual, attended)
            normed = self.norm(output)
            hidden.append(spread(normed, place, mask.shape[1]))
        return SlotBatch(torch.stack(hidden, 2), labels.prev_ids, labels.target_ids, mask, labels.teacher)

    def _recycle(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.switches["norm_output"] else output

    def _attend(
        self, query: Tensor, prefix: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]], visible: Tensor
    ) -> Tensor:
        if query.is_cuda:
            return flex_chain(query, prefix, chain, chain_block_mask(visible, len(chain)))
        return dense_chain(query, prefix, chain, visible)

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] (already normed) -> [N, W]; an EAGLE-3 head does not read prev_ids."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def warm_start(self, target: TargetParts) -> list[str]:
        """Fusion from the last captured layer, layer from the target's last block, norm and head from the target's.

        The embedding halves of q, k, v start small and random, so step 1 begins as the target's last block reading
        the last captured layer.
        """
        size = self.layer_config.hidden_size
        self.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
        taken, norm_shift = [f"fc <- identity on layer {self.needs.layers[-1]}"], take_norm(self.norm, target)
        if norm_shift is not None:
            taken.append("norm <- target's final norm")
        taken += take_head(self.lm_head, self.vocabulary, target)
        if norm_shift is None or target.last_block is None:
            return taken
        names = take_block(self.midlayer, target.last_block(), norm_shift)
        return taken + [f"midlayer.{name} <- target's last block" for name in names]

    def begin(self, requests: int, capacity: int) -> DraftState:
        config, like = self.layer_config, self.fc.weight
        groups, width = key_shape(config)
        shape = (requests, groups, capacity + self.num_slots + 1, width)
        empty = torch.zeros(requests, dtype=torch.int64, device=like.device)
        return DraftState(
            like.new_zeros(shape),
            like.new_zeros(shape),
            empty,
            like.new_zeros(requests, config.hidden_size),
            empty.clone(),
        )

    def observe(self, state: DraftState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        fused = self.fuse(aux.to(self.fc.weight.dtype))
        joined, _ = self.midlayer.join(fused, self.embedding(next_ids))
        offsets = torch.arange(next_ids.shape[1], device=next_ids.device)
        positions = state.length[:, None] + offsets
        keys, values = self.project(joined, positions)
        # Entries past a request's length go to the spare last column, which no query ever sees.
        columns = torch.where(offsets < lengths[:, None], positions, state.keys.shape[2] - 1)
        _write(state, columns, keys, values)
        end = (lengths - 1).clamp_min(0)[:, None]
        fresh = lengths > 0
        state.fused = torch.where(fresh[:, None], take_rows(fused, end)[:, 0], state.fused)
        state.anchor = torch.where(fresh, next_ids.gather(1, end)[:, 0], state.anchor)
        state.length = state.length + lengths

    def propose(self, state: DraftState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        hidden, token, tokens, probs = state.fused, state.anchor, [], []
        columns = torch.arange(state.keys.shape[2], device=token.device)
        for k in range(num_slots):
            position = (state.length - 1 + k)[:, None]
            joined, residual = self.midlayer.join(hidden[:, None], self.embedding(token)[:, None])
            if k > 0:
                _write(state, position, *self.project(joined, position))
            visible = (columns <= position)[:, None]
            attended = dense_chain(self.query(joined, position), (state.keys, state.values), [], visible)
            output = self.midlayer.finish(residual, attended)[:, 0]
            normed = self.norm(output)
            hidden = self._recycle(output)
            logits = self.logits(normed, token)
            token, chosen = choose(logits, self.vocabulary, sampling, seeds, state.length + k + 1)
            tokens.append(token)
            if chosen is not None:
                probs.append(chosen)
        return Proposal(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)


def _write(state: DraftState, columns: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values [R, G, N, d] at columns [R, N] of the state's caches."""
    write_at(state.keys, columns, keys)
    write_at(state.values, columns, values)
