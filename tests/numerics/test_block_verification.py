"""Block verification: exact on enumerated toys, never fewer drafts than the chain rule, and faults that must show."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.sampling import DRAFT_STREAM, counter_uniform, draw, round_seeds
from eval import verification_block
from eval.verification import verify
from eval.verification_block import chances, expected, left_over, running, verify_block
from tests import markov
from tests.numerics.test_verification import Sentinel

V, K = 3, 3
PREFIXES = [prefix for n in range(K + 1) for prefix in itertools.product(range(V), repeat=n)]
INDEX = {prefix: i for i, prefix in enumerate(PREFIXES)}
DRAFTS = list(itertools.product(range(V), repeat=K))


def tables(seed: int, temperature: float = 1.0) -> Tensor:
    """A distribution after every prefix of up to K tokens: [prefixes, V], float64."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(len(PREFIXES), V, generator=generator, dtype=torch.float64) * 1.5 / temperature).softmax(-1)


def drafted(p: Tensor, q: Tensor, chosen: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """All drafts that can come, as rows: p [N, K+1, V], tokens [N, K], q [N, K, V] or None, their chances [N].
    chosen: the one draft of q's likeliest tokens."""
    rows = DRAFTS
    if chosen:
        walk: tuple[int, ...] = ()
        for _ in range(K):
            walk = (*walk, int(q[INDEX[walk]].argmax()))
        rows = [walk]
    tokens = torch.tensor(rows)
    nodes = torch.tensor([[INDEX[row[:n]] for n in range(K + 1)] for row in rows])
    own = q[nodes[:, :K]]
    mass = torch.ones(len(rows), dtype=torch.float64) if chosen else own.gather(-1, tokens[..., None])[..., 0].prod(-1)
    return p[nodes], tokens, None if chosen else own, mass


def joint_error(p: Tensor, q: Tensor, *, chosen: bool = False, drawn: Tensor | None = None) -> float:
    """Largest error of the joint over K + 1 tokens, u integrated out. drawn: where the drafts really come from."""
    rows, tokens, given, mass = drafted(p, q, chosen)
    if drawn is not None:
        mass = drafted(p, drawn, chosen)[3]
    share, kept = chances(rows, tokens, given)
    joint = torch.zeros([V] * (K + 1), dtype=torch.float64)

    def finish(prefix: tuple[int, ...], weight: Tensor) -> None:
        if len(prefix) == K + 1:
            joint[prefix] += weight
            return
        for token in range(V):
            finish((*prefix, token), weight * p[INDEX[prefix], token])

    for row, draft in enumerate(tokens.tolist()):
        for n in range(K + 1):
            chance = mass[row] * (share[row, n - 1] if n else 1) * (1 - share[row, n:]).prod()
            if n == K:
                finish(tuple(draft), chance)
                continue
            after = None if given is None else given[row, n]
            rest = verification_block.left_over(rows[row, n], kept[row, n], after, tokens[row, n])
            total = rest.sum()
            if chance > 0:
                for token in range(V):
                    finish((*draft[:n], token), chance * rest[token] / total)
    exact = torch.ones_like(joint)
    for text in itertools.product(range(V), repeat=K + 1):
        for n in range(K + 1):
            exact[text] *= p[INDEX[text[:n]], text[n]]
    return float((joint - exact).abs().max())


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("seed", [1, 5, 9])
def test_joint_over_k_plus_one_tokens_is_the_targets(chosen: bool, seed: int) -> None:
    assert joint_error(tables(seed), tables(seed + 1), chosen=chosen) < 1e-12


def test_planted_faults_move_the_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = tables(1), tables(2)

    def whole(p: Tensor, kept: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return p

    def unscaled(p: Tensor, kept: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return left_over(p, torch.ones_like(kept), q, tokens)

    # Drafts drawn at temperature 0.5, q reported before the temperature.
    assert joint_error(p, q, drawn=tables(2, temperature=0.5)) > 1e-3
    for fault in (whole, unscaled):
        monkeypatch.setattr(verification_block, "left_over", fault)
        assert joint_error(p, q) > 1e-3


def test_by_hand() -> None:
    # V = 2, K = 2. p = (.5, .5), then (.9, .1); q = (.8, .2), then (.5, .5). The draft is 0, 0.
    p = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]]], dtype=torch.float64)
    q, tokens = torch.tensor([[[0.8, 0.2], [0.5, 0.5]]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.long)
    # p_1 = .5/.8 = .625; p_2 = min(.625 * .9/.5, 1) = 1; s_1 = (.5625 - .5)+ + (.0625 - .5)+ = .0625.
    assert torch.allclose(running(p, tokens, q), torch.tensor([[1.0, 0.625, 1.0]]).double())
    assert torch.allclose(chances(p, tokens, q)[0], torch.tensor([[0.0625 / 0.4375, 1.0]]).double())
    # The chain rule keeps both with chance .625 only; here the second slot makes up for the first.
    rest = left_over(p[:, 0], torch.ones(1).double(), q[:, 0], tokens[:, 0])
    assert torch.allclose(rest, torch.tensor([[0.0, 0.3]]).double())


def means(p: Tensor, q: Tensor) -> tuple[float, float]:
    """Mean drafts kept by the chain rule and by block verification, over all drafts."""
    rows, tokens, given, mass = drafted(p, q, False)
    chain, block = expected(rows, tokens, given)
    return float((mass * chain).sum()), float((mass * block).sum())


def test_keeps_at_least_as_many_as_the_chain_rule() -> None:
    pairs = [means(tables(seed), tables(seed + 100)) for seed in range(40)]
    assert all(block >= chain - 1e-12 for chain, block in pairs)
    chain, block = torch.tensor(pairs).mean(0).tolist()
    assert block > 1.05 * chain


def one_round(p: Tensor, q: Tensor, anchor: Tensor, seeds: Tensor, positions: Tensor, rule: Any) -> Any:
    """K drafts and their verification; seeds as given."""
    nodes, drafts = [anchor], []
    for k in range(1, markov.K + 1):
        drafts.append(draw(q[nodes[-1]], counter_uniform(seeds, positions + k, DRAFT_STREAM)))
        nodes.append(drafts[-1])
    reached = torch.stack(nodes, 1)
    verdict = rule(p[reached], torch.stack(drafts, 1), q[reached[:, :-1]], seeds, positions)
    return verdict.accepted, verdict.tokens


def with_own_seeds(p: Tensor, q: Tensor, anchor: Tensor, seeds: Tensor, positions: Tensor) -> Any:
    return one_round(p, q, anchor, round_seeds(seeds, positions), positions, verify_block)


def test_rounds_one_after_another() -> None:
    """Texts of several rounds are the target's; numbers of one round that serve the next one show."""
    p, q, rows = markov.table(1), markov.table(4), 40_000
    found, block = markov.texts(with_own_seeds, rows, p, q)
    assert markov.chi_square(found, p) > 1e-3
    chained, chain = markov.texts(lambda *given: one_round(*given, rule=verify), rows, p, q)
    assert markov.chi_square(chained, p) > 1e-3
    assert block > chain
    reused = markov.texts(lambda *given: one_round(*given, rule=verify_block), rows, p, q)[0]
    assert markov.chi_square(reused, p) < 1e-6


def test_batched_equals_alone_and_nothing_waits() -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(6, n, V, generator=generator) for n in (K + 1, K))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(V, (6, K), generator=generator)
    seeds, positions = torch.arange(6) * 7, torch.arange(6) + 3
    with Sentinel():
        together = verify_block(p, tokens, q, seeds, positions)
        verify_block(p, tokens, None, seeds, positions)
    for r in range(6):
        row = slice(r, r + 1)
        alone = verify_block(p[row], tokens[row], q[row], seeds[row], positions[row])
        assert torch.equal(alone.tokens[0], together.tokens[r])
    empty = verify_block(p[:, :1], tokens[:, :0], None, seeds, positions)
    assert empty.accepted.tolist() == [0] * 6
    same = verify_block(p, p[:, :K].argmax(-1), p[:, :K], seeds, positions)
    assert same.accepted.tolist() == [K] * 6
