"""P-EAGLE (arXiv 2602.01469): EAGLE-3's first layer and plain layers after it, all slots in one pass.

A row of depth 1 is EAGLE-3's: the fused features of position t beside the embedding of the token at t + 1. The
anchor's own row is t = a - 1. Slot k >= 2 is a row of depth k of that anchor: a learned feature (`mask_hidden`, fused
like a real one) beside the mask token's embedding, at rotary position (a - 1) + (k - 1).

    position     a - 3   a - 2   a - 1        a             a + 1
    hidden       fc(f)   fc(f)   fc(f)        fc(mask)      fc(mask)
    token        x       x       x_a          MASK          MASK
    depth        1       1       1            2             3
    predicts                     a + 1        a + 2         a + 3

A row sees the depth-1 rows of its document up to its anchor's, and its own anchor's rows up to its own depth. Training
has K rows an anchor; conditional drop-token sampling keeps the share max(keep^(d-1), keep_min) of the anchors at depth
d, each depth drawn from the one before, so that every kept chain is whole.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.attention import block_mask, dense_chain, flex_chain, fused
from drafters.branches import SlotBranches
from drafters.chains import fewer, narrow, pick, spread, visible_rows
from drafters.contract import Batch, Drafter, Proposal, SlotBatch, TargetParts, grid
from drafters.decoder import (
    FusedLayer,
    PlainLayer,
    captured,
    draft_head,
    key_shape,
    take_block,
    take_head,
    take_norm,
)
from drafters.drafting import at_once, take_rows, write_at
from drafters.layers import Rotary, SharedEmbedding, check_counts, complete, layer_config, layer_settings
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary

MASK_ROWS: dict[str, Any] = {"token": None, "keep": 0.8, "keep_min": 0.2}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Rows:
    """All rows of a batch: the T - 1 of depth 1, then those of depth 2 for its anchors, of depth 3 for its, and so on.

    row, depth, document, position [B, N]: the depth-1 row of a row's anchor (of a depth-1 row: itself), its depth, its
    document, its rotary position; rows of padding anchors lie in a document of their own. For depths 2..K: parts, where
    they lie among the N; chosen [B, A_d], which of the depth before they continue (None: all); place [B, A_d], their
    anchors (None: all). visible, for depths 1..K: the depth-1 rows they see, [B, A_d, T - 1] bool.
    """

    row: Tensor
    depth: Tensor
    document: Tensor
    position: Tensor
    parts: list[slice]
    chosen: list[Tensor | None]
    place: list[Tensor | None]
    visible: list[Tensor]

    def sees(self, b: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether row `query` of batch row b sees row `key`; index tensors of shapes that broadcast."""
        same = self.document[b, query] == self.document[b, key]
        before = (self.depth[b, key] == 1) & (self.row[b, key] <= self.row[b, query])
        own = (self.row[b, key] == self.row[b, query]) & (self.depth[b, key] <= self.depth[b, query])
        return same & (before | own)

    @cached_property
    def tiles(self) -> BlockMask:
        """`sees` for FlexAttention."""
        batch, length = self.row.shape

        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(b, query, key)

        return block_mask(allowed, (batch, length, length), self.row.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [B, H, N, d], keys and values [B, G, N, d] -> [B, H, N, d]. Two equal forms."""
        return self.flex(query, keys, values) if fused(query) else self.dense(query, keys, values)

    def flex(self, query: Tensor, keys: Tensor, values: Tensor, compiled: bool = True) -> Tensor:
        """One FlexAttention over all rows."""
        return flex_chain(query, (keys, values), [], self.tiles, compiled)

    def dense(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Depth by depth, so that no two mask rows of different anchors ever meet."""
        first = self.visible[0].shape[1]
        prefix = (keys[:, :, :first], values[:, :, :first])
        out = [dense_chain(query[:, :, :first], prefix, [], self.visible[0])]
        chain: list[tuple[Tensor, Tensor]] = []
        for part, chosen, visible in zip(self.parts, self.chosen, self.visible[1:], strict=True):
            if chosen is not None:
                chain = [(pick(key, chosen), pick(value, chosen)) for key, value in chain]
            chain.append((keys[:, :, part], values[:, :, part]))
            out.append(dense_chain(query[:, :, part], prefix, chain, visible))
        return torch.cat(out, 2)


def lay_out(batch: Batch, mask: Tensor, shares: list[float]) -> tuple[Rows, Tensor]:
    """Rows of a batch for K = len(shares) depths, and the slot mask [B, A, K] without the slots that were dropped.

    shares: of the anchors of the fullest row, how many have a row at each depth (emptier rows keep more: the room is
    there). Not increasing, 1 at depth 1. Kept are those with a supervised slot first.
    """
    count, length = len(batch.anchors), batch.tokens.shape[1] - 1
    columns = torch.arange(length, device=mask.device).expand(count, -1)
    real, own = batch.anchors > 0, (batch.anchors - 1).clamp_min(0)
    positions = batch.positions.gather(1, own)
    documents = torch.where(real, batch.documents.gather(1, own), -2)
    row, depth, document, position = [columns], [torch.ones_like(columns)], [batch.documents[:, :-1]], []
    position.append(batch.positions[:, :-1])
    visible, current = [visible_rows(batch, columns)], visible_rows(batch, own)
    chosens: list[Tensor | None] = []
    places: list[Tensor | None] = []
    parts, start, place, own = [], length, None, torch.where(real, own, -1)
    for k in range(1, len(shares)):
        chosen = None
        kept = max(1, math.ceil(shares[k] * mask.shape[1]))
        if kept < own.shape[1]:
            chosen = fewer(batch, mask[:, :, k], place, kept)
            place = chosen if place is None else place.gather(1, chosen)
            mask = narrow(mask, k, place)
            own, positions, documents = (values.gather(1, chosen) for values in (own, positions, documents))
            current = take_rows(current, chosen)
        row.append(own)
        depth.append(torch.full_like(own, k + 1))
        document.append(documents)
        position.append(positions + k)
        parts.append(slice(start, start + own.shape[1]))
        start = parts[-1].stop
        chosens.append(chosen)
        places.append(place)
        visible.append(current)
    rows = Rows(
        row=torch.cat(row, 1),
        depth=torch.cat(depth, 1),
        document=torch.cat(document, 1),
        position=torch.cat(position, 1),
        parts=parts,
        chosen=chosens,
        place=places,
        visible=visible,
    )
    return rows, mask


@dataclass
class DraftState:
    """Drafting state: keys and values [R, G, C, d] of each layer by position, rows read [R], and what the last layer
    made of the newest row, which is the anchor's [R, D]."""

    keys: list[Tensor]
    values: list[Tensor]
    length: Tensor
    output: Tensor


class PEagle(Drafter):
    """P-EAGLE drafter.

    num_slots: K, rows an anchor. depth: layers. layers: captured target layers, null for the default three. head: "own"
    trains a head over the draft vocabulary, "target" shares the frozen one. layer: overrides of the layers' sizes
    (drafters.layers.LAYER_KEYS). mask_rows: token, the input token of mask rows (null: the target's unused token); keep
    and keep_min, training keeps the share max(keep^(d-1), keep_min) of the anchors at depth d, drawn anew each step
    (keep 1: all). A drafter in eval mode drops nothing.
    """

    training_only = ("mask_rows.keep", "mask_rows.keep_min")

    branching = "slots"

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 7,
        depth: int = 4,
        layers: list[int] | None = None,
        head: Literal["own", "target"] = "own",
        layer: dict[str, Any] | None = None,
        mask_rows: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_counts("", num_slots=num_slots, depth=depth)
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2, got {num_slots}")
        self.num_slots, self.head = num_slots, head
        self.needs = captured(target, layers)
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.mask_rows = _mask_rows(mask_rows or {}, target)
        self.mask_token = self.mask_rows["token"]
        self.layer_config = config = layer_config(target.config, layer)
        size, wide = config.hidden_size, len(self.needs.layers) * config.hidden_size
        self.fc = nn.Linear(wide, size, bias=False)
        # Small beside real features: what a mask row holds at first is what its attention brings.
        self.mask_hidden = nn.Parameter(0.1 * torch.randn(1, wide))
        self.layers = nn.ModuleList([FusedLayer(config), *(PlainLayer(config) for _ in range(depth - 1))])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = draft_head(head, target, self.vocabulary)
        self.embedding = SharedEmbedding(target)
        self.rotary = Rotary(config)

    def settings(self) -> dict[str, Any]:
        return {
            "num_slots": self.num_slots,
            "depth": len(self.layers),
            "layers": list(self.needs.layers),
            "head": self.head,
            "layer": layer_settings(self.layer_config),
            "mask_rows": dict(self.mask_rows),
        }

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [..., L, D] -> fused features [..., D]."""
        return self.fc(aux.flatten(-2))

    def masked(self, requests: int, count: int) -> tuple[Tensor, Tensor]:
        """Fused features and embeddings of `count` mask rows in each of `requests` rows, [B, count, D] each."""
        token = torch.full((1, 1), self.mask_rows["token"], device=self.mask_hidden.device)
        fused, embedded = self.fc(self.mask_hidden)[None], self.embedding(token).to(self.mask_hidden.dtype)
        return fused.expand(requests, count, -1), embedded.expand(requests, count, -1)

    def run(self, fused: Tensor, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Rows through all layers: fused, embedded [B, N, D] at positions [B, N] -> [B, N, D], before the final norm.

        attend(i, query, keys, values): attention of layer i, heads [B, H or G, N, d] -> [B, H, N, d].
        """
        first = cast(FusedLayer, self.layers[0])
        inputs, residual = first.join(fused, embedded)
        for i, layer in enumerate(cast(list[PlainLayer], self.layers)):
            if i > 0:
                inputs = layer.input_layernorm(residual)
            query = layer.self_attn.query(inputs, self.rotary, positions)
            keys, values = layer.self_attn.keys_values(inputs, self.rotary, positions)
            residual = layer.finish(residual, attend(i, query, keys, values))
        return residual

    def rows(self, batch: Batch, mask: Tensor) -> tuple[Rows, Tensor]:
        """The rows that this step trains, and the slot mask that is left. See lay_out."""
        keep, least = (self.mask_rows["keep"], self.mask_rows["keep_min"]) if self.training else (1.0, 1.0)
        return lay_out(batch, mask, [max(keep**k, least) for k in range(self.num_slots)])

    def slots(self, batch: Batch) -> SlotBatch:
        """All rows of all anchors in one pass; depth-1 rows run for the whole packed row, as keys of later ones."""
        labels = grid(batch, self.num_slots)
        rows, mask = self.rows(batch, labels.mask)
        requests, first = len(batch.tokens), batch.tokens.shape[1] - 1
        fused, embedded = self.masked(requests, rows.row.shape[1] - first)
        fused = torch.cat([self.fuse(batch.aux[:, :-1]), fused], 1)
        embedded = torch.cat([self.embedding(batch.tokens[:, 1:]), embedded], 1)
        output = self.run(fused, embedded, rows.position, lambda i, *heads: rows.attend(*heads))
        hidden = [take_rows(output[:, :first], (batch.anchors - 1).clamp_min(0))]
        for part, place in zip(rows.parts, rows.place, strict=True):
            hidden.append(spread(output[:, part], place, mask.shape[1]))
        hidden = self.norm(torch.stack(hidden, 2))
        return SlotBatch(hidden, labels.prev_ids, labels.target_ids, mask, labels.teacher)

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] (already normed) -> [N, W]; slots do not read prev_ids."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def warm_start(self, target: TargetParts) -> list[str]:
        """Fusion from the last captured layer, every layer from the target's last block, norm and head from the
        target's.

        Layers after the first start without output, so slot 1 begins as the target's last block reading the last
        captured layer.
        """
        size = self.layer_config.hidden_size
        self.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
        taken, norm_shift = [f"fc <- identity on layer {self.needs.layers[-1]}"], take_norm(self.norm, target)
        if norm_shift is not None:
            taken.append("norm <- target's final norm")
        taken += take_head(self.lm_head, self.vocabulary, target)
        if norm_shift is None or target.last_block is None:
            return taken
        block = target.last_block()
        for i, layer in enumerate(cast(list[PlainLayer], self.layers)):
            taken += [f"layers.{i}.{name} <- target's last block" for name in take_block(layer, block, norm_shift)]
            if i > 0:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
                taken.append(f"layers.{i}: o_proj and down_proj <- zero, the layer starts without output")
        return taken

    def begin(self, requests: int, capacity: int) -> DraftState:
        config, like = self.layer_config, self.fc.weight
        groups, width = key_shape(config)
        shape = (requests, groups, capacity + self.num_slots + 1, width)
        keys, values = ([like.new_zeros(shape) for _ in self.layers] for _ in range(2))
        length = torch.zeros(requests, dtype=torch.int64, device=like.device)
        return DraftState(keys, values, length, like.new_zeros(requests, config.hidden_size))

    def observe(self, state: DraftState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        fused = self.fuse(aux.to(self.fc.weight.dtype))
        offsets = torch.arange(next_ids.shape[1], device=next_ids.device)
        positions = state.length[:, None] + offsets
        # Entries past a request's length go to the spare last column, which no row that counts ever sees.
        columns = torch.where(offsets < lengths[:, None], positions, state.keys[0].shape[2] - 1)
        output = self._read(state, fused, self.embedding(next_ids), positions, columns)
        newest = take_rows(output, (lengths - 1).clamp_min(0)[:, None])[:, 0]
        state.output = torch.where((lengths > 0)[:, None], newest, state.output)
        state.length = state.length + lengths

    def _read(self, state: DraftState, fused: Tensor, embedded: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Run rows [R, N, D] at positions [R, N] over the caches; their keys and values go to columns [R, N]."""
        visible = torch.arange(state.keys[0].shape[2], device=positions.device) <= positions[..., None]

        def attend(i: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            write_at(state.keys[i], columns, keys)
            write_at(state.values[i], columns, values)
            return dense_chain(query, (state.keys[i], state.values[i]), [], visible)

        return self.run(fused, embedded, positions, attend)

    def propose(self, state: DraftState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """ValueError when more slots are asked for than were trained."""
        return at_once(self._slot_logits(state, num_slots), self.vocabulary, sampling, seeds, state.length)

    def branch(self, state: DraftState, num_slots: int) -> SlotBranches:
        return SlotBranches(self._slot_logits(state, num_slots))

    def _slot_logits(self, state: DraftState, num_slots: int) -> Tensor:
        """[R, K, W]. The anchor's row is already read; mask rows follow in one pass, at columns that the next observe
        overwrites."""
        if num_slots > self.num_slots:
            raise ValueError(f"this drafter was made for at most {self.num_slots} slots, got {num_slots}")
        hidden = state.output[:, None]
        if num_slots > 1:
            positions = state.length[:, None] + torch.arange(num_slots - 1, device=state.length.device)
            made = self._read(state, *self.masked(len(hidden), num_slots - 1), positions, positions)
            hidden = torch.cat([hidden, made], 1)
        return self.lm_head(self.norm(hidden))


def _mask_rows(given: dict[str, Any], target: TargetParts) -> dict[str, Any]:
    """The mask_rows group, complete and checked."""
    found = complete("mask_rows", MASK_ROWS, given)
    if found["token"] is None:
        found["token"] = target.mask_token
    if not isinstance(found["token"], int) or not 0 <= found["token"] < len(target.embedding):
        raise ValueError(
            f"mask token {found['token']} is no row of the target's {len(target.embedding)} embeddings; set "
            "drafter.model.mask_rows.token to an id that no text contains"
        )
    numbers = all(isinstance(found[name], int | float) for name in ("keep", "keep_min"))
    if not (numbers and 0 < found["keep"] <= 1 and 0 < found["keep_min"] <= 1):
        raise ValueError(f"keep and keep_min must be in (0, 1], got {found['keep']} and {found['keep_min']}")
    return found
