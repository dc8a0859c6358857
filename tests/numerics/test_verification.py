"""Verification is lossless: exact enumeration, chi-square, and planted faults that these checks must catch."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafters.sampling import DRAFT_STREAM, Sampling, counter_uniform, draw
from eval import verification
from eval.verification import verify, verify_greedy

V, K = 3, 3
Acceptance = Callable[[Tensor, Tensor | None], Tensor]
Residual = Callable[[Tensor, Tensor | None, Tensor], Tensor]
Tables = dict[tuple[int, ...], Tensor]


def tables(seed: int, temperature: float = 1.0) -> Tables:
    """A next-token distribution for every prefix of up to K tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(K + 1) for p in itertools.product(range(V), repeat=n)]
    return {
        prefix: torch.softmax(torch.randn(V, generator=generator, dtype=torch.float64) * 1.5 / temperature, -1)
        for prefix in prefixes
    }


def target_joint(p: Tables) -> Tensor:
    """The target's own distribution over K+1 tokens, [V] * (K+1)."""
    joint = torch.ones([V] * (K + 1), dtype=torch.float64)
    for sequence in itertools.product(range(V), repeat=K + 1):
        for n in range(K + 1):
            joint[sequence] *= p[sequence[:n]][sequence[n]]
    return joint


def emitted_joint(p: Tables, q: Tables, drawn: Tables | None, accept: Acceptance, rest: Residual) -> Tensor:
    """Slow twin: distribution over K+1 tokens of one round and then the target's own tokens, uniforms integrated out.

    `drawn` are the distributions that the drafts really come from; None: the drafter proposes q's argmax.
    """
    joint = torch.zeros([V] * (K + 1), dtype=torch.float64)

    def finish(prefix: tuple[int, ...], mass: Tensor) -> None:
        if len(prefix) == K + 1:
            joint[prefix] += mass
            return
        for token in range(V):
            finish((*prefix, token), mass * p[prefix][token])

    def walk(prefix: tuple[int, ...], mass: Tensor) -> None:
        if len(prefix) == K:
            finish(prefix, mass)
            return
        proposals = torch.nn.functional.one_hot(q[prefix].argmax(), V).double() if drawn is None else drawn[prefix]
        known = None if drawn is None else q[prefix]
        for token in range(V):
            if proposals[token] == 0:
                continue
            drafted = torch.tensor(token)
            chance = accept(p[prefix][drafted], None if known is None else known[drafted])
            walk((*prefix, token), mass * proposals[token] * chance)
            weights = rest(p[prefix], known, drafted)
            for corrected in range(V):
                share = mass * proposals[token] * (1 - chance) * weights[corrected] / weights.sum()
                finish((*prefix, corrected), share)

    walk((), torch.tensor(1.0, dtype=torch.float64))
    return joint


def error(accept: Acceptance, rest: Residual, *, deterministic: bool, drawn: Tables | None = None) -> float:
    p, q = tables(1), tables(2)
    source = None if deterministic else (drawn or q)
    return float((emitted_joint(p, q, source, accept, rest) - target_joint(p)).abs().max())


@pytest.mark.parametrize("deterministic", [False, True])
def test_joint_over_k_plus_one_tokens_is_the_targets(deterministic: bool) -> None:
    assert error(verification.acceptance, verification.residual, deterministic=deterministic) < 1e-12


def accept_upside_down(p: Tensor, q: Tensor | None) -> Tensor:
    return p if q is None else (q / p).clamp_max(1)


def accept_by_p_alone(p: Tensor, q: Tensor | None) -> Tensor:
    return p


def residual_without_sign(p: Tensor, q: Tensor | None, drafted: Tensor) -> Tensor:
    return p if q is None else (p - q).abs()


def residual_is_p(p: Tensor, q: Tensor | None, drafted: Tensor) -> Tensor:
    return p


def test_planted_faults_move_the_joint() -> None:
    good = (verification.acceptance, verification.residual)
    assert error(good[0], residual_is_p, deterministic=False) > 1e-3
    assert error(good[0], residual_is_p, deterministic=True) > 1e-3
    assert error(good[0], residual_without_sign, deterministic=False) > 1e-3
    assert error(accept_upside_down, good[1], deterministic=False) > 1e-3
    assert error(accept_by_p_alone, good[1], deterministic=False) > 1e-3
    # Tokens drawn at temperature 0.5, but q reported before the temperature.
    assert error(*good, deterministic=False, drawn=tables(2, temperature=0.5)) > 1e-3


def counts(rows: int, *, deterministic: bool) -> Tensor:
    """Counts of K+1 tokens from `rows` requests through the batched code, later rounds included."""
    p, q = tables(1), tables(2)
    order = [prefix for n in range(K + 1) for prefix in itertools.product(range(V), repeat=n)]
    index = {prefix: i for i, prefix in enumerate(order)}
    after = torch.tensor([[index.get((*prefix, t), 0) for t in range(V)] for prefix in order])
    p_all, q_all = torch.stack([p[x] for x in order]), torch.stack([q[x] for x in order])
    seeds = torch.arange(rows)
    at = torch.zeros(rows, dtype=torch.long)
    nodes, drafts = [at], []
    for k in range(1, K + 1):
        uniforms = counter_uniform(seeds, torch.full((rows,), 10 + k), DRAFT_STREAM)
        drafts.append(q_all[at].argmax(-1) if deterministic else draw(q_all[at], uniforms))
        at = after[at, drafts[-1]]
        nodes.append(at)
    reached = torch.stack(nodes, 1)
    known = None if deterministic else q_all[reached[:, :K]]
    verdict = verify(p_all[reached], torch.stack(drafts, 1), known, seeds, torch.full((rows,), 10))
    out = verdict.tokens
    for k in range(K + 1):  # the rest of the K+1 tokens: rounds without proposal, at the same positions
        prefix = torch.zeros(rows, dtype=torch.long)
        for n in range(k):
            prefix = after[prefix, out[:, n]]
        single = verify(p_all[prefix][:, None], out[:, :0], None, seeds, torch.full((rows,), 10 + k)).tokens[:, 0]
        out[:, k] = torch.where(out[:, k] < 0, single, out[:, k])
    code = (out * V ** torch.arange(K, -1, -1)).sum(1)
    return torch.bincount(code, minlength=V ** (K + 1))


def p_value(observed: Tensor) -> float:
    expected = target_joint(tables(1)).flatten() * observed.sum()
    small = expected < 5
    got = torch.cat([observed[~small].double(), observed[small].sum().double()[None]])
    want = torch.cat([expected[~small], expected[small].sum()[None]])
    got, want = got[want > 0], want[want > 0]
    statistic = ((got - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("deterministic", [False, True])
def test_batched_code_chi_square(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_value(counts(40_000, deterministic=deterministic)) > 1e-3
    monkeypatch.setattr(verification, "residual", residual_is_p)
    assert p_value(counts(40_000, deterministic=deterministic)) < 1e-9


def one_hot(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), V).double()


def test_never_always_and_sometimes() -> None:
    rows, seeds, positions = 1000, torch.arange(1000), torch.zeros(1000, dtype=torch.long)
    tokens = torch.zeros(rows, K, dtype=torch.long)
    q = one_hot(0).expand(rows, K, V)

    disjoint = verify(one_hot(1).expand(rows, K + 1, V), tokens, q, seeds, positions)
    assert disjoint.accepted.eq(0).all()
    assert disjoint.tokens.tolist() == [[1, -1, -1, -1]] * rows

    equal = verify(one_hot(0).expand(rows, K + 1, V), tokens, q, seeds, positions)
    assert equal.accepted.eq(K).all()
    assert equal.tokens.eq(0).all()

    half = torch.tensor([0.5, 0.25, 0.25]).expand(rows, K + 1, V)
    accepted = verify(half, tokens, None, seeds, positions).accepted
    # Chance of exactly k acceptances: 1/2, 1/4, 1/8, 1/8; four standard deviations of 1000 trials.
    for k, chance in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert abs(int((accepted == k).sum()) - chance * rows) < 4 * (rows * chance * (1 - chance)) ** 0.5


def test_equal_distributions_never_reject_and_residual_falls_back() -> None:
    p = Sampling(temperature=0.7).probs(torch.randn(4, K + 1, 50, generator=torch.Generator().manual_seed(0)))
    tokens = p[:, :K].argmax(-1)
    verdict = verify(p, tokens, p[:, :K], torch.arange(4), torch.zeros(4, dtype=torch.long))
    assert verdict.accepted.tolist() == [K] * 4
    assert torch.equal(verification.residual(p[0, 0], p[0, 0], tokens[0, 0]), p[0, 0])


def test_same_tokens_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(6, K + 1, V, generator=generator)
    q = torch.rand(6, K, V, generator=generator)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(V, (6, K), generator=generator)
    seeds, positions = torch.arange(6) * 7, torch.arange(6) + 3
    together = verify(p, tokens, q, seeds, positions)
    for r in range(6):
        row = slice(r, r + 1)
        alone = verify(p[row], tokens[row], q[row], seeds[row], positions[row])
        assert torch.equal(alone.tokens[0], together.tokens[r])


def test_greedy_by_hand() -> None:
    best = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6]])
    verdict = verify_greedy(best, torch.tensor([[4, 5], [4, 5], [4, 5]]))
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.tokens.tolist() == [[4, 5, 6], [4, 9, -1], [9, -1, -1]]


class Sentinel(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises where an operation would wait for the device or give a shape that depends on data."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(name in str(func) for name in self.FORBIDDEN):
            raise AssertionError(f"host synchronisation in {func}")
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_host() -> None:
    p = torch.full((2, K + 1, V), 1 / V)
    with pytest.raises(AssertionError, match="host synchronisation"), Sentinel():
        p.sum().item()
    tokens, seeds = torch.zeros(2, K, dtype=torch.long), torch.arange(2)
    with Sentinel():
        verify(p, tokens, p[:, :K], seeds, seeds)
        verify(p, tokens, None, seeds, seeds)
        verify_greedy(p.argmax(-1), tokens)
