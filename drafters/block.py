"""What block drafters share (DFlash, arXiv 2602.06036, section 4): the target's features as context keys and values.

A block is the anchor's row and mask rows after it, drafted in one pass. Every layer projects the fused features of
positions before the anchor with its own key and value projections, and the rows attend to those and to each other.

    position        ... a-2   a-1  |  a      a+1    a+2    a+3
    context keys         c     c   |
    block rows                     |  x_a    MASK   MASK   MASK
    fill_in:     row predicts      |  -      a+1    a+2    a+3      a mask row predicts its own position; K + 1 rows
    anchor_first: row predicts     |  a+1    a+2    a+3             a row predicts the next position; K rows

Corrections that read the drafted tokens left to right (Markov, recurrent) are a subclass's `step` and `logits`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from drafters.attention import block_block_mask, dense_block, flex_block, fused
from drafters.branches import Branches, CarriedBranches, SlotBranches
from drafters.carry import carry_newest
from drafters.contract import Batch, Drafter, Needs, Proposal, SlotBatch, TargetParts, check_layers, grid
from drafters.decoder import HeadNormAttention, key_shape, take_norm
from drafters.drafting import at_once, choose, write_at
from drafters.layers import Rotary, SharedEmbedding, SharedHead, check_counts, complete, layer_config, layer_settings
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary

BLOCK: dict[str, Any] = {
    "depth": 5,
    "mask_token": None,
    "trained_mask": False,
    "window": None,
    "windowed": [],
    "anchors": 512,
}


def spread_layers(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` target layers, evenly from the second to the third-last (DFlash, section 4.1); one layer: the middle.

    ValueError when the target is too shallow for so many.
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    layers = tuple(round(1 + i * span / (count - 1)) for i in range(count))
    if len(set(layers)) != count or layers[0] < 0 or span < 0:
        raise ValueError(
            f"no {count} spread capture layers for a target of {num_target_layers} layers; set drafter.model.layers "
            f"to ascending ids in 0..{num_target_layers - 1}"
        )
    return layers


class BlockLayer(nn.Module):
    """One draft layer. window: its context and block attention is causal and reaches so far back; None: neither."""

    def __init__(self, config: LlamaConfig, window: int | None = None) -> None:
        super().__init__()
        self.self_attn = HeadNormAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window = window

    def forward(self, hidden: Tensor, view: "View", context: tuple[Tensor, Tensor]) -> Tensor:
        """Rows [B, A, S, D] through the layer; context keys and values [B, G, T, d]."""
        hidden = hidden + self.attend(self.input_layernorm(hidden), view, context)
        return hidden + self.feed(self.post_attention_layernorm(hidden))

    def attend(self, states: Tensor, view: "View", context: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of normed rows [B, A, S, D] to the context and to their own block."""
        attention, shape = self.self_attn, states.shape[1:3]
        flat = states.flatten(1, 2)
        query = attention.query(flat, view.rotary, view.positions).unflatten(2, shape)
        keys, values = attention.keys_values(flat, view.rotary, view.positions)
        own = (keys.unflatten(2, shape), values.unflatten(2, shape))
        out = view.attend(query, context, own, self.window)
        return attention.o_proj(out.permute(0, 2, 3, 1, 4).flatten(3))

    def feed(self, states: Tensor) -> Tensor:
        """The MLP on normed rows."""
        return self.mlp(states)


@dataclass
class View:
    """What the rows of a batch of blocks may see.

    documents [B, T] (context), anchors [B, A] positions of anchors in the context's columns, positions [B, A * S] for
    rotary angles, slots S.
    """

    rotary: Rotary
    documents: Tensor
    anchors: Tensor
    positions: Tensor
    slots: int
    masks: dict[int | None, BlockMask] = field(default_factory=dict, kw_only=True)  # by window, shared by layers

    def attend(
        self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], window: int | None
    ) -> Tensor:
        """Shapes as in `dense_block`; rows of a windowed layer are causal inside their block."""
        if fused(query) and torch.is_grad_enabled():
            if window not in self.masks:
                causal = window is not None
                self.masks[window] = block_block_mask(self.documents, self.anchors, self.slots, window, causal)
            return flex_block(query, context, block, self.masks[window])
        return dense_block(query, context, block, self.visible(window), self.inside(window, query.device))

    def visible(self, window: int | None) -> Tensor:
        """[B, A, S or 1, T]: context columns strictly before the anchor, in its document, inside the window."""
        columns = torch.arange(self.documents.shape[1], device=self.documents.device)
        anchors = self.anchors[..., None, None]
        own = self.documents.gather(1, self.anchors.clamp(0, self.documents.shape[1] - 1))[..., None, None]
        seen = (columns < anchors) & (self.documents[:, None, None] == own)
        if window is None:
            return seen
        rows = torch.arange(self.slots, device=self.documents.device)[:, None]
        return seen & (columns > anchors + rows - window)

    def inside(self, window: int | None, device: torch.device) -> Tensor:
        """[S, S]: all of the block, or in a windowed layer no later row and none further back than the window."""
        whole = torch.ones(self.slots, self.slots, dtype=torch.bool, device=device)
        return whole if window is None else whole.tril().triu(1 - window)


@dataclass
class BlockState:
    """Drafting state: context keys and values [R, G, C, d] of each layer by position, positions read and anchor [R]."""

    keys: list[Tensor]
    values: list[Tensor]
    length: Tensor
    anchor: Tensor


class BlockDrafter(Drafter):
    """Base of block drafters; complete in itself, with independent slots.

    num_slots: K, tokens drafted. layers: captured target layers, null for five spread ones. slot_convention: see the
    module. layer: overrides of the draft layers' sizes (drafters.layers.LAYER_KEYS). block: depth (draft layers),
    mask_token (id; null: the target's unused token), trained_mask (learn the mask rows' embedding instead of reading
    the target's), window and windowed (sliding attention of these draft layers), anchors (drawn from each packed row
    while training; null: all).
    """

    training_only: tuple[str, ...] = ("block.anchors",)

    sequential = False
    branching: Literal["slots", "steps"] | None = "slots"
    mask_token: int

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 15,
        layers: list[int] | None = None,
        slot_convention: Literal["anchor_first", "fill_in"] = "fill_in",
        layer: dict[str, Any] | None = None,
        block: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_counts("", num_slots=num_slots)
        if slot_convention not in ("anchor_first", "fill_in"):
            raise ValueError(f"slot_convention must be anchor_first or fill_in, got {slot_convention!r}")
        depth = target.config.num_hidden_layers
        self.num_slots = num_slots
        self.slot_convention = slot_convention
        self.needs = Needs(check_layers(tuple(layers), depth) if layers else spread_layers(depth))
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.block = self._block(block or {}, target)
        self.mask_token: int = self.block["mask_token"]
        self.anchors_per_row = self.block["anchors"]
        self.layer_config = config = layer_config(target.config, layer)
        size, windows = config.hidden_size, self.block["windowed"]
        self.fc = nn.Linear(len(self.needs.layers) * size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            self.make_layer(config, self.block["window"] if i in windows else None) for i in range(self.block["depth"])
        )
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = SharedHead(target, self.vocabulary.ids.to(target.head.device))
        self.embedding = SharedEmbedding(target)
        if self.block["trained_mask"]:
            row = target.embedding[self.mask_token].detach().float()
            self.mask_embedding = nn.Parameter(row * target.embedding_scale)
        self.rotary = Rotary(config)

    def _block(self, given: dict[str, Any], target: TargetParts) -> dict[str, Any]:
        """The block group, complete and checked."""
        found = complete("block", BLOCK, given)
        optional = {name: found[name] for name in ("window", "anchors") if found[name] is not None}
        check_counts("block.", depth=found["depth"], **optional)
        windowed = found["windowed"] = list(found["windowed"]) if isinstance(found["windowed"], list | tuple) else None
        if windowed is None or not all(isinstance(i, int) for i in windowed):
            raise ValueError("block.windowed must be a list of draft layers, [] for none")
        if bool(windowed) != (found["window"] is not None) or any(not 0 <= i < found["depth"] for i in windowed):
            raise ValueError(
                f"block.window and block.windowed go together, with draft layers in 0..{found['depth'] - 1}; got "
                f"window {found['window']}, windowed {windowed}"
            )
        if found["mask_token"] is None:
            found["mask_token"] = target.mask_token
        if not isinstance(found["mask_token"], int) or not 0 <= found["mask_token"] < len(target.embedding):
            raise ValueError(
                f"mask token {found['mask_token']} is no row of the target's {len(target.embedding)} embeddings; set "
                "drafter.model.block.mask_token to an id that no text contains"
            )
        return found

    @property
    def draft_layers(self) -> list[BlockLayer]:
        """`layers` by their type."""
        return cast(list[BlockLayer], list(self.layers))

    def make_layer(self, config: LlamaConfig, window: int | None) -> BlockLayer:
        """One draft layer; subclasses give their own kind."""
        return BlockLayer(config, window)

    def settings(self) -> dict[str, Any]:
        return {
            "num_slots": self.num_slots,
            "layers": list(self.needs.layers),
            "slot_convention": self.slot_convention,
            "layer": layer_settings(self.layer_config),
            "block": dict(self.block),
        }

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [..., L, D] -> context states [..., D]."""
        return self.hidden_norm(self.fc(aux.flatten(-2)))

    def rows(self, anchors: Tensor, num_slots: int) -> Tensor:
        """Input rows of blocks whose anchor tokens are anchors [B, A]: embeddings [B, A, S, D]."""
        count = num_slots + (self.slot_convention == "fill_in")
        ids = anchors.new_full((*anchors.shape, count), self.mask_token)
        ids[..., 0] = anchors
        embedded = self.embedding(ids)
        if not self.block["trained_mask"]:
            return embedded
        masks = self.mask_embedding.to(embedded.dtype).expand_as(embedded[..., 1:, :])
        return torch.cat([embedded[..., :1, :], masks], -2)

    def run(self, rows: Tensor, view: View, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Rows [B, A, S, D] through all layers -> normed states of the K slots [B, A, K, D]."""
        for layer, keys_values in zip(self.draft_layers, context, strict=True):
            rows = layer(rows, view, keys_values)
        return self.norm(rows[:, :, 1:] if self.slot_convention == "fill_in" else rows)

    def slots(self, batch: Batch) -> SlotBatch:
        """All blocks of a batch in one pass; blocks see their document's context and never each other."""
        labels, place = grid(batch, self.num_slots), batch.anchors.clamp_min(0)
        fused = self.fuse(batch.aux)
        context = [one.self_attn.keys_values(fused, self.rotary, batch.positions) for one in self.draft_layers]
        rows = self.rows(batch.tokens.gather(1, place), self.num_slots)
        positions = batch.positions.gather(1, place)[..., None] + torch.arange(rows.shape[2], device=place.device)
        view = View(self.rotary, batch.documents, batch.anchors, positions.flatten(1), rows.shape[2])
        hidden = self.run(rows, view, context)
        inputs = self.head_inputs(hidden.flatten(0, 1), labels.prev_ids.flatten(0, 1))
        return SlotBatch(
            inputs.unflatten(0, labels.mask.shape[:2]), labels.prev_ids, labels.target_ids, labels.mask, labels.teacher
        )

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] (already normed) -> [N, W]; independent slots do not read prev_ids."""
        return self.lm_head(hidden)

    def step(self, hidden: Tensor, prev_ids: Tensor, carry: Any) -> tuple[Tensor, Any]:
        """One slot of a recurrent head: hidden [N, D] and the token before [N] -> head input [N, H], next carry (None
        before slot 1)."""
        return hidden, carry

    def head_inputs(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, K, D], prev_ids [N, K] -> head inputs [N, K, H], as `step` makes them from left to right."""
        carry, inputs = None, []
        for k in range(hidden.shape[1]):
            made, carry = self.step(hidden[:, k], prev_ids[:, k], carry)
            inputs.append(made)
        return torch.stack(inputs, 1)

    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        """Estimated conditional acceptance [N] of slots with head inputs [N, H]; None without such a head."""
        return None

    @torch.no_grad()
    def warm_start(self, target: TargetParts) -> list[str]:
        """Fusion from the last captured layer, every draft layer from the target's last block, norm from the target's.

        More key-value heads than the target's take its heads in turn. Queries and keys keep unit head norms; a target
        that norms heads gives its own.
        """
        size = self.layer_config.hidden_size
        self.fc.weight.zero_()[:, -size:].copy_(torch.eye(size))
        taken = [f"fc <- identity on layer {self.needs.layers[-1]}"]
        shift = take_norm(self.norm, target)
        if shift is None:
            return taken
        taken.append("norm <- target's final norm")
        block = target.last_block() if target.last_block else {}
        if (entry := block.get("input_layernorm.weight")) is not None and entry.shape == self.hidden_norm.weight.shape:
            self.hidden_norm.weight.copy_(entry.float() + shift)
            taken.append("hidden_norm <- target's last block")
        for name, parameter in self.layers.named_parameters():
            source = block.get(name.split(".", 1)[1])
            if source is not None and name.endswith(("k_proj.weight", "v_proj.weight")):
                source = self._more_heads(source, len(parameter))
            if source is not None and source.shape == parameter.shape:
                parameter.copy_(source.float() + shift if source.ndim == 1 else source)
                taken.append(f"layers.{name} <- target's last block")
        return taken

    def sample_rows(self, anchors: Tensor) -> Tensor:
        """Input rows [B, A, S, D] that a warm start may expect of anchor tokens [B, A]."""
        return self.rows(anchors, self.num_slots)

    def _more_heads(self, source: Tensor, rows: int) -> Tensor:
        """Key or value heads repeated up to `rows`, where that is a multiple."""
        if len(source) == 0 or rows % len(source):
            return source
        heads = source.unflatten(0, (-1, key_shape(self.layer_config)[1]))
        return heads.repeat_interleave(rows // len(source), 0).flatten(0, 1)

    @torch.no_grad()
    def warm_start_on(self, batch: Batch) -> list[str]:
        """The first layer carries the newest feature (drafters.carry), layers between start silent, and the last one
        stays the target's last block, whose head norms take the size of its queries and keys."""
        first, last, size = self.draft_layers[0], self.draft_layers[-1], self.layer_config.hidden_size
        real = (batch.documents >= 0) & (batch.positions > 0)
        states = self.fc(batch.aux.to(self.fc.weight.dtype).flatten(-2))[real]
        features = self.hidden_norm(states)
        scale = states.pow(2).mean(-1, keepdim=True).sqrt()
        anchors = batch.tokens.gather(1, batch.anchors.clamp_min(0))[batch.anchors >= 0]
        if len(features) < size or not len(anchors):
            return [f"no feature is carried: {len(features)} features of a batch do not tell {size} directions"]
        first.input_layernorm.weight.fill_(1.0)
        rows = first.input_layernorm(self.sample_rows(anchors[None])).flatten(0, 2)
        frequencies = self.rotary.embedding.inv_freq
        wanted = states / scale * scale.median()
        apart, kept = carry_newest(first.self_attn, frequencies, features, rows, wanted)
        for layer in self.draft_layers[:-1]:
            layer.mlp.down_proj.weight.zero_()
        for layer in self.draft_layers[1:-1]:
            layer.self_attn.o_proj.weight.zero_()
        attention = last.self_attn
        if len(self.draft_layers) > 1 and bool((attention.q_norm.weight == 1).all()):
            attention.q_norm.weight.fill_(attention.q_proj(features).pow(2).mean().sqrt())
            attention.k_norm.weight.fill_(attention.k_proj(features).pow(2).mean().sqrt())
        return [f"layers.0 carries {kept:.1%} of the newest feature; {apart:.1%} of keys tell features from the block"]

    def begin(self, requests: int, capacity: int) -> BlockState:
        config, like = self.layer_config, self.fc.weight
        groups, width = key_shape(config)
        shape = (requests, groups, capacity + 1, width)
        empty = torch.zeros(requests, dtype=torch.int64, device=like.device)
        keys, values = ([like.new_zeros(shape) for _ in self.layers] for _ in range(2))
        return BlockState(keys, values, empty, empty.clone())

    def observe(self, state: BlockState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        fused = self.fuse(aux.to(self.fc.weight.dtype))
        offsets = torch.arange(next_ids.shape[1], device=next_ids.device)
        positions = state.length[:, None] + offsets
        # Entries past a request's length go to the spare last column, which no row ever sees.
        columns = torch.where(offsets < lengths[:, None], positions, state.keys[0].shape[2] - 1)
        for layer, keys, values in zip(self.draft_layers, state.keys, state.values, strict=True):
            made = layer.self_attn.keys_values(fused, self.rotary, positions)
            write_at(keys, columns, made[0])
            write_at(values, columns, made[1])
        end = (lengths - 1).clamp_min(0)[:, None]
        state.anchor = torch.where(lengths > 0, next_ids.gather(1, end)[:, 0], state.anchor)
        state.length = state.length + lengths

    def propose(self, state: BlockState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """ValueError when more slots are asked for than were trained."""
        hidden = self._slot_states(state, num_slots)
        if self.sequential:
            places = state.length[:, None] + torch.arange(1, num_slots + 1, device=state.length.device)
            return self._walk(hidden, state.anchor, sampling, seeds, places)
        return at_once(self._independent(hidden), self.vocabulary, sampling, seeds, state.length)

    def branch(self, state: BlockState, num_slots: int) -> Branches:
        hidden = self._slot_states(state, num_slots)
        if not self.sequential:
            return SlotBranches(self._independent(hidden))

        def step(states: Tensor, prev_ids: Tensor, carry: Any) -> tuple[Tensor, Any]:
            made, carry = self.step(states, prev_ids, carry)
            return self.logits(made, prev_ids), carry

        return CarriedBranches(hidden, state.anchor, step, self.pick_carry)

    def pick_carry(self, carry: Any, rows: Tensor) -> Any:
        """A carry of `step` for some of its rows. rows [N'] int64, repeats allowed."""
        return carry[rows]

    def _slot_states(self, state: BlockState, num_slots: int) -> Tensor:
        """States [R, K, D] of the slots after every anchor."""
        if num_slots > self.num_slots:
            raise ValueError(f"this drafter was made for at most {self.num_slots} slots, got {num_slots}")
        rows = self.rows(state.anchor[:, None], num_slots)
        anchors, length = state.length[:, None], state.keys[0].shape[2]
        positions = anchors + torch.arange(rows.shape[2], device=anchors.device)
        documents = torch.zeros(len(anchors), length, dtype=torch.int64, device=anchors.device)
        view = View(self.rotary, documents, anchors, positions, rows.shape[2])
        return self.run(rows, view, list(zip(state.keys, state.values, strict=True)))[:, 0]

    def _independent(self, hidden: Tensor) -> Tensor:
        """Logits [R, K, W] of slots [R, K, D] that do not read tokens."""
        return self.logits(hidden.flatten(0, 1), hidden.new_empty(0)).unflatten(0, hidden.shape[:2])

    def _walk(self, hidden: Tensor, anchor: Tensor, sampling: Sampling, seeds: Tensor, places: Tensor) -> Proposal:
        """Draft left to right: hidden [R, K, D] of the slots, anchor [R], absolute places [R, K]."""
        token, carry = anchor, None
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        confidences: list[Tensor] = []
        for k in range(hidden.shape[1]):
            head, carry = self.step(hidden[:, k], token, carry)
            if (sure := self.confidence(head, token)) is not None:
                confidences.append(sure)
            token, chosen = choose(self.logits(head, token), self.vocabulary, sampling, seeds, places[:, k])
            tokens.append(token)
            if chosen is not None:
                probs.append(chosen)
        return Proposal(
            torch.stack(tokens, 1),
            torch.stack(probs, 1) if probs else None,
            torch.stack(confidences, 1) if confidences else None,
        )
