"""The contract that every drafter keeps: what it needs, its slot grid, its head, and how it drafts.

Letters in shapes: B rows, T tokens, A anchors, K slots, L captured layers, D hidden width, V target vocabulary,
W draft vocabulary, R requests, M newly verified positions.

The slot grid. A drafter trains on A anchors x K slots. The anchor is the last known token, at position a; slot k
(1..K) predicts the token at a + k. A slot may see features strictly before a and tokens up to a + k - 1; that last
visible position is its frontier.

    position   a-2   a-1    a    a+1   a+2   a+3
    token      .     .      A    .     .     .
    feature    f     f      -    -     -     -        (the target has not read A yet)
    predicts                     1     2     3        slot k of the anchor A

`grid` builds labels and the slot mask for all families, from one rule: the anchor lies in the answer, and so do the
predicted token (the end of turn counts) and every slot before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.branches import Branches
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Needs:
    """What a drafter reads of the target.

    layers: target layer ids in ascending order; 0 is the first decoder layer's *output*. May be empty.
    last_hidden: whether the drafter itself reads the last hidden state (after the target's final norm). The teacher
        always needs it; this flag is about drafting.
    """

    layers: tuple[int, ...]
    last_hidden: bool = False


@dataclass(frozen=True)
class TargetParts:
    """The frozen pieces of the target that a drafter shares or starts from. Never saved with a drafter.

    config: the target's text config.
    embedding: [V, D] input embedding rows; multiply a looked-up row by `embedding_scale` (Gemma) before use.
    norm: the final norm, maps the last layer's output to the last hidden state.
    head: [V, D] output projection; logits = softcap(head @ last * logit_scale + head_bias).
    last_block: tensors of the last decoder layer by their names inside that layer, for warm starts.
    identity: name, weight and tokenizer fingerprints, as written into a drafter's config.json.
    mask_token: an embedding row that no text of this target contains, for drafters with mask inputs; None when there
        is no such row.
    """

    config: PretrainedConfig
    embedding: Tensor
    norm: nn.Module
    head: Tensor
    embedding_scale: float = 1.0
    head_bias: Tensor | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    last_block: Callable[[], dict[str, Tensor]] | None = None
    identity: dict[str, Any] | None = None
    mask_token: int | None = None

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """Target logits of last hidden states. last [..., D], moved to the head's device; rows [W] token ids or None
        for all. Returns [..., W or V], there."""
        weight = self.head if rows is None else self.head[rows]
        bias = None if self.head_bias is None else self.head_bias if rows is None else self.head_bias[rows]
        return self.shape_logits(nn.functional.linear(last.to(weight.device, weight.dtype), weight, bias))

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Apply the target's logit scale and soft cap (both identity for most families). Any shape."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits


@dataclass
class Drafted:
    """The drafter's own tokens after each anchor, which the slot grid reads in place of the data's.

    tokens [B, A, K] int64. labels [B, A, K] int64: the target's token at each slot. mask [B, A, K] bool: slots that
    the target's verdict is known of. weights [B, A, K] float32: factors of their losses. teacher [B, A, K] int64:
    position in the row whose last hidden state predicts the slot's token; from T on, an entry of `last`, what the
    target showed when it read drafted tokens: last [B, X, D], top1 and lse [B, X].
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    weights: Tensor
    teacher: Tensor
    last: Tensor
    top1: Tensor
    lse: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move all tensors; cast `last` to dtype when given."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        if dtype is not None:
            moved["last"] = moved["last"].to(dtype)
        return replace(self, **moved)


@dataclass
class Batch:
    """Packed rows with the target's features.

    tokens [B, T] int64. positions [B, T] int64, restarting at 0 in each document. documents [B, T] int64, -1 on
    padding. turns [B, T] int64: 0 outside answers, n inside the n-th answer of its document (the end of turn
    included). aux [B, T, L, D] chosen layers' outputs, ascending. last [B, T, D] last hidden state after the final
    norm. top1 [B, T] int64: argmax of the target's logits at each position. lse [B, T] float32: log-sum-exp of those
    logits. anchors [B, A] int64 positions in the row, ascending, -1 on padding. seed: the micro-step, for drafters that
    draw while training; they draw by (seed, row number), never by the rank that holds a row. progress: share of
    training done, in [0, 1), for curricula. first_row, row_step: row b is number first_row + b * row_step of the
    micro-step's rows over all ranks. drafted: the drafter's own tokens after the anchors, when it trains on those.
    top_ids [B, T, k] int64 and top_logp [B, T, k] float32: the target's k most likely tokens and their log
    probabilities, where features hold those in place of `last`, which then has no width [B, T, 0].
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    turns: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    lse: Tensor
    anchors: Tensor
    seed: int = 0
    progress: float = 0.0
    drafted: Drafted | None = None
    first_row: int = 0
    row_step: int = 1
    top_ids: Tensor | None = None
    top_logp: Tensor | None = None

    @property
    def row_numbers(self) -> Tensor:
        """[B] int64: each row's number among the micro-step's rows of all ranks."""
        return self.first_row + self.row_step * torch.arange(len(self.tokens), device=self.tokens.device)

    def pin_memory(self) -> Self:
        """For torch's loader: page-locked, so that `to` does not wait."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in tensors.items() if isinstance(value, Tensor)
        }
        return replace(self, **pinned)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move all tensors; cast the features (aux, last) to dtype when given."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        if dtype is not None:
            moved |= {name: moved[name].to(dtype) for name in ("aux", "last")}
        if self.drafted is not None:
            moved["drafted"] = self.drafted.to(device, dtype)
        return replace(self, **moved)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `teacher` positions point to: last [B, T + X, D], top1 and lse [B, T + X]; X = 0 without drafted
        tokens."""
        if self.drafted is None:
            return self.last, self.top1, self.lse
        mine, own = (self.last, self.top1, self.lse), (self.drafted.last, self.drafted.top1, self.drafted.lse)
        last, top1, lse = (torch.cat([row, extra], 1) for row, extra in zip(mine, own, strict=True))
        return last, top1, lse


@dataclass
class SlotBatch:
    """The slot grid of one batch.

    hidden [B, A, K, D] input of the drafter's head. prev_ids [B, A, K] the token before each slot (data).
    target_ids [B, A, K] the token each slot predicts (data). mask [B, A, K] bool, True where supervised.
    teacher [B, A, K] position in the row whose last hidden state predicts the slot's token (a + k - 1).
    labels [B, A, K] target ids that a drafter learns in place of the target's most likely tokens; None for those.
    """

    hidden: Tensor
    prev_ids: Tensor
    target_ids: Tensor
    mask: Tensor
    teacher: Tensor
    labels: Tensor | None = None


@dataclass
class Grid:
    """Labels and mask of the slot grid, before any drafter has run. Shapes as in SlotBatch."""

    prev_ids: Tensor
    target_ids: Tensor
    mask: Tensor
    teacher: Tensor


def grid(batch: Batch, num_slots: int) -> Grid:
    """Labels, previous tokens, teacher positions and slot mask for every anchor.

    Worked example, one document, K = 2: tokens p p x y e q (p prompt, e end of turn, q the next prompt),
    turns 0 0 1 1 1 0. Anchors are x and y (positions 2, 3). Slot mask of x: [y ok, e ok]; of y: [e ok, q no].
    Where the batch says what the drafter itself drafted, that stands in place of the data, and its mask holds.
    """
    if batch.drafted is not None:
        return _drafted_grid(batch, batch.drafted, num_slots)
    tokens_in_row = batch.tokens.shape[1]
    anchors = batch.anchors.clamp_min(0)[..., None]
    steps = torch.arange(1, num_slots + 1, device=anchors.device)
    wanted = anchors + steps
    inside = (batch.anchors[..., None] >= 0) & (wanted < tokens_in_row)
    wanted = wanted.clamp_max(tokens_in_row - 1)
    teacher = (wanted - 1).clamp_min(0)

    def at(values: Tensor, index: Tensor) -> Tensor:
        return values.gather(1, index.flatten(1)).view(index.shape)

    same_turn = (at(batch.turns, wanted) == at(batch.turns, anchors)) & (at(batch.turns, anchors) > 0)
    same_document = at(batch.documents, wanted) == at(batch.documents, anchors)
    mask = (inside & same_turn & same_document).cumprod(-1).bool()
    return Grid(at(batch.tokens, teacher), at(batch.tokens, wanted), mask, teacher)


def _drafted_grid(batch: Batch, drafted: Drafted, num_slots: int) -> Grid:
    """The grid of drafted tokens: slot k's previous token is the draft of slot k - 1, the anchor's before slot 1."""
    tokens = drafted.tokens[:, :, :num_slots]
    anchors = batch.tokens.gather(1, batch.anchors.clamp_min(0))[..., None]
    prev_ids = torch.cat([anchors, tokens[:, :, :-1]], 2)
    labels, mask, teacher = (x[:, :, :num_slots] for x in (drafted.labels, drafted.mask, drafted.teacher))
    return Grid(prev_ids, labels, mask, teacher)


def answer_anchors(turns: Tensor, documents: Tensor) -> Tensor:
    """True where a token may be an anchor. turns, documents [..., T] -> bool [..., T].

    It and its successor lie in one answer, and at least one feature of its document lies before it.
    """
    allowed = torch.zeros_like(turns, dtype=torch.bool)
    allowed[..., 1:-1] = (
        (turns[..., 1:-1] > 0)
        & (turns[..., 1:-1] == turns[..., 2:])
        & (documents[..., 1:-1] == documents[..., 2:])
        & (documents[..., 1:-1] == documents[..., :-2])
    )
    return allowed


@dataclass
class Proposal:
    """Drafted tokens of one round, a chain per request.

    tokens [R, K] int64 target ids. probs [R, K, V] float: the exact distribution each token was drawn from, after
    temperature, top-k and top-p; None when the tokens were chosen, not drawn (greedy, or by noise). confidences
    [R, K] float in [0, 1] or None: estimated conditional acceptance.
    peaks [R, K] float or None: q_max of each slot (see drafters.drafting.peaks), where a caller noted it.
    """

    tokens: Tensor
    probs: Tensor | None = None
    confidences: Tensor | None = None
    peaks: Tensor | None = None


Coupling = Literal["rejection", "same_noise", "same_noise_ranked"]


class Drafter(nn.Module, ABC):
    """Base class of every drafter.

    Subclasses are built as `cls(target=TargetParts, vocabulary=DraftVocabulary | None, **model)`; `model` holds plain
    values only (it is written to config.json as `settings()` and rebuilds the drafter alone). Frozen target tensors
    are kept out of the state dict.

    slot_convention: whether slot 1 is read from the anchor's own input row ("anchor_first") or from a mask row at the
    position it predicts ("fill_in"). mask_token: the input token of mask rows, if there are any. anchors_per_row: how
    many anchors training draws from each packed row (None: all). follows_drafts: whether `slots` reads a batch's
    drafted tokens in every slot; where False, slots after a rejected draft cannot be trained. reads_teacher: whether
    `slots` itself reads the target's last hidden states where slots are supervised, so that features without them
    cannot train it. coupling: how sampled proposals are verified (see eval.verification); "same_noise" for drafters
    that read the noise of the target's own sampler. branching: how it drafts trees: "slots" when no slot reads drafted
    tokens, so that one pass tells the distributions of all; "steps" when it goes from level to level; None when it
    drafts chains only. fitting_measures: the objective terms that read this drafter's labels (None: any).
    training_only: settings, by dotted name, that no tensor and no draft depends on, so that a trained head may be
    trained on with others.
    """

    num_slots: int
    needs: Needs
    vocabulary: DraftVocabulary
    slot_convention: Literal["anchor_first", "fill_in"] = "anchor_first"
    coupling: Coupling = "rejection"
    mask_token: int | None = None
    anchors_per_row: int | None = None
    follows_drafts: bool = True
    branching: Literal["slots", "steps"] | None = None
    reads_teacher: bool = False
    fitting_measures: tuple[str, ...] | None = None
    training_only: tuple[str, ...] = ()
    # Confidences [R, K] from peaks [R, K], fitted afterwards and loaded beside a head that gives none of its own.
    estimator: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The constructor's plain arguments, resolved (no nulls that mean 'default'): JSON-able."""

    @abstractmethod
    def slots(self, batch: Batch) -> SlotBatch:
        """Training forward over the whole slot grid; gradient flows through `hidden`."""

    @abstractmethod
    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Draft logits for any chunk of slots. hidden [N, D], prev_ids [N] -> [N, W]; row w is target id
        vocabulary.ids[w]."""

    def measures(self) -> "dict[str, Callable[[Any], Tensor]]":
        """The drafter's own loss terms: name -> function of training.objectives.Scored that gives [n] losses, one a
        supervised slot. Objectives name them with the prefix `own_`."""
        return {}

    def warm_start(self, target: TargetParts) -> list[str]:
        """Initialise from the target where shapes allow. Returns one line per part that was taken; empty if none."""
        return []

    def warm_start_on(self, batch: Batch) -> list[str]:
        """The part of a warm start that is solved from a batch of features, after `warm_start`. Returns as that."""
        return []

    @abstractmethod
    def begin(self, requests: int, capacity: int) -> Any:
        """An empty drafting state for R requests of at most `capacity` positions each (prompt + answer)."""

    def start(self, state: Any, first_ids: Tensor) -> None:  # noqa: B027
        """Read each request's first token, first_ids [R], the one that no next_ids shows. Called once, right after
        `begin`. Only drafters that read whole texts do anything with it."""

    @abstractmethod
    def observe(self, state: Any, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        """Read newly verified positions.

        For request r, entries j < lengths[r] are the next unread positions in order: aux [R, M, L, D] and
        last [R, M, D] their features, next_ids [R, M] the token that *follows* each. The last next_id is the anchor.
        lengths [R] int64, may be 0 (nothing new). Entries beyond lengths are ignored.
        """

    @abstractmethod
    def propose(self, state: Any, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """Draft a chain of num_slots tokens after each request's anchor. Leaves `state` as it was.

        seeds [R] int64: per-request random seeds; equal seeds and positions draw equal tokens in any batch.
        """

    def branch(self, state: Any, num_slots: int) -> Branches:
        """Open the branches of one round, num_slots levels deep. Leaves `state` as it was but for free columns:
        `begin` had room for every node that is read. ValueError where `branching` is None."""
        raise ValueError(f"{type(self).__name__} drafts chains only: its proposals cannot be trees")


def default_layers(num_target_layers: int, count: int = 3) -> tuple[int, ...]:
    """Target layer ids that EAGLE-3 captures by default: outputs 1, L//2 - 1, L - 4 (engines' inputs 2, L//2, L - 3).

    Raises ValueError when the target is too shallow to give three different layers.
    """
    layers = (1, num_target_layers // 2 - 1, num_target_layers - 4)[:count]
    if count > 3 or len(set(layers)) != len(layers) or min(layers) < 0 or list(layers) != sorted(layers):
        raise ValueError(
            f"no default capture layers for a target of {num_target_layers} layers; set drafter.model.layers to "
            f"ascending ids in 0..{num_target_layers - 1}"
        )
    return layers


def check_layers(layers: tuple[int, ...], num_target_layers: int, least: int = 1) -> tuple[int, ...]:
    """Layers as given when ascending, distinct, inside the target and at least `least`; ValueError otherwise."""
    if len(layers) < least:
        raise ValueError(f"at least {least} captured layer(s) are needed, got {list(layers)}")
    if list(layers) != sorted(set(layers)) or not set(layers) <= set(range(num_target_layers)):
        raise ValueError(f"layers must be ascending, distinct ids in 0..{num_target_layers - 1}, got {list(layers)}")
    return layers
