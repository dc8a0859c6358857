"""How a head may be read otherwise than it declares, and what it accepts then: found by drafting, not by its config.

A head whose files are consistent but wrong (trained on layer 0, declared as 1) looks sound to every check of files. So
each convention is changed in turn and the head reads the same recorded answers again: the reading under which the
target's own tokens surprise it clearly least is the one that it was trained for. Surprise is measured at every slot of
every anchor, which tells a layer from its neighbour where acceptance on a few prompts does not. Changes are taken
greedily, the best first; what is accepted under the declared and the best reading is then counted by drafting.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from data.collate import Collate
from data.features import Sample
from data.target import LOGITS_AT_ONCE
from drafters.contract import Batch, Drafter, TargetParts, default_layers
from drafters.layers import rope_parameters
from eval.patient import rebuilt, setting
from eval.replay import Trajectory, rounds_of

LEAST, SURE = 0.05, 0.95
RESAMPLES, STEPS, REACH = 200, 8, 2
ROPE_BASES = (10000.0, 500000.0, 1000000.0)
KEYS = {"rope": ("rope_parameters",), "slot_convention": ("slot_convention",), "mask_token": ("mask_token", "token")}
SHIFTS = (-1, 0, 1)


@dataclass(frozen=True)
class Reading:
    """layers: outputs (0 = the first decoder layer's) in the order of the head's inputs. last_state: "declared", or
    "swapped": before the final norm where the head reads the last hidden state, after it where it reads the last
    layer's output. rope, slot_convention, mask_token: None for a head without."""

    layers: tuple[int, ...]
    last_state: str = "declared"
    rope: dict[str, Any] | None = None
    slot_convention: str | None = None
    mask_token: int | None = None

    def words(self, name: str) -> str:
        """One convention in words."""
        value = getattr(self, name)
        return str(list(value) if name == "layers" else value)


@dataclass(frozen=True)
class Fit:
    """How badly a reading fits, by answer: cost summed over `counts` tokens. The cost of a token is its surprise
    -log q in nats; for drafters that are verified by noise, whose q is not what decides, the rounds that it took."""

    costs: list[float]
    counts: list[int]

    @property
    def mean(self) -> float:
        return sum(self.costs) / max(1, sum(self.counts))

    def beats(self, other: "Fit") -> bool:
        """Clearly lower: by LEAST a token, and in SURE of the paired resamples of answers."""
        if self.mean > other.mean - LEAST:
            return False
        dice, count = random.Random(0), len(self.costs)
        wins = 0
        for _ in range(RESAMPLES):
            drawn = [dice.randrange(count) for _ in range(count)]
            wins += self._mean_of(drawn) < other._mean_of(drawn)
        return wins >= SURE * RESAMPLES

    def _mean_of(self, drawn: Sequence[int]) -> float:
        return sum(self.costs[i] for i in drawn) / max(1, sum(self.counts[i] for i in drawn))


@dataclass(frozen=True)
class Tally:
    """emitted, rounds: of each answer. shifted: share of first drafts that are the token `shift` places beside the one
    they stand for, by shift."""

    emitted: list[int]
    rounds: list[int]
    shifted: dict[int, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        return sum(self.emitted) / max(1, sum(self.rounds))


@dataclass(frozen=True)
class Trial:
    """A reading that differs from the best one so far in one convention, and how badly it fits (see Fit)."""

    name: str
    value: str
    cost: float


@dataclass(frozen=True)
class Found:
    """declared, best: readings, how they fit, and what was accepted under them. taken: the changes from one to the
    other. trials: all that was tried in the first step."""

    declared: Reading
    best: Reading
    declared_fit: Fit
    best_fit: Fit
    declared_tally: Tally
    best_tally: Tally
    taken: list[Trial]
    trials: list[Trial]

    def of(self, name: str) -> list[Trial]:
        """The trials of one convention, best first."""
        return sorted((one for one in self.trials if one.name == name), key=lambda one: one.cost)


class Bedside:
    """A head, its target's recorded answers with the outputs of all `stored` layers, and readings of it.

    mask_tokens: ids that may be the mask token, the target's unused token first.
    """

    def __init__(
        self,
        drafter: Drafter,
        parts: TargetParts,
        trajectories: Sequence[Trajectory],
        num_slots: int,
        mask_tokens: Sequence[int] = (),
    ) -> None:
        self.drafter, self.parts, self.trajectories, self.num_slots = drafter, parts, list(trajectories), num_slots
        self.mask_tokens = list(mask_tokens)
        self.depth = int(parts.config.num_hidden_layers)

    @cached_property
    def declared(self) -> Reading:
        """The head's own reading."""
        layer, settings = getattr(self.drafter, "layer_config", None), self.drafter.settings()
        convention = self.drafter.slot_convention if setting(settings, KEYS["slot_convention"]) else None
        rope = dict(layer.rope_parameters) if layer is not None and setting(settings, KEYS["rope"]) else None
        return Reading(tuple(self.drafter.needs.layers), "declared", rope, convention, self.drafter.mask_token)

    @torch.no_grad()
    def tally(self, reading: Reading, batch_size: int = 32) -> Tally:
        """Draft greedily through all answers as `reading` says. ValueError when the class refuses it."""
        drafter = self._built(reading)
        emitted, rounds = [0] * len(self.trajectories), [0] * len(self.trajectories)
        hits = dict.fromkeys(SHIFTS, 0)
        order = sorted(range(len(self.trajectories)), key=lambda i: len(self.trajectories[i].tokens))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            shown = [self._shown(self.trajectories[i], reading) for i in chosen]
            for one in rounds_of(drafter, shown, chosen, self.num_slots):
                emitted[one.answer] += min(one.accepted + 1, one.room)
                rounds[one.answer] += 1
                tokens = self.trajectories[one.answer].tokens
                for shift in SHIFTS:
                    place = one.anchor + 1 + shift
                    hits[shift] += place < len(tokens) and one.drafted[0] == int(tokens[place])
        total = max(1, sum(rounds))
        return Tally(emitted, rounds, {shift: count / total for shift, count in hits.items()})

    @torch.no_grad()
    def fit(self, reading: Reading, rows: int = 4) -> Fit:
        """How badly the target's own answers fit under a reading. rows: answers in one forward. ValueError when the
        class refuses it."""
        if self.drafter.coupling != "rejection":
            tally = self.tally(reading)
            return Fit([float(count) for count in tally.rounds], tally.emitted)
        drafter, costs, counts = self._built(reading), [], []
        for start in range(0, len(self.trajectories), rows):
            shown = [self._shown(one, reading) for one in self.trajectories[start : start + rows]]
            cost, owner = surprise(drafter, _batch(shown).to(*_place(drafter, shown[0].last)))
            costs += torch.zeros(len(shown)).index_add_(0, owner, cost).tolist()
            counts += torch.bincount(owner, minlength=len(shown)).tolist()
        return Fit(costs, counts)

    def _built(self, reading: Reading) -> Drafter:
        """The drafter of a reading; the layers and the last state are a matter of what it is shown."""
        changes: dict[str, Any] = {}
        for name, keys in KEYS.items():
            value = getattr(reading, name)
            if value != getattr(self.declared, name) and (key := setting(self.drafter.settings(), keys)):
                changes[key] = value
        if not changes:
            return self.drafter
        return rebuilt(self.drafter, self.parts, changes, self.drafter.vocabulary)

    def _shown(self, one: Trajectory, reading: Reading) -> Trajectory:
        """A trajectory whose aux [T, L, D] are the reading's layers, and last its last state."""
        aux, last = one.aux[:, list(reading.layers)], one.last
        if reading.last_state == "swapped":
            top = self.depth - 1
            for place, layer in enumerate(reading.layers):
                if layer == top:
                    aux[:, place] = one.last
            last = one.aux[:, top]
        return replace(one, aux=aux, last=last)

    def others(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
        """Every reading that differs from `reading` in one convention, and which one."""
        for layers in other_layers(reading.layers, self.depth):
            yield "layers", replace(reading, layers=layers)
        if self.drafter.needs.last_hidden or self.depth - 1 in reading.layers:
            other = "swapped" if reading.last_state == "declared" else "declared"
            yield "last_state", replace(reading, last_state=other)
        for rope in self._other_ropes(reading.rope):
            yield "rope", replace(reading, rope=rope)
        if reading.slot_convention is not None:
            other = "fill_in" if reading.slot_convention == "anchor_first" else "anchor_first"
            yield "slot_convention", replace(reading, slot_convention=other)
        if reading.mask_token is not None:
            for token in self.mask_tokens:
                if token != reading.mask_token:
                    yield "mask_token", replace(reading, mask_token=token)

    def _other_ropes(self, own: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The target's rope, and plain ropes of common bases."""
        if own is None:
            return []
        found = [rope_parameters(self.parts.config)]
        found += [{"rope_type": "default", "rope_theta": base} for base in ROPE_BASES]
        kept: list[dict[str, Any]] = []
        for rope in found:
            if not same_rope(rope, own) and not any(same_rope(rope, other) for other in kept):
                kept.append(rope)
        return kept

    def search(self) -> Found:
        """Change one convention after another for the better, until none helps clearly. A change that the class refuses
        is no reading of the head."""
        best, fit = self.declared, self.fit(self.declared)
        first, taken, trials = fit, [], []
        for step in range(STEPS):
            tried: list[tuple[str, Reading, Fit]] = []
            for name, other in self.others(best):
                try:
                    tried.append((name, other, self.fit(other)))
                except ValueError:
                    continue
            if step == 0:
                trials = [Trial(name, other.words(name), one.mean) for name, other, one in tried]
            tried.sort(key=lambda one: one[2].mean)
            if not tried or not tried[0][2].beats(fit):
                break
            name, best, fit = tried[0]
            taken.append(Trial(name, best.words(name), fit.mean))
        declared = self.tally(self.declared)
        reached = declared if best == self.declared else self.tally(best)
        return Found(self.declared, best, first, fit, declared, reached, taken, trials)


def surprise(drafter: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """-log q [n] of the data's token at every supervised slot that the draft vocabulary can say, and the row [n] that
    each slot is in, both on the CPU."""
    slots, inverse = drafter.slots(batch), drafter.vocabulary.inverse.to(batch.tokens.device)
    label = inverse[slots.target_ids]
    chosen = slots.mask & (label >= 0)
    hidden, prev, label, rows = slots.hidden[chosen], slots.prev_ids[chosen], label[chosen], chosen.nonzero()[:, 0]
    step, costs = max(1, LOGITS_AT_ONCE // len(drafter.vocabulary)), []
    for part in torch.arange(len(label), device=label.device).split(step):
        logits = drafter.logits(hidden[part], prev[part]).float()
        costs.append(nn.functional.cross_entropy(logits, label[part], reduction="none").cpu())
    return torch.cat(costs), rows.cpu()


def _batch(shown: Sequence[Trajectory]) -> Batch:
    """Rows of one answered prompt each; every answer token may be an anchor."""
    samples = []
    for one in shown:
        count = len(one.tokens)
        turns = (torch.arange(count) >= one.prompt).long()
        empty = torch.zeros(count)
        samples.append([Sample("", one.tokens.cpu(), turns, one.aux.cpu(), one.last.cpu(), empty.long(), empty)])
    return Collate(max(len(one.tokens) for one in shown), 1, shown[0].last.dtype)(samples)


def _place(drafter: Drafter, otherwise: Tensor) -> tuple[torch.device, torch.dtype]:
    like = next(drafter.parameters(), otherwise)
    return like.device, like.dtype


def same_rope(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ropes turn alike: keys without a value do not count, and neither does a spelled-out default."""

    def plain(rope: dict[str, Any]) -> dict[str, Any]:
        return {"rope_type": "default"} | {key: value for key, value in rope.items() if value is not None}

    return plain(one) == plain(other)


def other_layers(layers: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    """Layers that a head of these may have been trained on: all one lower or higher (the two conventions of layer
    ids), the engines' defaults, the opposite order, and each one by itself up to REACH away."""
    if not layers:
        return []
    found = [tuple(layer + shift for layer in layers) for shift in (-1, 1)]
    with suppress(ValueError):  # too shallow for defaults, or no default for so many
        found.append(default_layers(depth, len(layers)))
    if len(layers) > 1:
        found.append(layers[::-1])
    for place, layer in enumerate(layers):
        for shift in range(-REACH, REACH + 1):
            found.append((*layers[:place], layer + shift, *layers[place + 1 :]))
    kept: list[tuple[int, ...]] = []
    for one in found:
        inside = all(0 <= layer < depth for layer in one) and len(set(one)) == len(one)
        if inside and one != layers and one not in kept:
            kept.append(one)
    return kept
