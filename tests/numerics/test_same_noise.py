"""Same-noise verification is the target's own sampler, conditional drafts are exact, and noise is never drawn anew."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from data.target import Target
from drafters.contract import Proposal
from drafters.kforcing import KForcing
from drafters.noise import pick
from drafters.sampling import NOISE_STREAM, Sampling, counter_uniform
from eval import verification
from eval.decoder import DecodeSettings, generate
from eval.metrics import acceptance
from eval.verification import residual, take_all, verify_same_noise
from tests.doubles import START_ID, endless_target

HOT = Sampling(temperature=1.0)


def cells(edges: Sequence[float]) -> list[tuple[Tensor, float]]:
    """(middle, width) of the cells that edges cut [0, 1) into."""
    cuts = sorted({0.0, 1.0, *edges})
    return [
        (torch.tensor((a + b) / 2, dtype=torch.float64), b - a)
        for a, b in zip(cuts, cuts[1:], strict=False)
        if b - a > 1e-12
    ]


# The redraw hazard. A drafter whose slot 1 peeks at the second noise: it says 1 where u_2 >= 1/2.
P1, P2 = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.3, 0.7]).double()


def second_given_first(redraw: bool) -> list[float]:
    """P(y_2 = 1 | y_1) for y_1 = 0, 1, by exact enumeration; redraw: u_2 is drawn anew after a mismatch at slot 1."""
    joint = torch.zeros(2, 2, dtype=torch.float64)
    for (u1, m1), (u2, m2), (anew, m3) in itertools.product(cells([0.5]), cells([0.3, 0.5]), cells([0.3])):
        first, guess = pick(P1, u1), (u2 >= 0.5).long()
        kept = anew if redraw and guess != first else u2
        joint[first, pick(P2, kept)] += m1 * m2 * m3
    return (joint[:, 1] / joint.sum(1)).tolist()


def test_redraw_hazard_by_enumeration() -> None:
    assert second_given_first(redraw=False) == pytest.approx([0.7, 0.7], abs=1e-12)
    assert second_given_first(redraw=True) == pytest.approx([0.55, 0.85], abs=1e-12)


@pytest.mark.parametrize(("redraw", "wanted"), [(False, (0.7, 0.7)), (True, (0.55, 0.85))])
def test_redraw_hazard_through_the_code(redraw: bool, wanted: tuple[float, float]) -> None:
    rows = 20_000
    seeds, start = torch.arange(rows), torch.full((rows,), 4)
    guess = (counter_uniform(seeds, start + 2, NOISE_STREAM) >= 0.5).long()[:, None]
    first = verify_same_noise(torch.stack([P1, P2]).expand(rows, 2, 2), guess, seeds, start)
    later = torch.where((first.accepted == 0) & redraw, seeds + rows, seeds)
    then = verify_same_noise(P2.expand(rows, 1, 2), guess[:, :0], later, start + 1)
    second = torch.where(first.accepted == 1, first.tokens[:, 1], then.tokens[:, 0])
    for y1 in (0, 1):
        own = second[first.tokens[:, 0] == y1].double()
        assert abs(float(own.mean()) - wanted[y1]) < 4 * 0.5 / len(own) ** 0.5


@pytest.mark.parametrize("ranked", [False, True])
def test_rounds_give_the_samplers_own_text(ranked: bool) -> None:
    """Whatever is proposed: a table for each prefix, rounds of random drafts, against token-by-token picks."""
    size, length, width = 4, 9, 3
    generator = torch.Generator().manual_seed(0)
    tables: dict[tuple[int, ...], Tensor] = {}

    def p(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in tables:
            tables[prefix] = torch.rand(size, generator=generator).double().softmax(-1)
        return tables[prefix]

    kept = 0
    for seed in range(60):
        seeds, own, made = torch.tensor([seed]), (), ()
        for t in range(length):
            own += (int(pick(p(own), counter_uniform(seeds, torch.tensor([5 + t]), NOISE_STREAM)[0], ranked)),)
        while len(made) < length:
            drafts = torch.randint(size, (1, width), generator=generator)
            rows = torch.stack([p(made + tuple(drafts[0, :k].tolist())) for k in range(width + 1)])
            verdict = verify_same_noise(rows[None], drafts, seeds, torch.tensor([4 + len(made)]), ranked)
            kept += int(verdict.accepted)
            made += tuple(verdict.tokens[0, : int(verdict.accepted) + 1].tolist())
        assert made[:length] == own
    assert kept > 20


def test_take_all_keeps_everything() -> None:
    verdict = take_all(torch.tensor([[4, 5, 6]]))
    assert verdict.accepted.tolist() == [2]
    assert verdict.tokens.tolist() == [[4, 5, 6, -1]]


# Conditional drafts. Two positions; slot 2's distribution depends on u_1 beyond the token that it stands for.


def dist(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


TARGET1 = dist(0.15, 0.45, 0.4)
TARGET2 = [dist(0.6, 0.3, 0.1), dist(0.1, 0.1, 0.8), dist(0.3, 0.4, 0.3)]
SLOT1 = dist(0.6, 0.2, 0.2)
SLOT2 = [dist(0.7, 0.1, 0.2), dist(0.2, 0.2, 0.6), dist(0.1, 0.8, 0.1), dist(0.3, 0.3, 0.4)]  # by quarter of u_1
NEXT1 = [dist(0.3, 0.3, 0.4), dist(0.4, 0.2, 0.4), dist(0.2, 0.2, 0.6)]  # slot 1 of the next round, by y_1
PEEKED = [dist(0.6, 0.2, 0.2), dist(0.1, 0.2, 0.7)]  # planted: slot 1 by half of u_2


def emitted(slot1: Callable[[Tensor], Tensor], shared: bool = False) -> Tensor:
    """Joint [3, 3] of two tokens by exact enumeration over the noises' cells, acceptance integrated out. shared: the
    corrected token at position 1 is drawn from the noise that the rejected one was drawn from."""
    first = [SLOT1, *PEEKED]
    leftovers = [residual(TARGET1, q, torch.tensor(x)) for q in first for x in range(3)]
    edges1 = [0.25, 0.5, 0.75] + [float(e) for q in (*first, *leftovers) for e in (q / q.sum()).cumsum(0)]
    edges2 = [0.5] + [float(e) for q in (*SLOT2, *NEXT1) for e in q.cumsum(0)]
    joint = torch.zeros(3, 3, dtype=torch.float64)

    def second(y1: int, q: Tensor, u2: Tensor, mass: Tensor) -> None:
        drafted = pick(q, u2)
        chance = verification.acceptance(TARGET2[y1][drafted], q[drafted])
        weights = residual(TARGET2[y1], q, drafted)
        joint[y1] += mass * (1 - chance) * weights / weights.sum()
        joint[y1, drafted] += mass * chance

    for (u1, m1), (u2, m2) in itertools.product(cells(edges1), cells(edges2)):
        q, mass = slot1(u2), torch.tensor(m1 * m2, dtype=torch.float64)
        drafted = pick(q, u1)
        chance = verification.acceptance(TARGET1[drafted], q[drafted])
        second(int(drafted), SLOT2[int(u1 * 4)], u2, mass * chance)
        weights = residual(TARGET1, q, drafted)
        weights = torch.nn.functional.one_hot(pick(weights, u1), 3).double() if shared else weights / weights.sum()
        for y1 in range(3):
            second(y1, NEXT1[y1], u2, mass * (1 - chance) * weights[y1])
    return joint


def test_conditional_drafts_are_exact_with_noises_kept() -> None:
    wanted = TARGET1[:, None] * torch.stack(TARGET2)
    assert float((emitted(lambda u2: SLOT1) - wanted).abs().max()) < 1e-12
    assert float((emitted(lambda u2: SLOT1, shared=True) - wanted).abs().max()) > 1e-2
    assert float((emitted(lambda u2: PEEKED[int(u2 * 2)]) - wanted).abs().max()) > 1e-2


# The decoding loop on a tiny target.


@pytest.fixture(scope="module")
def target() -> Target:
    return endless_target()


def head(target: Target, **noise: Any) -> KForcing:
    torch.manual_seed(0)
    model: dict[str, Any] = {"num_slots": 3, "layers": [0, 2, 3], "block": {"depth": 1}}
    return KForcing(target.parts, None, **model, noise=noise).eval()


class Knows(KForcing):
    """Says the answers it was told, by seed and position, but for every fourth position."""

    told: dict[int, list[int]]

    def propose(self, state: Any, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        tokens = super().propose(state, num_slots, sampling, seeds).tokens
        for r, (seed, length) in enumerate(zip(seeds.tolist(), state.length.tolist(), strict=True)):
            for k in range(num_slots):
                place = length + 1 + k
                if place % 4 and place < len(self.told[seed]):
                    tokens[r, k] = self.told[seed][place]
        return Proposal(tokens)


PROMPTS = [[START_ID, 9, 10, 11, 12, 13], [START_ID, 30], [START_ID, 21, 22, 23]]


@pytest.mark.parametrize("sampling", [HOT, Sampling(0.7, top_k=20, top_p=0.9)])
def test_output_is_the_targets_own_sample_token_by_token(sampling: Sampling, target: Target, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    drafter = Knows(target.parts, None, num_slots=3, layers=[0, 2, 3], block={"depth": 1})
    way = DecodeSettings(3, 24, 3, sampling, seed=11)
    plain = [one.tokens for one in generate(target, None, PROMPTS, way)]
    drafter.told = {11 + i: prompt + plain[i] for i, prompt in enumerate(PROMPTS)}
    made = generate(target, drafter, PROMPTS, way)
    assert [one.tokens for one in made] == plain
    assert 1.5 < acceptance(made, 3).tau < 4

    # Planted: a noise that depends on the round.
    def anew(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        return counter_uniform(seeds + 7 * positions[..., :1], positions, stream)

    monkeypatch.setattr(verification, "counter_uniform", anew)
    assert [one.tokens for one in generate(target, drafter, PROMPTS, way)] != plain


@pytest.mark.parametrize("noise", [{"form": "joint"}, {"form": "conditional", "coupling": "same_noise"}])
def test_every_form_gives_the_targets_own_sample(noise: dict[str, Any], target: Target) -> None:
    way = DecodeSettings(3, 12, 3, HOT, seed=3)
    plain, made = generate(target, None, PROMPTS, way), generate(target, head(target, **noise), PROMPTS, way)
    assert [one.tokens for one in made] == [one.tokens for one in plain]


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """p-value; cells with an expectation below five are one cell."""
    small = expected < 5
    got = torch.cat([observed[~small].double(), observed[small].sum().double()[None]])
    want = torch.cat([expected[~small].double(), expected[small].sum().double()[None]])
    got, want = got[want > 0], want[want > 0]
    freedom = torch.tensor((len(want) - 1) / 2).double()
    return float(torch.special.gammaincc(freedom, ((got - want) ** 2 / want).sum() / 2))


@torch.no_grad()
def three_tokens(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first three tokens after PROMPTS[0]."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in found.items():
            last = target.forward(torch.tensor([[*PROMPTS[0], *prefix]]), ()).last[0, -1]
            probs = sampling.probs(target.logits(last))
            longer |= {(*prefix, int(t)): mass * float(probs[t]) for t in probs.nonzero()[:, 0]}
        found = longer
    return found


def p_value(target: Target, drafter: KForcing, sampling: Sampling, rows: int = 2000) -> float:
    wanted = three_tokens(target, sampling)
    way = DecodeSettings(2, 3, 500, sampling)
    made = generate(target, drafter, [PROMPTS[0]] * rows, way, seeds=list(range(rows)))
    counts = dict.fromkeys(wanted, 0)
    for one in made:
        counts[tuple(one.tokens)] += 1
    assert 0.15 < acceptance(made, 2).alpha[0] < 0.9
    return chi_square(torch.tensor(list(counts.values())), rows * torch.tensor(list(wanted.values())))


def test_conditional_output_follows_the_target(target: Target) -> None:
    """Chi-square through the loop; planted: drafts drawn from the numbers that corrected tokens are drawn from."""
    sampling = Sampling(1.0, top_k=3)
    drafter = head(target, form="conditional")
    with torch.no_grad():
        first = target.forward(torch.tensor([PROMPTS[0]]), ()).last[0, -1]
        likely = sampling.probs(target.logits(first)).nonzero()
        texts = torch.cat([torch.tensor(PROMPTS[0]).expand(len(likely), -1), likely], 1)
        lean = 0.8 * target.logits(target.forward(texts, ()).last[:, -1]).mean(0)  # so that some drafts are accepted
    own = drafter.lm_head.forward
    drafter.lm_head.forward = lambda hidden: 0.3 * own(hidden) + lean  # type: ignore[method-assign]
    assert p_value(target, drafter, sampling) > 1e-3
    drafter.stream = NOISE_STREAM
    assert p_value(target, drafter, sampling) < 1e-6
