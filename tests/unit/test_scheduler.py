"""Schedulers: what they admit by hand, that they never look ahead, and how they follow cost and load."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.run import ROOT
from eval.hardware import Roofline, load_hardware
from eval.hardware_shapes import one_layer_drafter, target_shape
from eval.scheduler import (
    ENDED,
    NAMES,
    Acceptance,
    Bandit,
    FallBack,
    Goodput,
    LinearCost,
    Load,
    Outcome,
    Prefix,
    Probe,
    Rates,
    Static,
    Threshold,
    build,
    early_stop,
    full_search,
    lengths_of,
    ranked,
    survival,
    throughputs,
)
from eval.sentinel import no_waits
from eval.verification import acceptance, residual

HERE = Load(1, 100.0)


class Table:
    """Seconds by tokens verified; drafting and the rest are free."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return self.seconds[round(tokens)]

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        return 0.0

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        return 0.0


class Line(Table):
    """seconds = fixed + slope * tokens, drafting `draft` a slot."""

    def __init__(self, fixed: float, slope: float, draft: float = 0.0) -> None:
        super().__init__({})
        self.fixed, self.slope, self.draft = fixed, slope, draft

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return self.fixed + self.slope * tokens

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        return self.draft * num_slots


def h200() -> Roofline:
    target = target_shape("llama-3.1-8b")
    drafter = one_layer_drafter(target, 14336, (32, 8, 128), 32000)
    return load_hardware(ROOT / "conf" / "hardware" / "h200.yaml").roofline("sglang", target, drafter)


def test_ranking_and_search_by_hand() -> None:
    chances = survival(torch.tensor([[0.9, 0.5, 0.5], [0.6, 1.0, 0.1]], dtype=torch.float64))
    values, requests = ranked(chances)
    assert values.tolist() == pytest.approx([0.9, 0.6, 0.6, 0.45, 0.225, 0.06])
    assert requests.tolist() == [0, 1, 1, 0, 0, 1]
    # 2 rows: 2/2, 2.9/2.5, 3.5/3, 4.1/3.5, 4.55/4, ... -> 1, 1.16, 1.1667, 1.171, 1.1375
    rates = throughputs(values, 2, torch.tensor([2, 2.5, 3, 3.5, 4, 4.5, 5], dtype=torch.float64))
    assert early_stop(rates).tolist() == [True, True, True, False, False, False]
    assert int(full_search(rates)) == 3
    assert lengths_of(requests, early_stop(rates), 2).tolist() == [1, 2]


def test_algorithm_1_equals_brute_force_on_a_smooth_cost() -> None:
    torch.manual_seed(3)
    cost = Line(1.0, 0.15)
    for _ in range(20):
        confidences = torch.rand(2, 3, dtype=torch.float64)
        chances = survival(confidences)
        best = max(
            product(range(4), range(4)),
            key=lambda ls: (
                (2 + sum(float(chances[r, :n].sum()) for r, n in enumerate(ls))) / (1 + 0.15 * (2 + sum(ls)))
            ),
        )
        found = Prefix(cost, 3, adaptive=False).decide(confidences, Load(2, 100.0)).tolist()
        assert tuple(found) == best


def emitted(length: int, drafts: tuple[int, ...], q: Tensor, p: Tensor) -> dict[tuple[int, ...], float]:
    """Distribution of the first two tokens of a request that verifies the first `length` drafts and goes on alone."""
    found: dict[tuple[int, ...], float] = {}

    def go_on(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) >= 2:
            found[prefix[:2]] = found.get(prefix[:2], 0.0) + mass
            return
        for token in range(len(p)):
            go_on((*prefix, token), mass * float(p[token]))

    prefix: tuple[int, ...] = ()
    mass = 1.0
    for token in drafts[:length]:
        kept = float(acceptance(p[token], q[token]))
        corrected = residual(p, q, torch.tensor(token))
        for other in range(len(p)):
            go_on((*prefix, other), mass * (1 - kept) * float(corrected[other] / corrected.sum()))
        prefix, mass = (*prefix, token), mass * kept
    go_on(prefix, mass)
    return found


P, Q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
# Verifying one slot never pays, verifying two does when the second is likely to survive.
COSTS = Table({1: 1.0, 2: 1.9, 3: 2.0})


def confidences_of(first: int) -> Tensor:
    """Slot 2's confidence reads the token drafted in slot 1: high after token 0, low after token 1."""
    return torch.tensor([[0.8, 0.9 if first == 0 else 0.1]], dtype=torch.float64)


def first_tokens(decide: Any) -> list[float]:
    """Exact distribution of the first emitted token under a rule for the length."""
    totals = [0.0, 0.0]
    for drafts in product(range(2), repeat=2):
        chance = float(Q[drafts[0]] * Q[drafts[1]])
        for tokens, mass in emitted(decide(confidences_of(drafts[0])), drafts, Q, P).items():
            totals[tokens[0]] += chance * mass
    return totals


def test_early_stop_keeps_the_target_and_a_retrospective_search_does_not() -> None:
    def algorithm_1(confidences: Tensor) -> int:
        return int(Prefix(COSTS, 2, adaptive=False).decide(confidences, HERE)[0])

    def retrospective(confidences: Tensor) -> int:
        values, _ = ranked(survival(confidences))
        return int(full_search(throughputs(values, 1, torch.tensor([1.0, 1.9, 2.0], dtype=torch.float64))))

    assert first_tokens(algorithm_1) == pytest.approx([0.7, 0.3], abs=1e-12)
    # The planted fault: the search over this round's own confidences gives (.85, .15).
    assert first_tokens(retrospective) == pytest.approx([0.85, 0.15], abs=1e-12)
    assert first_tokens(retrospective) != pytest.approx([0.7, 0.3], abs=0.1)


@pytest.mark.parametrize("seen", [[0, 0], [1, 1], [0, 1], [1, 0]])
def test_the_late_form_keeps_the_target(seen: list[int]) -> None:
    """Whatever the two rounds before held, the budget does not look at this round."""

    def late(confidences: Tensor) -> int:
        scheduler = Prefix(COSTS, 2, late=True, adaptive=False)
        for first in seen:
            scheduler.decide(confidences_of(first), HERE)
        return int(scheduler.decide(confidences, HERE)[0])

    assert first_tokens(late) == pytest.approx([0.7, 0.3], abs=1e-12)
    # Not for want of verifying: two good rounds give a budget of two.
    expected = 2 if seen[0] == 0 else 0
    assert late(confidences_of(0)) == late(confidences_of(1)) == expected


def test_two_requests_that_share_a_budget_stay_independent_of_it() -> None:
    """Joint distribution of both requests' first two tokens, 16 drafts enumerated: the product of the target's own."""
    cost = Line(1.0, 0.12)
    scheduler = Prefix(cost, 2, adaptive=False)
    joint: dict[tuple[tuple[int, ...], ...], float] = {}
    lengths_seen = set()
    for drafts in product(product(range(2), repeat=2), repeat=2):
        chance = 1.0
        for pair in drafts:
            chance *= float(Q[pair[0]] * Q[pair[1]])
        confidences = torch.cat([confidences_of(pair[0]) for pair in drafts])
        lengths = scheduler.decide(confidences, Load(2, 100.0)).tolist()
        lengths_seen.add(tuple(lengths))
        outcomes = [emitted(n, pair, Q, P) for n, pair in zip(lengths, drafts, strict=True)]
        for (a, ma), (b, mb) in product(outcomes[0].items(), outcomes[1].items()):
            joint[a, b] = joint.get((a, b), 0.0) + chance * ma * mb
    assert len(lengths_seen) > 1, "the rule must adapt for the test to mean anything"
    for (a, b), mass in joint.items():
        want = 1.0
        for token in (*a, *b):
            want *= float(P[token])
        assert mass == pytest.approx(want, abs=1e-12)


def test_threshold_and_static() -> None:
    confidences = torch.tensor([[0.9, 0.5, 0.9], [0.2, 1.0, 1.0]])
    assert Threshold(3, 0.4).decide(confidences, HERE).tolist() == [3, 0]
    assert Threshold(3, 0.42).decide(confidences, HERE).tolist() == [2, 0]
    assert Static(3).decide(confidences, HERE).tolist() == [3, 3]
    with pytest.raises(ValueError, match="threshold"):
        Threshold(3, 1.5)
    with pytest.raises(ValueError, match="requests, slots"):
        survival(torch.rand(3))


def test_acceptance_counts_what_alpha_counts() -> None:
    seen = Acceptance(3, weight=0.0001)
    seen.learn(Outcome(3, [3, 2, 1], [3, 0, 1], 1.0))
    # Slot 1: 3 trials, 2 hits. Slot 2: row 0 only (row 1 fell at slot 1, row 2 verified one). Slot 3: row 0.
    assert seen.alpha == pytest.approx([2 / 3, 1, 1], abs=1e-3)


def test_budget_shrinks_with_load() -> None:
    cost = h200()
    scheduler = Prefix(cost, 7, adaptive=False)
    confidences = torch.tensor([[0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]])
    means = [
        scheduler.decide(confidences.expand(rows, -1), Load(rows, 500.0)).double().mean().item()
        for rows in (1, 32, 128, 512)
    ]
    assert means == sorted(means, reverse=True)
    assert means[0] > 5
    assert means[-1] <= 2


def taught(name: str, cost: Any, rows: int, accepted: int = 1) -> int:
    """Depth that a scheduler chooses after 200 rounds in which `accepted` of the drafted slots survive."""
    scheduler, load = build(name, cost, 7), Load(rows, 500.0)
    for _ in range(200):
        depth = scheduler.depth(load)
        lengths = [0] * rows
        if depth:
            sure = torch.zeros(rows, depth)
            sure[:, :accepted] = 0.99
            lengths = scheduler.decide(sure, load).tolist()
        kept = [min(accepted, n) for n in lengths]
        seconds = cost.draft_seconds(rows, depth, 500) + cost.target_seconds(rows, rows + sum(lengths), 500)
        scheduler.learn(Outcome(depth, lengths, kept, seconds), load)
    return scheduler.depth(load)


@pytest.mark.parametrize("name", ["prefix", "prefix_late", "goodput", "bandit"])
def test_drafting_stops_where_it_does_not_pay(name: str) -> None:
    free, dear = Line(10.0, 0.01, 0.1), Line(0.1, 1.0, 1.0)
    assert taught(name, free, 2, accepted=3) >= 2
    assert taught(name, dear, 2, accepted=0) == 0


def test_fall_back_and_probes() -> None:
    scheduler = FallBack(Static(5), Line(0.1, 1.0, 1.0), 5, probe=4)
    depths = [scheduler.depth(HERE) for _ in range(8)]
    assert depths.count(0) == 6, "two of eight plain rounds probe"
    assert FallBack(Static(5), Line(10.0, 0.0, 0.0), 5).depth(HERE) == 5
    assert [FallBack(Static(0), Line(0.1, 1.0, 1.0), 5, probe=1).depth(HERE) for _ in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="probing"):
        Probe(0)


def test_fall_back_asks_of_the_depth_that_would_be_drafted() -> None:
    """Acceptance 0.7, one request: tau is 1.7 for K = 1 and (1 - 0.7 ** 8) / 0.3 = 3.1412 for K = 7. Rates are 1.00
    plain, 1.7 / 1.504 = 1.13 for one slot and 3.1412 / 4.487 = 0.70 for seven."""
    cost = Table({1: 1.0, 2: 1.504, 3: 2.5, 4: 3.0, 5: 3.5, 6: 3.8, 7: 4.2, 8: 4.487})
    seven = FallBack(Static(7), cost, 7, probe=4)
    assert [seven.depth(HERE) for _ in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert FallBack(Static(1), cost, 7).depth(HERE) == 1
    # Drafting is free here, and what is drafted is cut before it is verified: one slot of the seven pays.
    assert FallBack(Threshold(7), cost, 7).depth(HERE) == 7


def test_a_scheduler_that_probes_by_itself_is_let_when_a_probe_is_due() -> None:
    class Probing(Static):
        """Wants 7, then nothing but a slot every fourth round."""

        def __init__(self) -> None:
            super().__init__(7)
            self.wishes = [7, 7, 0, 0, 0, 1, 0, 0, 0, 1]

        def depth(self, load: Load) -> int:
            return self.wishes.pop(0)

    scheduler = FallBack(Probing(), Line(0.1, 1.0, 1.0), 7, probe=4)
    assert [scheduler.depth(HERE) for _ in range(10)] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_has_ended_counts_nowhere(late: bool) -> None:
    """One of two requests has ended. Tokens a second of 0, 1, 2 slots are 1 / 1, 1.5 / 1.3 = 1.15 and 1.5 / 1.6;
    were the other counted, 2 / 1 and 2.5 / 1.3 = 1.92, and nothing would be verified."""
    scheduler = Prefix(Table({2: 1.0, 3: 1.3, 4: 1.6}), 1, late=late)
    both = torch.tensor([[0.5], [0.5]])
    one = torch.tensor([[0.5], [ENDED]])
    for _ in range(3):
        found = scheduler.decide(one, Load(1, 100.0)).tolist()
    assert found == [1, 0]
    assert scheduler.decide(both, Load(2, 100.0)).tolist() == [0, 0]


def test_the_pool_leaves_out_what_has_ended() -> None:
    """Drafting one slot costs 0.15 s: 1.5 tokens in 1.45 s beat 1 in 1 s. Were the ended request's zeros among what is
    known, (1.5 + 1) / (1.45 + 1.15) = 0.96 would not."""

    class Dear(Table):
        def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
            return 0.15 * num_slots

    scheduler = Prefix(Dear({1: 1.0, 2: 1.3, 3: 1.6, 4: 1.9}), 1, late=True)
    for _ in range(4):
        scheduler.decide(torch.tensor([[0.5], [ENDED]]), Load(1, 100.0))
    assert scheduler._pool[:, 0].tolist() == [0.5, ENDED] * 2
    assert scheduler.depth(Load(1, 100.0)) == 1
    # Three requests, of another shape than two rounds ago: the running rows of the pool come again and again.
    with no_waits():
        known = scheduler._expected(3, 1)
    assert known.tolist() == [[0.5]] * 3


def test_the_linear_fit_recovers_a_linear_cost() -> None:
    class Known(Line):
        def target_seconds(self, rows: float, tokens: float, context: float) -> float:
            return 2e-9 * rows * context + 3e-5 * tokens + 4e-3

    fitted = LinearCost.fit(Known(0, 0), (1, 8, 64), 3)
    assert (fitted.context, fitted.batched, fitted.fixed) == pytest.approx((2e-9, 3e-5, 4e-3), rel=1e-3)
    load = Load(4, 500.0)
    chooser = Goodput(Known(0, 0), 3, fitted)
    want = 4 * (1 - 0.7**3) / 0.3 / (2e-9 * 2000 + 3e-5 * 12 + 4e-3)
    assert chooser.goodput(2, load) == pytest.approx(want)


def test_the_bandit_bins_loads() -> None:
    bandit = Bandit(3)
    assert [bandit.bin_of(Load(rows, 0.0)) for rows in (1, 2, 3, 4, 8, 15, 16)] == [0, 1, 1, 2, 3, 3, 4]


def test_a_table_of_rates_is_exact_when_small_and_never_falls() -> None:
    rates = Rates(Table({1: 1.0, 2: 3.0, 3: 2.0}))
    assert rates.seconds(1, 2, 100.0, torch.device("cpu")).tolist() == [1.0, 3.0, 3.0]
    wide = Rates(Line(1.0, 0.5)).seconds(64, 7, 100.0, torch.device("cpu"))
    assert wide.shape == (449,)
    assert float(wide[-1]) == pytest.approx(1 + 0.5 * 512)


def test_names() -> None:
    for name in NAMES:
        assert build(name, Line(1.0, 0.1), 4).depth(HERE) in range(5)
    assert build("static-2", Line(1.0, 0.1), 4).depth(HERE) == 2
    assert isinstance(build("static", Line(1.0, 0.1), 4, fall_back=True), FallBack)
    for wrong in ("statik", "prefix-3"):
        with pytest.raises(ValueError, match="there are plain, static"):
            build(wrong, Line(1.0, 0.1), 4)


def test_decide_never_waits_for_the_device() -> None:
    """Confidences on a device of their own: nothing is read from there, and what is sent there is not waited for. Three
    of five slots were drafted: the others are as acceptance so far has it, which the host knows."""
    for late, device in product((False, True), ("cpu", "meta")):
        scheduler = Prefix(Line(1.0, 0.05), 5, late=late, adaptive=False)
        for rows in (4, 4, 4, 3):
            with no_waits():
                scheduler.decide(torch.rand(rows, 3, device=device), Load(rows, 100.0))
