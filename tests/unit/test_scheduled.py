"""Schedules inside decoding: the target's own output under every one, and what looks ahead is caught."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from data.target import Target
from drafters.contract import Drafter, Needs, Proposal, SlotBatch
from drafters.drafting import choose, take_rows
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from eval import steady
from eval.decoder import DecodeSettings, Generation, generate
from eval.metrics import acceptance
from eval.scheduled import NoCost, Scheduled, ScheduleSettings, cut_short
from eval.scheduler import Load, Outcome, Scheduler, Threshold
from eval.steady import Loop
from eval.verification import Verdict
from tests.doubles import START_ID, endless_target

K = 3
PROMPTS = [[START_ID, 9, 10, 11, 12], [START_ID, 30], [START_ID, 21, 22, 23, 24]]


@dataclass
class Line:
    """Seconds grow with the tokens of a pass."""

    fixed: float = 1.0
    token: float = 0.05
    draft: float = 0.01

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return self.fixed + self.token * tokens

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        return self.draft * num_slots

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        return 0.0


@dataclass
class Read:
    """How many positions were read, and the anchor. Both [R]."""

    length: Tensor
    anchor: Tensor


class Bigrams(Drafter):
    """Drafts from the target's distribution after the third prompt and a token, with noise. A slot's confidence is high
    where the draft before it was the likeliest (slot 1: always), or, `peeking`, where its own is; greedily, even."""

    def __init__(self, target: Target, sure: bool = True, peeking: bool = False, noise: float = 0.3) -> None:
        super().__init__()
        size = target.identity["vocab_size"]
        self.vocabulary, self.needs, self.num_slots = DraftVocabulary.full(size), Needs(()), K
        with torch.no_grad():
            texts = torch.tensor([[*PROMPTS[2], token] for token in range(size)])
            table = target.logits(target.forward(texts, ()).last[:, -1])
        self.table = table + noise * torch.randn(size, size, generator=torch.Generator().manual_seed(4))
        self.sure, self.peeking = sure, peeking
        self.seeds: list[list[int]] = []

    def settings(self) -> dict[str, Any]:
        return {}

    def slots(self, batch: Any) -> SlotBatch:
        raise NotImplementedError

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        return self.table[prev_ids]

    def begin(self, requests: int, capacity: int) -> Read:
        return Read(torch.zeros(requests, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64))

    def observe(self, state: Read, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        newest = take_rows(next_ids[..., None], (lengths - 1).clamp_min(0)[:, None])[:, 0, 0]
        state.anchor = torch.where(lengths > 0, newest, state.anchor)
        state.length = state.length + lengths

    def propose(self, state: Read, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        token, tokens, probs, sure = state.anchor, [], [], []
        likely = torch.ones_like(token, dtype=torch.bool)
        for k in range(1, num_slots + 1):
            best, before = self.table[token].argmax(-1), likely
            token, chosen = choose(self.table[token], self.vocabulary, sampling, seeds, state.length + k)
            likely = token % 2 == 0 if sampling.greedy else token == best
            sure.append(0.3 + 0.6 * (likely if self.peeking else before))
            tokens.append(token)
            probs += [] if chosen is None else [chosen]
        drawn = torch.stack(probs, 1) if probs else None
        self.seeds.append(seeds.tolist())
        return Proposal(torch.stack(tokens, 1), drawn, torch.stack(sure, 1) if self.sure else None)


def loop(name: str, **changes: Any) -> Loop:
    how = ScheduleSettings(name, **changes)
    return Loop("steady", lambda: how.make(K, Line()))


def decode(target: Target, drafter: Drafter | None, how: Loop | None, **changes: Any) -> list[Generation]:
    settings = DecodeSettings(**({"num_slots": K, "max_new_tokens": 14} | changes))
    return generate(target, drafter, PROMPTS, settings, group=None if how is None else how.group)


@pytest.fixture(scope="module")
def target() -> Target:
    return endless_target()


SCHEDULES = [
    *(("plain", {}), ("static", {}), ("static-2", {}), ("threshold", {"least": 0.5}), ("prefix", {})),
    *(("prefix_late", {"adaptive": False}), ("goodput", {}), ("bandit", {}), ("static", {"fall_back": True})),
]


@pytest.mark.parametrize(("name", "changes"), SCHEDULES)
def test_greedy_output_is_the_targets_own(name: str, changes: dict[str, Any], target: Target) -> None:
    plain = decode(target, None, None)
    for kind in ("steady", "halves"):
        how = ScheduleSettings(name, **changes)
        made = decode(target, Bigrams(target), Loop(kind, lambda how=how: how.make(K, Line())))
        assert [one.tokens for one in made] == [one.tokens for one in plain]
        for one in made:
            assert len(one.lengths) == len(one.emitted)
            assert all(a <= p <= n for a, p, n in zip(one.accepted, one.proposed, one.lengths, strict=True))
            assert all(v <= n <= K for v, n in zip(one.verified, one.lengths, strict=True))
    found = acceptance(made, K)
    if name == "plain":
        assert found.verified_slots == 0
        assert found.efficiency == 1
    elif name in ("static", "static-2") and not changes:
        depth = 2 if name == "static-2" else K
        assert found.verified_slots == depth
        assert found.efficiency == pytest.approx(found.tau / (depth + 1))
    elif name == "threshold":
        assert 0 < found.verified_slots < K
        assert found.efficiency > acceptance(decode(target, Bigrams(target), loop("static")), K).efficiency


def test_a_threshold_reads_q_max_where_there_is_no_confidence(target: Target) -> None:
    drafter = Bigrams(target, sure=False)
    made = decode(target, drafter, loop("threshold", least=0.2))
    assert [one.tokens for one in made] == [one.tokens for one in decode(target, None, None)]
    assert 0 < acceptance(made, K).verified_slots < K
    assert all(not one.peaks and not one.confidences for one in made)


def chi_square_p(target: Target, drafter: Drafter, scheduler: Scheduler, rows: int = 1500) -> float:
    """p-value of three sampled tokens after one prompt against the target's exact probabilities."""
    sampling, prompt, count = Sampling(temperature=1.5, top_k=3), PROMPTS[2], 3
    got: dict[tuple[int, ...], int] = {}
    group = Loop("steady", lambda: scheduler).group
    for one in generate(target, drafter, [prompt] * rows, DecodeSettings(K, count, rows, sampling), group=group):
        got[tuple(one.tokens)] = got.get(tuple(one.tokens), 0) + 1
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in exact.items():
            with torch.no_grad():
                last = target.forward(torch.tensor([prompt + list(prefix)]), ()).last[:, -1]
                p = sampling.probs(target.logits(last))[0].double()
            grown |= {(*prefix, token): mass * float(p[token]) for token in p.nonzero().flatten().tolist()}
        exact = grown
    assert set(got) <= set(exact)
    want = torch.tensor([mass * rows for mass in exact.values()]).double()
    seen = torch.tensor([got.get(key, 0) for key in exact]).double()
    large = want >= 5
    want, seen = (torch.cat([part[large], part[~large].sum()[None]]) for part in (want, seen))
    want, seen = want[want > 0], seen[want > 0]
    statistic = ((seen - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2))


class Older:
    """Verifies slot 1 where the confidence of slot 3, one round ago, was high: it had read the draft two places behind
    the anchor of that round, where slot 1 of this round stands when that round verified nothing."""

    reads_confidences: ClassVar[bool] = True

    def __init__(self) -> None:
        self.old: Tensor | None = None

    def depth(self, load: Load) -> int:
        return K

    def decide(self, confidences: Tensor, load: Load) -> Tensor:
        old, self.old = self.old, confidences
        return torch.zeros(len(confidences)).long() if old is None else (old[:, 2] > 0.5).long()

    def learn(self, outcome: Outcome, load: Load) -> None:
        """Nothing to learn."""


def test_sampling_is_lossless_and_looking_ahead_is_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chi_square_p(target, Bigrams(target), Threshold(K, 0.5)) > 1e-3
    assert chi_square_p(target, Bigrams(target), ScheduleSettings("prefix_late").make(K, Line(token=0.0005))) > 1e-3
    # Planted: a confidence that reads its own token.
    assert chi_square_p(target, Bigrams(target, peeking=True), Threshold(K, 0.5)) < 1e-4
    assert chi_square_p(target, Bigrams(target), Older()) > 1e-3
    # Planted: a place drafted again from the random number that an older confidence has read.
    monkeypatch.setattr(steady, "round_seeds", lambda seeds, anchors: seeds)
    assert chi_square_p(target, Bigrams(target), Older()) < 1e-4


def test_draft_seeds_change_by_round_unless_noise_is_shared(target: Target) -> None:
    sampled = Sampling(1.0)
    for verification, renewed in ((None, True), ("same_noise", False)):
        drafter = Bigrams(target)
        decode(target, drafter, loop("static"), sampling=sampled, verification=verification)
        seeds = [tuple(one) for one in drafter.seeds[:-1]]  # in the last round, thrown away, nobody had moved
        assert (len(set(seeds)) == len(seeds)) is renewed
    same = decode(target, Bigrams(target), loop("threshold"), sampling=sampled, verification="same_noise")
    assert [one.tokens for one in same] == [one.tokens for one in decode(target, None, None, sampling=sampled)]


def test_cut_by_hand() -> None:
    verdict = Verdict(
        torch.tensor([2, 0, 3, 1]), torch.tensor([[7, 8, 9, -1], [5, -1, -1, -1], [1, 2, 3, 4], [6, 5, -1, -1]])
    )
    cut = cut_short(verdict, torch.tensor([1, 2, 0, 1]), torch.tensor([70, 71, 72, 73]))
    # Cut after one; rejected before the limit; nothing verified; rejected at the limit itself, which was not verified.
    assert cut.accepted.tolist() == [1, 0, 0, 1]
    assert cut.tokens.tolist() == [[7, 70, -1, -1], [5, -1, -1, -1], [72, -1, -1, -1], [6, 73, -1, -1]]


def test_refusals(target: Target) -> None:
    with pytest.raises(ValueError, match=r"schedule\.name must be null, plain"):
        ScheduleSettings("thresold")
    assert ScheduleSettings("static", fall_back=True).needs_cost
    assert not ScheduleSettings("bandit").needs_cost
    with pytest.raises(ValueError, match="needs a cost model"):
        ScheduleSettings("goodput").make(K, NoCost())
    with pytest.raises(ValueError, match="a schedule cuts rejection"):
        decode(target, Bigrams(target), loop("static"), verification="none")
    drafter = Bigrams(target, sure=False)
    own = drafter.propose
    drafter.propose = lambda *given: Proposal(own(*given).tokens.clone())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="gives neither confidences nor q_max"):
        Scheduled(Threshold(K), K).limits(Proposal(torch.zeros(1, K).long()), torch.ones(1).bool())
