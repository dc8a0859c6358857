"""Figures of a server at one concurrency, with confidence intervals: a bootstrap over prompts.

tokens_per_s        all tokens / wall seconds of the timed passes: what the server gives
user_tokens_per_s   tokens after an answer's first / seconds after it, all requests together: what one user reads
speedup             tokens_per_s with the drafter / without, at the same concurrency and for the same requests
tau                 tokens of rounds / rounds, as the requests tell; tau_counted: by the server's counters, an answer's
                    end uncut

Interval: 95%, percentiles of 1000 resamplings of prompts with all their answers, both servers by the same prompts. Wall
time is a property of a whole pass, so a resampling gives tokens / request seconds, times the requests that were in
flight on average. What is common to all requests of a pass (a busy machine) is not in the interval; `passes` shows it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.engine_client import Answered, Asked
from eval.latency import Latency, latency, percentiles
from eval.metrics import Acceptance, acceptance

RESAMPLINGS, LEVEL = 1000, 95.0
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """A figure and its confidence interval."""

    value: float
    low: float
    high: float

    def words(self, digits: int = 2) -> str:
        """As shown: value [low, high]."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Timed:
    """All passes of one server at one concurrency. names: the prompt of each request of a pass."""

    names: list[str]
    passes: list[Asked]

    @property
    def answers(self) -> list[Answered]:
        return [answer for one in self.passes for answer in one.answers]

    @property
    def pairs(self) -> list[tuple[str, Answered]]:
        """Every answer with its prompt's name."""
        return list(zip(self.names * len(self.passes), self.answers, strict=True))

    @property
    def wall(self) -> float:
        return sum(one.seconds for one in self.passes)

    @property
    def rounds_known(self) -> bool:
        return all(answer.rounds is not None for answer in self.answers)

    def sums(self) -> dict[str, Floats]:
        """By prompt, in order of first appearance: tokens, request seconds, tokens and seconds after the first token,
        and, where known, tokens emitted in rounds, rounds, and all rounds told, those behind an end among them."""
        order = list(dict.fromkeys(self.names))
        keys = ("tokens", "seconds", "later", "reading", "emitted", "rounds", "told")
        found = {key: np.zeros(len(order)) for key in keys}
        for name, answer in self.pairs:
            place = order.index(name)
            found["tokens"][place] += len(answer.tokens)
            found["seconds"][place] += answer.seconds
            found["later"][place] += len(answer.tokens) - answer.counts[0]
            found["reading"][place] += answer.arrivals[-1] - answer.arrivals[0]
            drafted = answer.drafted()
            if drafted is not None:
                found["emitted"][place] += sum(drafted.emitted)
                found["rounds"][place] += len(drafted.emitted)
                found["told"][place] += len(answer.rounds or [])
        return found


@dataclass(frozen=True)
class Side:
    """Figures of one server at one concurrency; definitions above. in_flight: requests on average. latency: see
    eval.latency; request_ms: of whole requests. passes: tokens/s of each. tau is None without a drafter, or where
    requests do not tell. rounds: that our requests told; rounds_counted: by the server, more where it served others."""

    tokens_per_s: Span
    user_tokens_per_s: Span
    latency: Latency
    request_ms: dict[str, float]
    requests: int
    tokens: int
    seconds: float
    in_flight: float
    passes: list[float]
    tau: Span | None = None
    tau_counted: float | None = None
    alpha: list[float] | None = None
    rounds: int | None = None
    rounds_counted: int | None = None


@dataclass(frozen=True)
class Level:
    """Both servers at one concurrency. same_answers: requests whose answers are token for token the baseline's."""

    concurrency: int
    drafter: Side
    baseline: Side | None = None
    speedup: Span | None = None
    user_speedup: Span | None = None
    same_answers: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def draws(prompts: int, seed: int) -> NDArray[np.int64]:
    """Resampled prompts [RESAMPLINGS, prompts]."""
    return np.random.default_rng(seed).integers(0, prompts, (RESAMPLINGS, prompts))


def ratio(above: Floats, below: Floats, drawn: NDArray[np.int64]) -> Floats:
    """Ratios of sums [1 + RESAMPLINGS]: of all prompts first, then of each resampling; 0 where the sum below is 0."""
    tops, bottoms = (np.concatenate([[x.sum()], x[drawn].sum(1)]) for x in (above, below))
    return np.divide(tops, bottoms, out=np.zeros_like(tops), where=bottoms > 0)


def span(values: Floats) -> Span:
    """The first value, and percentiles of the others."""
    low, high = np.percentile(values[1:], [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Span(float(values[0]), float(low), float(high))


def throughput(timed: Timed, sums: dict[str, Floats], drawn: NDArray[np.int64]) -> Floats:
    """tokens_per_s of all prompts, then of each resampling."""
    return ratio(sums["tokens"], sums["seconds"], drawn) * (sums["seconds"].sum() / timed.wall)


def side(timed: Timed, num_slots: int | None, seed: int = 0) -> Side:
    """Figures of one server. num_slots: of its drafter, None without one. ValueError without a streamed answer."""
    sums, answers = timed.sums(), timed.answers
    drawn = draws(len(sums["tokens"]), seed)
    times = latency([one.streamed() for one in answers])
    if times is None:
        raise ValueError("no answer was timed")
    tau, alpha = None, None
    if num_slots is not None and timed.rounds_known:
        tau, alpha = span(ratio(sums["emitted"], sums["rounds"], drawn)), told(answers, num_slots).alpha
    elif num_slots is not None:
        alpha = counted(timed.passes, num_slots).alpha
    return Side(
        tokens_per_s=span(throughput(timed, sums, drawn)),
        user_tokens_per_s=span(ratio(sums["later"], sums["reading"], drawn)),
        latency=times,
        request_ms=percentiles([one.seconds for one in answers]),
        requests=len(answers),
        tokens=sum(len(one.tokens) for one in answers),
        seconds=timed.wall,
        in_flight=float(sums["seconds"].sum() / timed.wall),
        passes=[sum(len(a.tokens) for a in one.answers) / one.seconds for one in timed.passes],
        tau=tau,
        tau_counted=None if num_slots is None else tau_counted(timed.passes),
        alpha=alpha,
        rounds=int(sums["told"].sum()) if num_slots is not None and timed.rounds_known else None,
        rounds_counted=None if num_slots is None else int(sum(one.moved.rounds for one in timed.passes if one.moved)),
    )


def level(concurrency: int, drafted: Timed, plain: Timed | None, num_slots: int, seed: int = 0) -> Level:
    """Both servers at one concurrency. ValueError unless both were asked the same."""
    own = side(drafted, num_slots, seed)
    if plain is None:
        return Level(concurrency, own)
    if plain.names != drafted.names or len(plain.passes) != len(drafted.passes):
        raise ValueError(f"concurrency {concurrency}: the two servers were asked different requests")
    mine, other = drafted.sums(), plain.sums()
    drawn = draws(len(mine["tokens"]), seed)
    users = [ratio(sums["later"], sums["reading"], drawn) for sums in (mine, other)]
    return Level(
        concurrency,
        own,
        side(plain, None, seed),
        span(throughput(drafted, mine, drawn) / throughput(plain, other, drawn)),
        span(np.divide(users[0], users[1], out=np.zeros_like(users[0]), where=users[1] > 0)),
        sum(a.tokens == b.tokens for a, b in zip(drafted.answers, plain.answers, strict=True)),
    )


def told(answers: Sequence[Answered], num_slots: int) -> Acceptance:
    """Acceptance from rounds that the requests told. ValueError where one did not."""
    found = [answer.drafted() for answer in answers]
    known = [one for one in found if one is not None]
    if len(known) != len(found):
        raise ValueError("the server did not tell the rounds of every request")
    return acceptance(known, num_slots)


def tau_counted(passes: Sequence[Asked]) -> float | None:
    """tau by the server's counters; None where they were not read."""
    moved = [one.moved for one in passes if one.moved is not None]
    return reduce(add, moved).tau(sum(len(one.answers) for one in passes)) if moved else None


def counted(passes: Sequence[Asked], num_slots: int) -> Acceptance:
    """Acceptance by the server's counters alone, where requests tell no rounds: tau is that of uncut rounds, alpha is
    empty where the counters know no positions. ValueError where no pass was counted."""
    read = [one.moved for one in passes if one.moved is not None]
    tau = tau_counted(passes)
    if not read or tau is None:
        raise ValueError("the server's counters show no round with a proposal: no drafter is at work in it")
    moved = reduce(add, read)
    slots, rounds = moved.per_slot, int(moved.rounds)
    before = [moved.rounds, *slots[:-1]] if slots else []
    return Acceptance(
        tau=tau,
        tau_verified=tau,
        alpha=[hit / given if given else 0.0 for hit, given in zip(slots, before, strict=True)],
        survival=[hit / rounds for hit in slots],
        trials=[int(given) for given in before],
        rounds=rounds,
        tokens=int(moved.tokens),
        efficiency=tau / (num_slots + 1),
    )
