"""How many slots to draft and how many to verify: schedulers for a loop that serves many requests.

A scheduler speaks twice in a round. Before drafting `depth` says how many slots K to draft (0: a plain step); after
drafting `decide` says how many of them each request has verified. After verification `learn` hears what came of it.

Non-anticipation. Whether a drafted token is verified may depend on what was known before that token alone; else the
output is no longer the target's (arXiv 2607.05147, appendix A: p = (.7, .3) comes out as (.85, .15)). Here every length
is either chosen before drafting, or by a confidence threshold or a search that stops at the first fall, or is a budget
made of confidences two steps old. A confidence of slot k may read the drafted tokens before slot k, never its own.

`decide` keeps fixed shapes and never waits for the device: sorting, cumulative sums and gathers alone. `depth` and
`learn` work on numbers the host has, one or two rounds late where the loop is pipelined.

Letters in shapes: R requests, K slots drafted, B tokens verified in all.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from eval.hardware import Cost, expected_tau
from eval.streams import sent

T = TypeVar("T")
POINTS = 64  # of a cost model that a table of round times is drawn through
POOL = 32  # rows of old confidences that the search for a depth looks at
ENDED = -1.0  # stands for the confidences of a request that has ended: it claims nothing and counts nowhere


@dataclass(frozen=True)
class Load:
    """What the host knows before a round. rows: running requests (R). context: mean positions in their caches."""

    rows: int
    context: float


@dataclass(frozen=True)
class Outcome:
    """What a round did. depth: slots drafted. lengths, accepted: of each request, verified and kept. seconds: of the
    whole round."""

    depth: int
    lengths: Sequence[int]
    accepted: Sequence[int]
    seconds: float


class Scheduler(Protocol):
    """Decides one round at a time."""

    @property
    def reads_confidences(self) -> bool:
        """Whether `decide` looks at what it is given; where not, every slot that was drafted is verified."""

    def depth(self, load: Load) -> int:
        """Slots to draft for every request, 0..num_slots."""

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        """Slots to verify. confidences [R, K] in [0, 1], conditional acceptance of each drafted slot, or ENDED for a
        request that has ended -> [R] int64 in 0..K."""

    def learn(self, outcome: Outcome, load: Load) -> None:
        """Hear what came of a round."""


def survival(confidences: Tensor) -> Tensor:
    """Chance that the whole prefix up to each slot is accepted, [R, K]: never rises along a row.

    ValueError unless confidences are [R, K]; values outside [0, 1] are cut, which keeps it so.
    """
    if confidences.ndim != 2:
        raise ValueError(f"confidences must be [requests, slots], got {tuple(confidences.shape)}")
    return confidences.clamp(0, 1).cumprod(1)


def ranked(chances: Tensor) -> tuple[Tensor, Tensor]:
    """All (request, slot) by falling survival, ties by slot. chances [R, K] -> values and requests, both [R * K].

    A request's slots keep their order: its survival never rises, and the sort is stable over slot-major order.
    """
    rows = chances.shape[0]
    values, order = chances.T.flatten().sort(descending=True, stable=True)
    return values, order % max(rows, 1)


def lengths_of(requests: Tensor, admitted: Tensor, rows: int) -> Tensor:
    """How many slots of each request are among the admitted. requests [N] int64, admitted [N] bool -> [rows] int64."""
    return torch.zeros(rows, dtype=torch.int64, device=requests.device).scatter_add_(0, requests, admitted.long())


def expected_tokens(values: Tensor, rows: int | Tensor) -> Tensor:
    """Tokens to expect of verifying the first i ranked slots, i = 0..N. values [..., N] survivals, rows: requests that
    run -> [..., N + 1]."""
    return rows + torch.cat([torch.zeros_like(values[..., :1]), values.cumsum(-1)], -1)


def throughputs(values: Tensor, rows: int | Tensor, seconds: Tensor) -> Tensor:
    """Expected tokens per second of verifying the first i ranked slots, i = 0..N. values [..., N]; seconds [N + 1] of a
    round that verifies rows + i tokens. Returns [..., N + 1]."""
    return expected_tokens(values, rows) / seconds.to(values)


def early_stop(rates: Tensor) -> Tensor:
    """Which ranked slots the search admits that stops where the rate first fails to rise. rates [..., N + 1] ->
    [..., N] bool."""
    return (rates[..., 1:] > rates[..., :-1]).long().cumprod(-1).bool()


def full_search(rates: Tensor) -> Tensor:
    """How many ranked slots have the best rate of all. rates [..., N + 1] -> [...] int64. Only for confidences that do
    not read this round's tokens: see `early_stop`."""
    return rates.argmax(-1)


@dataclass
class Acceptance:
    """Running estimate of alpha_k from verified rounds: exponential averages, one a slot.

    prior: before anything was seen, worth `weight` trials. decay: of old trials, per round.
    """

    num_slots: int
    prior: float = 0.7
    weight: float = 8.0
    decay: float = 0.995
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hits = [self.prior * self.weight] * self.num_slots
        self.trials = [self.weight] * self.num_slots

    def learn(self, outcome: Outcome) -> None:
        for k in range(min(outcome.depth, self.num_slots)):
            self.hits[k] *= self.decay
            self.trials[k] *= self.decay
        for length, accepted in zip(outcome.lengths, outcome.accepted, strict=True):
            for k in range(min(length, accepted + 1, self.num_slots)):
                self.trials[k] += 1
                self.hits[k] += accepted > k

    @property
    def alpha(self) -> list[float]:
        """alpha_1 .. alpha_K; a slot never proposed takes over what the slot before it says, where that is lower."""
        found: list[float] = []
        for hit, trial in zip(self.hits, self.trials, strict=True):
            own = hit / trial
            seen = trial > self.weight
            found.append(own if seen or not found else min(own, found[-1]))
        return found


def full_lengths(confidences: Tensor) -> Tensor:
    """Everything that was drafted, [R]."""
    rows, slots = confidences.shape
    return torch.full((rows,), slots, dtype=torch.int64, device=confidences.device)


@dataclass
class Static:
    """The same K in every round; 0 never drafts."""

    reads_confidences: ClassVar[bool] = False
    num_slots: int

    def depth(self, load: Load) -> int:
        return self.num_slots

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        return full_lengths(confidences)

    def learn(self, outcome: Outcome, load: Load) -> None:
        """Nothing to learn."""


@dataclass
class Threshold:
    """Verify while the chance that the whole prefix survives is at least `least`: early stop by confidence."""

    reads_confidences: ClassVar[bool] = True
    num_slots: int
    least: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise ValueError(f"a confidence threshold must lie in [0, 1], got {self.least}")

    def depth(self, load: Load) -> int:
        return self.num_slots

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        return (survival(confidences) >= self.least).long().sum(1)

    def learn(self, outcome: Outcome, load: Load) -> None:
        """Nothing to learn."""


class Rates:
    """Seconds of rounds from a cost model, kept as tensors: one for each (rows, depth, context step)."""

    def __init__(self, cost: Cost, context_step: int = 256) -> None:
        self.cost, self.step = cost, context_step
        self._kept: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def seconds(self, rows: int, depth: int, context: float, device: torch.device) -> Tensor:
        """[R * K + 1] seconds of a round that drafted `depth` slots and verifies R + i tokens in all."""
        place = round(context / self.step)
        key = (rows, depth, place, device)
        if key not in self._kept:
            at = max(place * self.step, 1)
            fixed = self.cost.draft_seconds(rows, depth, at) + self.cost.rest_seconds(rows, depth)
            most = rows * depth
            points = sorted({round(most * i / POINTS) for i in range(POINTS + 1)})
            times = [fixed + self.cost.target_seconds(rows, rows + i, at) for i in points]
            found = torch.from_numpy(numpy.interp(range(most + 1), points, times))
            # A larger pass never takes less time: noise must not invite the search to verify more.
            self._kept[key] = sent(found.cummax(0).values, device)
        return self._kept[key]


class Probe:
    """Whether a plain round should draft one slot all the same: every `every` rounds, so that better days are noticed.

    ValueError when every is below 1.
    """

    def __init__(self, every: int = 128) -> None:
        if every < 1:
            raise ValueError(f"probing needs at least 1 round, got {every}")
        self.every, self._off = every, 0

    def depth(self, best: int, allowed: bool = True) -> int:
        """The best depth, or 1 where that is 0 and a probe is due; one that is not allowed now waits until it is."""
        self._off = 0 if best else self._off + 1
        if best or self._off < self.every or not allowed:
            return best
        self._off = 0
        return 1


class Pays:
    """Which depths beat plain decoding in tokens per second, for the acceptance seen so far. cuts: whether drafts are
    cut before they are verified; then the best cut of each depth counts, else all its slots."""

    def __init__(self, cost: Cost, num_slots: int, cuts: bool = False) -> None:
        self.cost, self.num_slots, self.cuts = cost, num_slots, cuts
        self.acceptance = Acceptance(num_slots)
        self._renewed = Renewed(self._paying)

    def _paying(self, load: Load) -> list[bool]:
        """Of each depth 0..num_slots, whether it pays."""
        alpha, plain = self.acceptance.alpha, self._rate(load, [], 0, 0)
        found = [False]
        for depth in range(1, self.num_slots + 1):
            lengths = range(1, depth + 1) if self.cuts else (depth,)
            found.append(max(self._rate(load, alpha, depth, length) for length in lengths) > plain)
        return found

    def _rate(self, load: Load, alpha: Sequence[float], depth: int, length: int) -> float:
        """Tokens per second of one request in rounds that draft `depth` slots and verify `length` of them."""
        seconds = self.cost.target_seconds(load.rows, load.rows * (length + 1), load.context)
        seconds += self.cost.draft_seconds(load.rows, depth, load.context) + self.cost.rest_seconds(load.rows, depth)
        return expected_tau(alpha, length) / seconds

    def at(self, load: Load, depth: int) -> bool:
        """Whether this depth pays, 0..num_slots; plain decoding itself does not."""
        return self._renewed.of(load)[depth]

    def learn(self, outcome: Outcome) -> None:
        self._renewed.rounds += 1
        self.acceptance.learn(outcome)


class Renewed(Generic[T]):
    """A search over loads whose results hold for 16 rounds."""

    def __init__(self, search: Callable[[Load], T], every: int = 16) -> None:
        self.search, self.every, self.rounds = search, every, 0
        self._kept: dict[tuple[int, int], tuple[int, T]] = {}

    def of(self, load: Load) -> T:
        key, now = (load.rows, round(load.context / 256)), self.rounds // self.every
        if key not in self._kept or self._kept[key][0] != now:
            self._kept[key] = now, self.search(Load(load.rows, max(256 * key[1], 1)))
        return self._kept[key][1]


class FallBack:
    """Any scheduler, save that rounds go without drafting where the cost model says that the depth it asks for does not
    pay. One in `probe` of those rounds drafts one slot, where the scheduler itself would draft."""

    def __init__(self, inner: Scheduler, cost: Cost, num_slots: int, probe: int = 128) -> None:
        self.inner, self.pays = inner, Pays(cost, num_slots, inner.reads_confidences)
        self.probe = Probe(probe)

    @property
    def reads_confidences(self) -> bool:
        return self.inner.reads_confidences

    def depth(self, load: Load) -> int:
        wanted = min(self.inner.depth(load), self.pays.num_slots)
        return self.probe.depth(wanted if self.pays.at(load, wanted) else 0, allowed=wanted > 0)

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        return self.inner.decide(confidences, load)

    def learn(self, outcome: Outcome, load: Load) -> None:
        self.pays.learn(outcome)
        self.inner.learn(outcome, load)


class Prefix:
    """The hardware-aware prefix scheduler (arXiv 2607.05147, Algorithm 1): verify the prefixes with the most expected
    tokens per second of the round.

    Slots of all requests are ranked by the chance that their prefix survives; they are admitted one by one while
    (R + sum of chances) / seconds(R + i) rises, and the search stops where it first fails to (losslessness needs that).

    late: the form for pipelined loops. The budget is found by a full search over confidences two rounds old and filled
    with the current round's best; without such confidences acceptance seen so far stands in.

    How deep to draft is searched before drafting, over confidences two rounds old as well (deeper slots than were
    drafted then: acceptance seen so far); 0 where no depth beats plain decoding. adaptive=False always drafts
    num_slots.
    """

    reads_confidences = True

    def __init__(self, cost: Cost, num_slots: int, late: bool = False, adaptive: bool = True, probe: int = 128) -> None:
        self.num_slots, self.late, self.adaptive = num_slots, late, adaptive
        self.rates, self.acceptance, self.probe = Rates(cost), Acceptance(num_slots), Probe(probe)
        self._old: deque[Tensor] = deque(maxlen=2)
        self._pool = torch.empty(0, num_slots, dtype=torch.float64)
        self._renewed = Renewed(self._best_depth)

    def depth(self, load: Load) -> int:
        return self.probe.depth(self._renewed.of(load)) if self.adaptive else self.num_slots

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        rows, slots = confidences.shape
        runs = confidences[:, :1] != ENDED
        chances = survival(confidences.double())
        values, requests = ranked(chances)
        # The machine reads the rows of those that have ended too; tokens come of the others alone.
        seconds = self.rates.seconds(rows, slots, load.context, confidences.device)
        if self.late:
            expected = torch.where(runs, sent(self._expected(rows, slots), runs.device), 0.0)
            budget = full_search(throughputs(ranked(expected)[0], runs.sum(), seconds))
            admitted = torch.arange(len(values), device=values.device) < budget
        else:
            admitted = early_stop(throughputs(values, runs.sum(), seconds))
        self._remember(torch.where(runs, chances, ENDED))
        return lengths_of(requests, admitted, rows)

    def _remember(self, chances: Tensor) -> None:
        """Keep this round's survivals [R, K], ENDED where a request has ended; those of two rounds ago join the pool,
        deeper slots as acceptance so far has it. Slot 1 of the pool's rows keeps the mark."""
        if len(self._old) == 2:
            old = self._old[0]
            deeper = sent(torch.tensor(self.acceptance.alpha[old.shape[1] :], dtype=old.dtype), old.device).cumprod(0)
            known = torch.cat([old, old[:, -1:] * deeper], 1)
            self._pool = torch.cat([sent(self._pool, old.device), known])[-max(POOL, len(old)) :]
        self._old.append(chances)

    def _expected(self, rows: int, slots: int) -> Tensor:
        """Survivals [rows, slots] to expect, from what is known for two rounds."""
        if len(self._old) == 2 and self._old[0].shape == (rows, slots):
            return self._old[0].clamp_min(0)
        if not len(self._pool):
            return self._seen(rows, slots)
        # Rows of running requests first, in a fixed shape: a mask as an index would wait for the device.
        runs = self._pool[:, 0] != ENDED
        order = runs.long().argsort(stable=True, descending=True)
        places = torch.arange(rows, device=runs.device) % runs.sum().clamp_min(1)
        return self._pool[order[places], :slots].clamp_min(0)

    def _seen(self, rows: int, slots: int) -> Tensor:
        """Survivals [rows, slots] by acceptance seen so far."""
        return torch.tensor(self.acceptance.alpha[:slots], dtype=torch.float64).cumprod(0).expand(rows, -1)

    def _best_depth(self, load: Load) -> int:
        """Depth 0..num_slots with the best rate after the search over lengths; the smaller of equals."""
        rows = load.rows
        known = self._pool[self._pool[:, 0] != ENDED]  # between rounds, where the search waits in any case
        known = known if len(known) else self._seen(1, self.num_slots)
        rounds = max(1, len(known) // rows)
        known = known[torch.arange(rounds * rows, device=known.device) % len(known)].view(rounds, rows, -1)
        found = [rows / float(self.rates.seconds(rows, 0, load.context, known.device)[0])]
        for depth in range(1, self.num_slots + 1):
            seconds = self.rates.seconds(rows, depth, load.context, known.device)
            values = known[..., :depth].flatten(1).sort(descending=True).values
            rates = throughputs(values, rows, seconds)
            at = full_search(rates) if self.late else early_stop(rates).sum(-1)
            tokens = expected_tokens(values, rows).gather(1, at[:, None]).sum()
            found.append(float(tokens / seconds[at].sum()))
        return found.index(max(found))

    def learn(self, outcome: Outcome, load: Load) -> None:
        self._renewed.rounds += 1
        self.acceptance.learn(outcome)


@dataclass(frozen=True)
class LinearCost:
    """seconds = context * all cached positions + batched * tokens of the pass + fixed (SmartSpec, arXiv 2406.14066)."""

    context: float
    batched: float
    fixed: float

    @classmethod
    def fit(
        cls, cost: Cost, rows: Sequence[int], num_slots: int, contexts: Sequence[float] = (128, 512, 2048)
    ) -> "LinearCost":
        """Least squares over passes of the target with 1..num_slots + 1 tokens a row, relative errors weighed alike."""
        points = [(r, r * (k + 1), c) for r in rows for k in range(num_slots + 1) for c in contexts]
        times = torch.tensor([cost.target_seconds(*point) for point in points], dtype=torch.float64)
        design = torch.tensor([[r * c, n, 1.0] for r, n, c in points], dtype=torch.float64)
        found = torch.linalg.lstsq(design / times[:, None], torch.ones_like(times)[:, None]).solution.flatten().tolist()
        return cls(*(max(value, 0.0) for value in found))

    def seconds(self, rows: float, tokens: float, context: float) -> float:
        return self.context * rows * context + self.batched * tokens + self.fixed


class Goodput:
    """SmartSpec (arXiv 2406.14066): before each round, the K in 0..num_slots with the best goodput.

    Expected tokens (1 - a^(K+1)) / (1 - a) for one moving average `a` of acceptance; seconds from a linear fit plus the
    drafting of K slots.
    """

    reads_confidences = False

    def __init__(self, cost: Cost, num_slots: int, linear: LinearCost | None = None, decay: float = 0.98) -> None:
        self.cost, self.num_slots, self.decay = cost, num_slots, decay
        self.linear = linear or LinearCost.fit(cost, (1, 4, 16, 64), num_slots)
        self.alpha, self.probe = 0.7, Probe()

    def goodput(self, num_slots: int, load: Load) -> float:
        """Tokens per second of all requests."""
        alpha = min(self.alpha, 0.9999)
        tokens = load.rows * (1 - alpha ** (num_slots + 1)) / (1 - alpha)
        seconds = self.linear.seconds(load.rows, load.rows * (num_slots + 1), load.context)
        seconds += self.cost.draft_seconds(load.rows, num_slots, load.context)
        return tokens / (seconds + self.cost.rest_seconds(load.rows, num_slots))

    def depth(self, load: Load) -> int:
        return self.probe.depth(max(range(self.num_slots + 1), key=lambda k: self.goodput(k, load)))

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        return full_lengths(confidences)

    def learn(self, outcome: Outcome, load: Load) -> None:
        trials = sum(
            min(length, accepted + 1) for length, accepted in zip(outcome.lengths, outcome.accepted, strict=True)
        )
        if trials:
            own = sum(outcome.accepted) / trials
            self.alpha = self.decay * self.alpha + (1 - self.decay) * own


class Bandit:
    """Upper confidence bound over K = 0..num_slots, one bandit for each bin of batch sizes (1, 2-3, 4-7, 8-15, ...).

    Needs no cost model: the reward of a round is its tokens per second, divided by the largest seen in the bin.
    switch: what a change of K must promise beyond the bound, in the same units (the drafter's cache must catch up after
    plain rounds). explore: width of the bound.
    """

    reads_confidences = False

    def __init__(self, num_slots: int, explore: float = 0.2, switch: float = 0.02) -> None:
        self.num_slots, self.explore, self.switch = num_slots, explore, switch
        self._counts: dict[int, list[int]] = {}
        self._sums: dict[int, list[float]] = {}
        self._last: int | None = None

    def bin_of(self, load: Load) -> int:
        return max(load.rows, 1).bit_length() - 1

    def depth(self, load: Load) -> int:
        place, arms = self.bin_of(load), self.num_slots + 1
        counts = self._counts.setdefault(place, [0] * arms)
        sums = self._sums.setdefault(place, [0.0] * arms)
        fresh = [k for k in range(arms) if counts[k] == 0]
        if fresh:
            return fresh[-1]
        scale = max(total / count for total, count in zip(sums, counts, strict=True)) or 1.0
        bound = math.log(sum(counts))

        def worth(k: int) -> float:
            mean = sums[k] / counts[k] / scale
            return mean + self.explore * math.sqrt(bound / counts[k]) - self.switch * (k != self._last)

        return max(range(arms), key=worth)

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        return full_lengths(confidences)

    def learn(self, outcome: Outcome, load: Load) -> None:
        place = self.bin_of(load)
        arms = self.num_slots + 1
        tokens = sum(outcome.accepted) + len(outcome.accepted)
        self._counts.setdefault(place, [0] * arms)[outcome.depth] += 1
        self._sums.setdefault(place, [0.0] * arms)[outcome.depth] += tokens / outcome.seconds
        self._last = outcome.depth


NAMES = ("plain", "static", "threshold", "prefix", "prefix_late", "goodput", "bandit")


def build(
    name: str, cost: Cost, num_slots: int, fall_back: bool = False, least: float = 0.3, adaptive: bool = True
) -> Scheduler:
    """A scheduler by name. fall_back: plain rounds where drafting does not pay. least: of Threshold; adaptive: of
    Prefix. ValueError names the known ones.

    static takes its K after a dash: static-3.
    """
    word, _, count = name.partition("-")
    made: dict[str, Scheduler] = {}
    if word == "static":
        made["static"] = Static(min(int(count), num_slots) if count.isdigit() else num_slots)
    elif not count and word in NAMES:
        made = {word: _built(word, cost, num_slots, least, adaptive)}
    if word not in made:
        raise ValueError(f"no scheduler {name!r}; there are {', '.join(NAMES)} (static-K for a K of its own)")
    return FallBack(made[word], cost, num_slots) if fall_back else made[word]


def _built(word: str, cost: Cost, num_slots: int, least: float, adaptive: bool) -> Scheduler:
    if word == "plain":
        return Static(0)
    if word == "threshold":
        return Threshold(num_slots, least)
    if word == "goodput":
        return Goodput(cost, num_slots)
    if word == "bandit":
        return Bandit(num_slots)
    return Prefix(cost, num_slots, late=word == "prefix_late", adaptive=adaptive)
