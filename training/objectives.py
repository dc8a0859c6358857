"""Objectives on the slot grid: how far a slot's draft distribution q is from the target's p, weighted by slot.

Only supervised slots meet the vocabulary, a chunk of anchors at a time, and each chunk's gradient is made while its
logits are there, so [slots, V] never exists and no logit is computed twice (a drafter's own measure may make others).
Teacher logits are made once a position and shared by the K slots that predict the same token. `plain_terms` is the
slow, obvious form that the fast one must equal.

p over the draft vocabulary comes in two forms: `p` is the target's own probability (sums to less than 1 when the draft
vocabulary is reduced), `p_hat` is p renormalised over the draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from drafters.contract import Batch, Drafter, SlotBatch, TargetParts


@dataclass
class Scored:
    """n slots with everything a measure may read.

    logits [n, W] of the drafter. teach() gives the target's logits [u, W] on the draft vocabulary at u positions, made
    only for measures that read them; lse [u] their log-sum-exp over the whole vocabulary, owner [n] which of the u
    positions predicts a slot's token. label [n] draft id of the target's most likely token, or of the drafter's own
    label (SlotBatch.labels). data [n] draft id of the token in the data. prev [n] target id of the token before.
    hidden [n, H] the drafter's head input, last [n, D] the target's last hidden state. shape: G anchors, K slots of the
    group's grid. place [n]: where the n slots stand in it, flat. progress: share of training done.
    """

    logits: Tensor
    teach: Callable[[], Tensor]
    lse: Tensor
    owner: Tensor
    label: Tensor
    data: Tensor
    prev: Tensor
    hidden: Tensor
    last: Tensor
    shape: tuple[int, int]
    place: Tensor
    progress: float = 0.0

    @cached_property
    def teacher(self) -> Tensor:
        with torch.no_grad():
            return self.teach()

    @cached_property
    def logq(self) -> Tensor:
        return self.logits.float().log_softmax(-1)

    @cached_property
    def p_hat(self) -> Tensor:
        return self.teacher.float().softmax(-1)[self.owner]

    @cached_property
    def p(self) -> Tensor:
        return (self.teacher.float() - self.lse[:, None]).exp()[self.owner]

    @cached_property
    def overlap(self) -> Tensor:
        """[n] alpha = sum_v min(p_v, q_v), the chance that rejection sampling keeps a drafted token."""
        return torch.minimum(self.p, self.logq.exp()).sum(-1)

    def in_grid(self, values: Tensor) -> Tensor:
        """values [n] of the slots in their group's grid [G, K], 0 where nothing is supervised."""
        return values.new_zeros(math.prod(self.shape)).scatter(0, self.place, values).view(self.shape)


def soft_ce(s: Scored) -> Tensor:
    """-sum p_hat log q. [n]. The loss of arXiv 2503.01840."""
    return -(s.p_hat * s.logq).sum(-1)


def hard_ce(s: Scored) -> Tensor:
    """-log q of the target's most likely token, or of the drafter's own label. [n]."""
    return -s.logq.gather(-1, s.label[:, None])[:, 0]


def data_ce(s: Scored) -> Tensor:
    """-log q of the token in the data. [n]."""
    return -s.logq.gather(-1, s.data[:, None])[:, 0]


def kl(s: Scored) -> Tensor:
    """KL(p_hat || q). [n]."""
    log_p = s.teacher.float().log_softmax(-1)[s.owner]
    return (log_p.exp() * (log_p - s.logq)).sum(-1)


def reverse_kl(s: Scored) -> Tensor:
    """KL(q || p_hat): the drafter's mass where the target has none costs most (Draft-OPD, arXiv 2605.29343). [n]."""
    log_p = s.teacher.float().log_softmax(-1)[s.owner]
    return (s.logq.exp() * (s.logq - log_p)).sum(-1)


def tv(s: Scored) -> Tensor:
    """Total variation 1 - sum min(p, q). [n]; its gradient vanishes where p and q do not meet."""
    return 1.0 - s.overlap


def l1(s: Scored) -> Tensor:
    """Sum over v of |p_v - q_v|, twice the total variation (arXiv 2607.05147). [n]."""
    return 2.0 * tv(s)


def expected_acceptance(s: Scored) -> Tensor:
    """1 - prod_{i <= k} alpha_i: the chance that a chain ends before slot k is kept. [n].

    Summed over a chain's slots it is K less the expected accepted length, so its gradient is that of tau under
    rejection sampling (end-to-end TV). Use it with uniform weights.
    """
    alphas = s.in_grid(s.overlap).unbind(-1)
    # One by one: the backward pass of cumprod asks the device whether anything is 0.
    reached = accumulate(alphas, torch.mul)
    return 1.0 - torch.stack(list(reached), -1).flatten()[s.place]


def lk_alpha(s: Scored) -> Tensor:
    """-log alpha, alpha clamped at 1e-5 (LK losses, arXiv 2602.23881). [n]."""
    return -s.overlap.clamp_min(1e-5).log()


def lk_lambda(s: Scored, eta: float = 3.0) -> Tensor:
    """lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha), alpha detached (LK losses, arXiv 2602.23881). [n]."""
    share = torch.exp(-eta * s.overlap.detach())
    return share * kl(s) + (1.0 - share) * tv(s)


def smooth_l1(s: Scored) -> Tensor:
    """Smooth-L1 between the drafter's head input and the target's last hidden state, mean over D (arXiv
    2401.15077, section 3). [n]. ValueError where the head reads more than a hidden state."""
    if s.hidden.shape != s.last.shape:
        raise ValueError(
            f"smooth_l1 compares a head's input with the last hidden state: they are {s.hidden.shape[-1]} and "
            f"{s.last.shape[-1]} wide, as this drafter's head reads a recurrent state too; use another term"
        )
    return torch.nn.functional.smooth_l1_loss(s.hidden.float(), s.last.float(), reduction="none").mean(-1)


MEASURES: dict[str, Callable[[Scored], Tensor]] = {
    f.__name__: f
    for f in (soft_ce, hard_ce, data_ce, kl, reverse_kl, tv, l1, expected_acceptance, lk_alpha, lk_lambda, smooth_l1)
}
OWN = "own_"
# What top-k tokens cannot say: the target's probability of a token that it holds unlikely, and its hidden state.
WHOLE_TEACHER = ("reverse_kl", "smooth_l1")
FLOOR = -1e4  # logit of a token that is not among the kept: its probability is 0 in float32, and 0 x FLOOR is 0
LOGITS_AT_ONCE = 1 << 26
PAPER_GAMMAS = ((7, 4.0), (9, 5.0), (15, 7.0))


def paper_gamma(num_slots: int) -> float:
    """The gamma of arXiv 2602.06036: 4, 5, 7 for 7, 9, 15 slots, linear between them and flat beyond."""
    for (few, low), (many, high) in pairwise(PAPER_GAMMAS):
        if num_slots <= many:
            return low + (high - low) * max(0, num_slots - few) / (many - few)
    return PAPER_GAMMAS[-1][1]


@dataclass(frozen=True)
class SlotWeights:
    """Weight of slot k. uniform: 1. exponential: exp(-(k-1) / gamma), gamma null: see paper_gamma. geometric:
    beta^(k-1). dpace: how much the expected accepted length depends on the slot (arXiv 2605.18810), from the drafter's
    own probabilities, detached; dpace_reach: only how likely the slot is reached; dpace_future: only what is gained
    after it.
    """

    kind: Literal["uniform", "exponential", "geometric", "dpace", "dpace_reach", "dpace_future"] = "uniform"
    gamma: float | None = 4.0
    beta: float = 0.8
    alpha: float = 0.5

    def __post_init__(self) -> None:
        allowed = ("uniform", "exponential", "geometric", *DPACE)
        if self.kind not in allowed:
            raise ValueError(f"slot weights kind must be one of {', '.join(allowed)}, got {self.kind!r}")
        if self.gamma is not None and not self.gamma > 0 or not self.beta >= 0 or not 0 <= self.alpha <= 1:
            raise ValueError(
                "slot weights need gamma above 0, beta of at least 0 and alpha in [0, 1], got gamma "
                f"{self.gamma}, beta {self.beta}, alpha {self.alpha}"
            )

    def static(self, num_slots: int, device: torch.device) -> Tensor:
        """[K] weights known before the forward; their sum over supervised slots is the denominator."""
        steps = torch.arange(num_slots, device=device, dtype=torch.float32)
        if self.kind == "exponential":
            return torch.exp(-steps / (paper_gamma(num_slots) if self.gamma is None else self.gamma))
        return self.beta**steps if self.kind == "geometric" else torch.ones_like(steps)

    def of(self, confidence: Tensor, supervised: Tensor) -> Tensor:
        """Weights [A, K] of slots whose token the drafter gives probability `confidence` [A, K] (detached)."""
        static = self.static(supervised.shape[1], supervised.device)
        if self.kind in DPACE:
            return dpace(confidence, supervised, self.alpha, DPACE[self.kind])
        return static * supervised


Pace = Literal["whole", "reach", "future"]
DPACE: dict[str, Pace] = {"dpace": "whole", "dpace_reach": "reach", "dpace_future": "future"}


def dpace(confidence: Tensor, supervised: Tensor, alpha: float = 0.5, part: Pace = "whole") -> Tensor:
    """w_k = sum_{j >= k} P_j, P_j = prod_{i <= j} s_i, s = (1 - alpha) confidence + alpha (arXiv 2605.18810). [A, K].

    w_k is the product of P_k ("reach") and sum_{j >= k} P_j / P_k ("future"), the paper's two ablations.
    """
    smoothed = torch.where(supervised, (1 - alpha) * confidence + alpha, torch.ones_like(confidence))
    reach = smoothed.cumprod(-1) * supervised
    whole = reach.flip(-1).cumsum(-1).flip(-1)
    values = {"whole": whole, "reach": reach, "future": whole / reach.clamp_min(1e-12)}[part]
    return values * supervised


@dataclass(frozen=True)
class Objective:
    """A mixture of measures with slot weights.

    terms: measure name -> coefficient; `own_NAME` is the drafter's measure NAME. weights: keyword arguments of
    SlotWeights. unweighted: terms whose slots all weigh the same: the mean of the static weights, so that their
    coefficient stands in proportion to the others'. chunk: slots per chunk, memory only (0: as many as 2^26
    logits hold).
    """

    terms: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    weights: dict[str, Any] = field(default_factory=dict)
    unweighted: list[str] | None = None
    chunk: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(name for name in self.terms or {} if name not in MEASURES and not name.startswith(OWN))
        if unknown or not self.terms:
            raise ValueError(f"objective terms must be of {', '.join(MEASURES)}; got {', '.join(unknown) or 'none'}")
        if loose := {n: f for n, f in self.terms.items() if not isinstance(f, int | float) or not math.isfinite(f)}:
            raise ValueError(f"objective coefficients must be finite numbers, got {loose}")
        if stray := sorted(set(self.unweighted or ()) - set(self.terms)):
            raise ValueError(f"objective unweighted names {', '.join(stray)}, not among its terms")
        if self.chunk < 0:
            raise ValueError(f"objective chunk must be at least 0, got {self.chunk}")
        try:
            SlotWeights(**self.weights)
        except TypeError as error:
            raise ValueError(f"objective weights: {error}") from error

    def check_teacher(self, topk: int) -> None:
        """ValueError when a term needs more of the target than its topk most likely tokens (0: all is there)."""
        if topk and (unable := sorted(set(self.terms) & set(WHOLE_TEACHER))):
            able = ", ".join(name for name in MEASURES if name not in WHOLE_TEACHER)
            raise ValueError(
                f"objective term(s) {', '.join(unable)} need the target's last hidden state, the features hold its "
                f"{topk} most likely tokens: use {able}, or capture with features.topk=0"
            )

    @property
    def slot_weights(self) -> SlotWeights:
        return SlotWeights(**self.weights)

    def confidence(self, scored: Scored) -> Tensor:
        """[A, K], detached: what the drafter gives the token that is trained: the data's where a term reads it (as in
        D-PACE, where it is the cross-entropy's), else the slot's label."""
        token = scored.data if any(name.endswith("data_ce") for name in self.terms) else scored.label
        return scored.in_grid(scored.logq.detach().gather(-1, token[:, None])[:, 0].exp())

    def measures(self, drafter: Drafter) -> dict[str, Callable[[Scored], Tensor]]:
        """The functions behind the terms. ValueError names a measure that this drafter does not have, or that does not
        fit its labels."""
        known = MEASURES | {OWN + name: measure for name, measure in drafter.measures().items()}
        if unknown := sorted(set(self.terms) - set(known)):
            raise ValueError(
                f"{type(drafter).__name__} has no measure {', '.join(unknown)}; objective terms: {', '.join(known)}"
            )
        fitting = drafter.fitting_measures
        if fitting is not None and (stray := sorted(set(self.terms) - set(fitting))):
            raise ValueError(
                f"{type(drafter).__name__} has labels of its own, which {', '.join(stray)} would not read; objective "
                f"terms: {', '.join(fitting)}"
            )
        return {name: known[name] for name in self.terms}

    def mix(
        self, losses: list[Tensor], weights: Tensor, num_slots: int, factors: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of all terms, and each term's own weighted sum. losses: [n] of each term; weights [n]; factors
        [n] of all terms' weights."""
        even = self.slot_weights.static(num_slots, weights.device).mean()
        scales = [factors * (even if name in (self.unweighted or ()) else weights) for name in self.terms]
        parts = [(values * scale).sum() for values, scale in zip(losses, scales, strict=True)]
        # Coefficients stay numbers: a tensor of them would be a copy that the device is waited for.
        mixed = torch.stack([part * factor for part, factor in zip(parts, self.terms.values(), strict=True)])
        return mixed.sum(), torch.stack(parts)


@dataclass
class Terms:
    """Sums over one batch. loss: numerator with gradient. denominator: sum of static slot weights. parts: each
    measure's own weighted sum. offered, kept [K]: anchors whose slots 1..k-1 all match the target's argmax and that
    have slot k; those where slot k matches too. supervised [K]: count of supervised slots. overlap [K]: sum of alpha
    over them, zero unless a measure reads it.
    """

    loss: Tensor
    denominator: Tensor
    parts: dict[str, Tensor]
    offered: Tensor
    kept: Tensor
    overlap: Tensor
    supervised: Tensor


@dataclass
class Labels:
    """Flat labels of a slot grid: [N = B * A anchors, K]; supervised counts slots whose labels the drafter can say;
    factors of their weights (None: 1)."""

    mask: Tensor
    supervised: Tensor
    prev_ids: Tensor
    label: Tensor
    data: Tensor
    where: Tensor
    factors: Tensor | None = None


def flat_labels(slots: SlotBatch, batch: Batch, inverse: Tensor, objective: Objective) -> Labels:
    """Flatten the grid. inverse [V]: draft id of a target id or -1. A slot whose target argmax (or data token, when a
    term reads it: its name ends in data_ce) lies outside the draft vocabulary is not supervised: its label cannot be
    said."""
    rows, top1 = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None, None], batch.outputs()[1]
    where = (rows * top1.shape[1] + slots.teacher).flatten(0, 1)
    label = inverse[top1.flatten()[where] if slots.labels is None else slots.labels.flatten(0, 1)]
    data = inverse[slots.target_ids.flatten(0, 1)]
    mask = slots.mask.flatten(0, 1)
    supervised = mask & (label >= 0)
    if any(name.endswith("data_ce") for name in objective.terms):
        supervised = supervised & (data >= 0)
    factors = None if batch.drafted is None else batch.drafted.weights.flatten(0, 1)[:, : mask.shape[1]]
    prev_ids = slots.prev_ids.flatten(0, 1)
    return Labels(mask, supervised, prev_ids, label.clamp_min(0), data.clamp_min(0), where, factors)


def slot_terms(drafter: Drafter, slots: SlotBatch, batch: Batch, target: TargetParts, objective: Objective) -> Terms:
    """The objective's sums over one batch's supervised slots; `loss` carries gradient to the drafter."""
    device, num_slots = slots.hidden.device, slots.hidden.shape[2]
    labels = flat_labels(slots, batch, drafter.vocabulary.inverse_on(device), objective)
    last, _, lse = batch.outputs()
    scorer = _Scorer(drafter, target, labels, objective, last, lse, batch)
    chunk = objective.chunk or LOGITS_AT_ONCE // len(drafter.vocabulary)
    groups = groups_of(labels, max(1, chunk // num_slots))
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    loss, sums = _ChunkedSum.apply(slots.hidden.flatten(0, 1), scorer, groups, *parameters)
    offered, kept, overlap, supervised = sums[len(objective.terms) :].view(4, num_slots)
    # Anchors none of whose labels can be said never reach a chunk; their first slot was offered all the same.
    unsaid = (labels.mask[:, 0] & ~labels.supervised.any(-1)).sum()
    offered = torch.cat([offered[:1] + unsaid, offered[1:]])
    factors = 1.0 if labels.factors is None else labels.factors
    denominator = (objective.slot_weights.static(num_slots, device) * labels.supervised * factors).sum()
    parts = dict(zip(objective.terms, sums, strict=False))
    return Terms(loss, denominator, parts, offered, kept, overlap, supervised)


@dataclass
class Group:
    """A chunk of anchors. anchors [G] in the flat grid; place [n]: their supervised slots in the group's grid [G, K],
    flat, and slots [n] in the whole grid, flat. positions [u]: flat positions whose last hidden states predict those
    slots, owner [n] which of the u each."""

    anchors: Tensor
    place: Tensor
    slots: Tensor
    positions: Tensor
    owner: Tensor


def groups_of(labels: Labels, size: int) -> list[Group]:
    """The anchors with a supervised slot, `size` at a time.

    Shapes depend on values here and nowhere else in the objective: a GPU is waited for before its first logits are
    made, and no longer between chunks.
    """
    steps, found = torch.arange(labels.mask.shape[1], device=labels.mask.device), []
    for anchors in labels.supervised.any(-1).nonzero()[:, 0].split(size):
        place = labels.supervised[anchors].flatten().nonzero()[:, 0]
        slots = (anchors[:, None] * len(steps) + steps).flatten()[place]
        positions, owner = labels.where.flatten()[slots].unique(return_inverse=True)
        found.append(Group(anchors, place, slots, positions, owner))
    return found


@dataclass
class _Scorer:
    """Scores the supervised slots of a group of anchors."""

    drafter: Drafter
    target: TargetParts
    labels: Labels
    objective: Objective
    last: Tensor
    lse: Tensor
    batch: Batch

    @cached_property
    def narrowed(self) -> TargetParts:
        """The target with its head cut to the draft vocabulary: a copy, made when a measure first asks."""
        target, vocabulary = self.target, self.drafter.vocabulary
        if vocabulary.is_full:
            return target
        ids = vocabulary.ids_on(target.head.device)
        bias = None if target.head_bias is None else target.head_bias[ids]
        return replace(target, head=target.head[ids], head_bias=bias)

    def teach(self, positions: Tensor) -> Tensor:
        """The target's logits on the draft vocabulary [u, W] at flat positions [u]: whole, or the kept most likely
        ones over a floor."""
        if self.batch.top_ids is None or self.batch.top_logp is None:
            # A large target's head may lie on another device than the drafter trains on.
            return self.narrowed.logits(self.last.flatten(0, 1)[positions]).to(self.last.device)
        ids, logp = (x.flatten(0, 1)[positions] for x in (self.batch.top_ids, self.batch.top_logp))
        vocabulary = self.drafter.vocabulary
        return top_logits(vocabulary.inverse_on(ids.device)[ids], logp, self.lse.flatten()[positions], len(vocabulary))

    def score(self, hidden: Tensor, group: Group) -> Scored:
        """hidden [G, K, D] of the group's anchors -> their supervised slots."""
        labels, slots = self.labels, group.slots
        states, prev = hidden.flatten(0, 1).index_select(0, group.place), labels.prev_ids.flatten()[slots]
        return Scored(
            logits=self.drafter.logits(states, prev),
            teach=lambda: self.teach(group.positions),
            lse=self.lse.flatten()[group.positions],
            owner=group.owner,
            label=labels.label.flatten()[slots],
            data=labels.data.flatten()[slots],
            prev=prev,
            hidden=states,
            last=self.last.flatten(0, 1)[labels.where.flatten()[slots]],
            shape=(hidden.shape[0], hidden.shape[1]),
            place=group.place,
            progress=self.batch.progress,
        )

    def sums(self, hidden: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Weighted loss of one group, and [terms + 4 K] sums: each measure, offered, kept, overlap, supervised."""
        scored, supervised = self.score(hidden, group), self.labels.supervised[group.anchors]
        weights = self.objective.slot_weights.of(self.objective.confidence(scored), supervised).flatten()[group.place]
        factors = 1.0 if self.labels.factors is None else self.labels.factors.flatten()[group.slots]
        losses = []
        for measure in self.objective.measures(self.drafter).values():  # a comprehension would be one more frame
            losses.append(measure(scored))
        loss, parts = self.objective.mix(losses, weights, supervised.shape[1], factors)
        with torch.no_grad():
            reached = scored.in_grid((scored.logits.argmax(-1) == scored.label).long()).cumprod(-1)
            before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], 1)
            overlap = torch.zeros(supervised.shape, device=supervised.device)
            if "overlap" in scored.__dict__:  # free when a measure has made it, one pass over [n, W] when not
                overlap = scored.in_grid(scored.overlap)
            offered = (before * self.labels.mask[group.anchors]).sum(0)
            by_slot = torch.cat([offered, reached.sum(0), overlap.sum(0), supervised.sum(0)])
        return loss, torch.cat([parts.detach(), by_slot.to(parts.dtype)])


class _ChunkedSum(torch.autograd.Function):
    """Sum of scorer.sums(hidden of a group, group) over groups, whose gradient is made group by group in the forward
    pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scorer: _Scorer, groups: list[Group], *parameters: Tensor) -> Any:
        wanted = any(ctx.needs_input_grad)
        d_hidden = torch.zeros_like(hidden) if wanted else None
        d_parameters: list[Tensor | None] = [None] * len(parameters)
        loss = hidden.new_zeros((), dtype=torch.float32)
        sums = hidden.new_zeros(len(scorer.objective.terms) + 4 * hidden.shape[1], dtype=torch.float32)
        for group in groups:
            with torch.set_grad_enabled(wanted):
                part = hidden[group.anchors].detach().requires_grad_(wanted)
                value, made = scorer.sums(part, group)
            loss, sums = loss + value.detach(), sums + made
            if d_hidden is not None:
                first, *others = torch.autograd.grad(value, (part, *parameters), allow_unused=True)
                d_hidden[group.anchors] = first
                d_parameters = [_add(kept, new) for kept, new in zip(d_parameters, others, strict=True)]
        ctx.gradients = (d_hidden, d_parameters)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> Any:
        d_hidden, d_parameters = ctx.gradients
        return (d_hidden * d_loss, None, None, *(None if g is None else g * d_loss for g in d_parameters))


def _add(kept: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Running sum of gradients, in place after the first."""
    if new is None or kept is None:
        return kept if new is None else new
    return kept.add_(new)


def top_logits(ids: Tensor, logp: Tensor, lse: Tensor, width: int) -> Tensor:
    """Logits [u, W] of the k kept tokens, FLOOR elsewhere. ids [u, k] draft ids, -1 outside the draft vocabulary; logp
    [u, k] their log probabilities; lse [u].

    p is exact on kept tokens and 0 on others: p_hat renormalises over the kept, alpha is at most the others' mass too
    small.
    """
    whole = logp.new_full((len(ids), width + 1), FLOOR)
    whole.scatter_(1, torch.where(ids < 0, width, ids), logp + lse[:, None])
    return whole[:, :width]


def plain_terms(drafter: Drafter, slots: SlotBatch, batch: Batch, target: TargetParts, objective: Objective) -> Tensor:
    """The slow form of `slot_terms`: all logits of all slots over the whole vocabulary, plain autograd. Returns the
    loss."""
    labels = flat_labels(slots, batch, drafter.vocabulary.inverse.to(slots.hidden.device), objective)
    hidden = slots.hidden.flatten(0, 1)
    last = batch.outputs()[0].flatten(0, 1)[labels.where].flatten(0, 1)
    everything = target.logits(last).float()
    logits = drafter.logits(hidden.flatten(0, 1), labels.prev_ids.flatten())
    teacher = everything[:, drafter.vocabulary.ids.to(last.device)]
    kept = labels.supervised.flatten()
    shape = (labels.supervised.shape[0], labels.supervised.shape[1])
    scored = Scored(
        logits=logits[kept],
        teach=lambda: teacher[kept],
        lse=everything.logsumexp(-1)[kept],
        owner=torch.arange(int(kept.sum()), device=last.device),
        label=labels.label.flatten()[kept],
        data=labels.data.flatten()[kept],
        prev=labels.prev_ids.flatten()[kept],
        hidden=hidden.flatten(0, 1)[kept],
        last=last[kept],
        shape=shape,
        place=kept.nonzero()[:, 0],
        progress=batch.progress,
    )
    weights = objective.slot_weights.of(objective.confidence(scored), labels.supervised)[labels.supervised]
    factors = 1.0 if labels.factors is None else labels.factors[labels.supervised]
    losses = [measure(scored) for measure in objective.measures(drafter).values()]
    return objective.mix(losses, weights, hidden.shape[1], factors)[0]
