"""Objectives: the chunked form equals the plain one, value and gradient, in named regimes; measures by hand."""

import inspect
import math
from pathlib import Path

import pytest
import torch

from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import tiny_target
from training import objectives
from training.objectives import MEASURES, Objective, Scored, SlotWeights, dpace, plain_terms, slot_terms

TERMS = [{name: 1.0} for name in MEASURES] + [{"hard_ce": 0.1, "tv": 0.9}]
WEIGHTS = [
    {"kind": "uniform"},
    {"kind": "exponential", "gamma": 4},
    {"kind": "geometric", "beta": 0.8},
    {"kind": "dpace"},
    {"kind": "dpace_reach"},
    {"kind": "dpace_future"},
]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def both(drafter, target, batch, objective):
    """(loss, gradients) of the fast and the plain form."""
    results = []
    for form in (slot_terms, plain_terms):
        drafter.zero_grad()
        made = form(drafter, drafter.slots(batch), batch, target.parts, objective)
        loss = made if isinstance(made, torch.Tensor) else made.loss
        loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in drafter.named_parameters()}
        results.append((loss.detach(), grads))
    return results


def assert_equal(fast, plain):
    assert torch.allclose(fast[0], plain[0], rtol=1e-4, atol=1e-5)
    for name, gradient in plain[1].items():
        assert torch.allclose(fast[1][name], gradient, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("terms", TERMS, ids=lambda t: "+".join(t))
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: w["kind"])
def test_chunked_equals_plain(terms, weights, target):
    drafter = checks.build("eagle3", target, 3, DraftVocabulary(torch.arange(0, 64, 2), 64))
    batch = checks.train_batch(target, drafter)
    assert_equal(*both(drafter, target, batch, Objective(terms, weights, chunk=5)))


def test_regime_one_slot(target):
    drafter = checks.build("eagle3", target, 1)
    batch = checks.train_batch(target, drafter)
    batch.anchors = batch.anchors[:, :1]
    assert_equal(*both(drafter, target, batch, Objective({"soft_ce": 1.0})))


def test_regime_all_masked_gives_zero_and_no_nan(target):
    drafter = checks.build("eagle3", target, 3)
    batch = checks.train_batch(target, drafter)
    batch.anchors.fill_(-1)
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, Objective({"soft_ce": 1.0}))
    terms.loss.backward()
    assert terms.loss == 0
    assert terms.denominator == 0
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


def test_regime_no_label_in_the_draft_vocabulary(target):
    drafter = checks.build("eagle3", target, 3, DraftVocabulary(torch.tensor([0, 1]), 64))
    batch = checks.train_batch(target, drafter)
    batch.top1.fill_(40)
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, Objective({"soft_ce": 1.0}))
    terms.loss.backward()
    assert terms.loss == 0
    assert terms.supervised.sum() == 0
    assert terms.offered[0] == grid_anchors(batch), "unsayable labels must count as misses"
    assert terms.kept.sum() == 0


def grid_anchors(batch) -> int:
    return int((batch.anchors >= 0).sum())


def scored(logits: list[float], teacher: list[float], label: int = 0) -> Scored:
    z, t = torch.tensor([logits]), torch.tensor([teacher])
    index, state = torch.tensor([label]), torch.zeros(1, 2)
    first = torch.tensor([0])
    return Scored(z, lambda: t, t.logsumexp(-1), first, index, index, index, state, state, (1, 1), first)


def test_measures_by_hand():
    half = scored([0.0, 0.0], [math.log(3.0), 0.0])  # q = (1/2, 1/2), p = (3/4, 1/4)
    assert MEASURES["hard_ce"](half).item() == pytest.approx(math.log(2))
    assert MEASURES["soft_ce"](half).item() == pytest.approx(math.log(2))
    assert MEASURES["kl"](half).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert MEASURES["tv"](half).item() == pytest.approx(0.25)
    assert MEASURES["lk_alpha"](half).item() == pytest.approx(-math.log(0.75))
    share = math.exp(-3 * 0.75)
    assert MEASURES["lk_lambda"](half).item() == pytest.approx(share * MEASURES["kl"](half).item() + (1 - share) * 0.25)


def test_overlap_is_one_when_equal_and_nothing_when_disjoint():
    assert scored([1.0, -2.0], [1.0, -2.0]).overlap.item() == pytest.approx(1.0)
    peaked = scored([40.0, -40.0], [-40.0, 40.0])
    assert peaked.overlap.item() == pytest.approx(0.0, abs=1e-6)
    assert MEASURES["lk_alpha"](peaked).item() == pytest.approx(-math.log(1e-5))


def test_mass_outside_the_draft_vocabulary_lowers_the_overlap():
    # The target gives half its mass to tokens that cannot be drafted: p = (1/2) q, so alpha is 1/2 however good q is.
    one = scored([0.0, 0.0], [0.0, 0.0])
    one.lse = torch.tensor([math.log(4.0)])
    assert one.overlap.item() == pytest.approx(0.5)


def test_slot_weights_by_hand():
    device = torch.device("cpu")
    assert SlotWeights("exponential", gamma=2.0).static(3, device).tolist() == pytest.approx(
        [1, math.exp(-0.5), math.exp(-1)]
    )
    assert SlotWeights("geometric", beta=0.5).static(3, device).tolist() == pytest.approx([1, 0.5, 0.25])
    # dpace: s = .5 c + .5 = (1, .5), P = (1, .5), w = (1.5, .5)
    weights = dpace(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]))
    assert weights.tolist() == [pytest.approx([1.5, 0.5])]
    masked = dpace(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]]))
    assert masked.tolist() == [pytest.approx([1.0, 0.0])]


def test_dpace_trusts_the_token_that_is_trained():
    """q = (3/4, 1/4), the target's best token 0, the data's token 1: D-PACE with the data's cross-entropy reads 1/4."""
    one = scored([math.log(3.0), 0.0], [1.0, 0.0])
    one.data = torch.tensor([1])
    assert Objective({"hard_ce": 1.0}).confidence(one).item() == pytest.approx(0.75)
    assert Objective({"data_ce": 1.0}).confidence(one).item() == pytest.approx(0.25)
    assert Objective({"own_base_data_ce": 1.0}).confidence(one).item() == pytest.approx(0.25)


def test_labels_of_a_drafters_own_are_not_met_by_the_targets_distribution(target):
    drafter = checks.build("kforcing", target, num_slots=2)
    assert list(Objective({"hard_ce": 1.0}).measures(drafter)) == ["hard_ce"]
    for term in ("kl", "data_ce"):
        with pytest.raises(ValueError, match=f"{term} would not read; objective terms: hard_ce"):
            Objective({"hard_ce": 1.0, term: 1.0}).measures(drafter)
    assert list(Objective({"kl": 1.0}).measures(checks.build("kforcing_conditional", target, num_slots=2))) == ["kl"]


@pytest.mark.parametrize(("num_slots", "gamma"), [(4, 4), (7, 4), (8, 4.5), (9, 5), (15, 7), (16, 7)])
def test_gamma_follows_the_number_of_slots(num_slots, gamma):
    for name in ("dflash", "domino"):
        weights = checks.own_objective(name).slot_weights.static(num_slots, torch.device("cpu"))
        assert float(weights[1]) == pytest.approx(math.exp(-1 / gamma))


@pytest.mark.parametrize("weights", [{"gamma": 0.0}, {"beta": -1.0}, {"alpha": 1.5}, {"gamma": math.nan}])
def test_numbers_of_slot_weights_are_checked(weights):
    with pytest.raises(ValueError, match="slot weights need gamma above 0"):
        Objective(weights=weights)
    with pytest.raises(ValueError, match="chunk must be at least 0, got -1"):
        Objective(chunk=-1)


@pytest.mark.parametrize("factor", [None, "much", math.nan])
def test_coefficients_are_numbers(factor):
    with pytest.raises(ValueError, match="coefficients must be finite numbers, got {'tv'"):
        Objective({"tv": factor})


def test_a_feature_loss_of_a_wider_head_is_refused(target):
    drafter = checks.build("domino", target)
    batch = checks.train_batch(target, drafter)
    with pytest.raises(ValueError, match="they are 49 and 32 wide"):
        slot_terms(drafter, drafter.slots(batch), batch, target.parts, Objective({"smooth_l1": 1.0}))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="hardce"):
        Objective({"hardce": 1.0})
    with pytest.raises(ValueError, match="none"):
        Objective({})
    with pytest.raises(ValueError, match="linear"):
        Objective(weights={"kind": "linear"})
    with pytest.raises(ValueError, match="gama"):
        Objective(weights={"gama": 1.0})


def test_at_most_five_own_frames_from_training_step_to_cross_entropy(target, monkeypatch):
    from training.module import DrafterModule
    from training.optimizers import OptimizerSettings

    drafter = checks.build("eagle3", target, 3)
    module = DrafterModule(drafter, target.parts, Objective({"hard_ce": 1.0}), OptimizerSettings(), 1)
    seen: list[list[str]] = []

    def spy(slots: Scored) -> torch.Tensor:
        stack = inspect.stack()
        rooms = {checks.ROOT / room for room in ("drafters", "checkpoints", "data", "eval", "training")}
        seen.append([frame.function for frame in stack if rooms & set(Path(frame.filename).parents)])
        return objectives.hard_ce(slots)

    monkeypatch.setitem(MEASURES, "hard_ce", spy)
    module.training_step(checks.train_batch(target, drafter), 0)
    # the measure itself is one more frame
    assert seen[0] == ["sums", "forward", "slot_terms", "training_step"]
