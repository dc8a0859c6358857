"""Acceptance and speed, computed from rounds. Every figure in a report is defined here, once.

tau            tokens emitted / rounds, the bonus or corrected token included. The first token of an answer comes with
               the prompt and belongs to no round; what an answer's end cut off was not emitted.
accepted       tau - 1; 0 without rounds
alpha_k        rounds that accepted slot k / rounds that proposed k and accepted 1..k-1
survival_k     rounds that accepted slot k / rounds that proposed k
tau_verified   1 + drafts accepted by verification / rounds, before an answer's end cut the last round: what the
               counters of serving engines show
efficiency     tokens emitted / tokens that were verified, each round's anchor with them: K + 1 a round, under a
               schedule the slots that it chose and the anchor, or a tree's nodes and the anchor: what drafting wastes.
               Under a schedule our own loop's target reads more than this counts, the rectangle of the deepest drafts;
               an engine with ragged batches reads this
verified slots mean slots a round that the target verified: K, or what a schedule chose, or a tree's nodes
break-even tau (draft + verify + rest) seconds per round / baseline seconds per round: a drafter with a smaller tau
               makes decoding slower. Rounds are counted per request, prefill is left out on both sides.
tokens/s       new tokens (the first included) / all seconds (prefill included)
draft ms       milliseconds in the drafter / rounds, reading the prompt included; verify ms: in the target's passes.
               Rounds are counted per request, so both fall as the batch grows
speedup        tokens/s with drafter / tokens/s without, same process, prompts and batch size
"""

from collections.abc import Iterable
from dataclasses import dataclass

from eval.decoder import Generation


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of rounds; definitions above.

    alpha, survival: by slot, 0.0 where `trials` (rounds that count in alpha_k's denominator) is 0. tau is 0.0 without
    rounds.
    """

    tau: float
    tau_verified: float
    alpha: list[float]
    survival: list[float]
    trials: list[int]
    rounds: int
    tokens: int
    efficiency: float = 0.0
    verified_slots: float = 0.0

    @property
    def accepted(self) -> float:
        return max(0.0, self.tau - 1)


def acceptance(generations: Iterable[Generation], num_slots: int, target_tokens: int | None = None) -> Acceptance:
    """Acceptance of generations drafted with num_slots slots. target_tokens: that the target read a round; K + 1 for
    chains."""
    generations = list(generations)
    emitted = [n for one in generations for n in one.emitted]
    accepted = [n for one in generations for n in one.accepted]
    proposed = [n for one in generations for n in one.proposed]
    verified = [n for one in generations for n in one.verified]
    lengths = [n for one in generations for n in one.lengths or [num_slots] * len(one.emitted)]
    read = len(emitted) * target_tokens if target_tokens else sum(lengths) + len(emitted)
    rounds = list(zip(accepted, proposed, strict=True))
    hits, trials, offered = [], [], []
    for k in range(1, num_slots + 1):
        hits.append(sum(a >= k for a, _ in rounds))
        trials.append(sum(a >= k - 1 and p >= k for a, p in rounds))
        offered.append(sum(p >= k for _, p in rounds))
    return Acceptance(
        tau=_ratio(sum(emitted), len(rounds)),
        tau_verified=1 + _ratio(sum(verified), len(rounds)) if rounds else 0.0,
        alpha=[_ratio(h, t) for h, t in zip(hits, trials, strict=True)],
        survival=[_ratio(h, o) for h, o in zip(hits, offered, strict=True)],
        trials=trials,
        rounds=len(rounds),
        tokens=sum(len(one.tokens) for one in generations),
        efficiency=_ratio(sum(emitted), read),
        verified_slots=_ratio(read - len(rounds), len(rounds)),
    )


@dataclass(frozen=True)
class Work:
    """What one pass over the prompts did: new tokens, rounds (per request), seconds by stage of eval.decoder.Clock."""

    tokens: int
    rounds: int
    seconds: dict[str, float]

    @classmethod
    def of(cls, generations: Iterable[Generation], seconds: dict[str, float]) -> "Work":
        generations = list(generations)
        return cls(sum(len(g.tokens) for g in generations), sum(len(g.emitted) for g in generations), dict(seconds))

    def __add__(self, other: "Work") -> "Work":
        seconds = {name: self.seconds[name] + other.seconds[name] for name in self.seconds}
        return Work(self.tokens + other.tokens, self.rounds + other.rounds, seconds)

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.tokens, sum(self.seconds.values()))

    @property
    def seconds_per_round(self) -> float:
        return _ratio(sum(self.seconds.values()) - self.seconds["prefill"], self.rounds)


@dataclass(frozen=True)
class Speed:
    """Speed with a drafter against the baseline; definitions above. Baseline figures are None when it was not run."""

    tokens_per_s: float
    split: dict[str, float]
    baseline_tokens_per_s: float | None = None
    speedup: float | None = None
    break_even_tau: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None


def speed(work: Work, baseline: Work | None) -> Speed:
    """Speed of a pass. split: share of its seconds by stage, sums to 1."""
    total = sum(work.seconds.values())
    split = {name: _ratio(seconds, total) for name, seconds in work.seconds.items()}
    draft_ms, verify_ms = (1000 * _ratio(work.seconds[name], work.rounds) for name in ("draft", "verify"))
    if baseline is None:
        return Speed(work.tokens_per_s, split, draft_ms=draft_ms, verify_ms=verify_ms)
    return Speed(
        tokens_per_s=work.tokens_per_s,
        split=split,
        baseline_tokens_per_s=baseline.tokens_per_s,
        speedup=_ratio(work.tokens_per_s, baseline.tokens_per_s),
        break_even_tau=_ratio(work.seconds_per_round, baseline.seconds_per_round),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
