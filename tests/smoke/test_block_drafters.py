"""Block drafters at both slot conventions, at the depths of the papers, and with planted faults."""

import pytest
import torch

from data.target import Target
from drafters.dflash import DFlash
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from eval.decoder import DecodeSettings, generate
from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective

CONVENTIONS = ("fill_in", "anchor_first")
BLOCKS = [
    name
    for name in checks.DRAFTERS
    if "slot_convention" in checks.compose_config("train", f"drafter={name}", "prepared=x").drafter.model
]
HARD = Objective({"hard_ce": 1.0})


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def build(name: str, target: Target, convention: str, num_slots: int = 4, **model):
    torch.manual_seed(0)
    return checks.build(name, target, num_slots, slot_convention=convention, **model)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_checks_at_both_conventions(name, convention, target):
    drafter = build(name, target, convention)
    checks.frontier(drafter, checks.train_batch(target, drafter), anchors=2)
    checks.draft_equals_train(drafter, target)
    checks.packed_equals_alone(drafter, target)
    checks.lossless(drafter, target)


@pytest.mark.parametrize("windowed", [[0, 1], [1]])
def test_checks_with_sliding_layers(windowed, target):
    drafter = build("dflash", target, "fill_in", block={"depth": 2, "window": 5, "windowed": windowed})
    checks.frontier(drafter, checks.train_batch(target, drafter), anchors=2)
    checks.draft_equals_train(drafter, target)
    checks.packed_equals_alone(drafter, target)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_overfit_one_at_seven_slots(name, convention, target):
    drafter = build(name, target, convention, 7)
    checks.overfit_one(drafter, target, HARD, steps=120)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_overfit_one_at_fifteen_slots(convention, target):
    checks.overfit_one(build("dflash", target, convention, 15), target, HARD, steps=120)


@pytest.mark.parametrize("name", BLOCKS)
def test_sampled_proposals_come_from_the_q_they_hand_over(name, target):
    """20,000 requests with seeds of their own: slot 1's tokens follow probs (chi-square, 63 degrees of freedom)."""
    drafter = build(name, target, "anchor_first", 2, vocabulary=DraftVocabulary.full(64))
    requests = 20000
    state = drafter.begin(requests, 8)
    one = torch.randn(1, 3, 3, 32, generator=torch.Generator().manual_seed(2))
    aux, last = one.expand(requests, -1, -1, -1), torch.zeros(requests, 3, 32)
    ids = torch.tensor([[5, 9, 11]]).expand(requests, -1)
    with torch.no_grad():
        drafter.observe(state, ids, aux, last, torch.full((requests,), 3))
        made = drafter.propose(state, 2, Sampling(temperature=1.5), torch.arange(requests))
    assert made.probs is not None
    expected = made.probs[0, 0].double() * requests
    seen = torch.bincount(made.tokens[:, 0], minlength=64).double()
    assert torch.equal(seen > 0, (seen > 0) & (expected > 0)), "a token of probability zero was drawn"
    kept = expected > 5
    statistic = float(((seen - expected) ** 2 / expected.clamp_min(1e-9))[kept].sum())
    freedom = int(kept.sum())
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5 + 5
    # Slot 2 depends on what slot 1 drew, and each request's q is its own: probabilities of drawn tokens are positive.
    assert (made.probs.gather(-1, made.tokens[..., None]) > 0).all()


# Planted faults.


class DraftsOtherConvention(DFlash):
    """Trained on one slot convention, drafts with the other."""

    def propose(self, state, num_slots, sampling, seeds):
        honest = self.slot_convention
        self.slot_convention = "anchor_first" if honest == "fill_in" else "fill_in"
        made = super().propose(state, num_slots, sampling, seeds)
        self.slot_convention = honest
        return made


class SeesAnchorFeature(DFlash):
    """The context reaches one position too far: the anchor's own feature, which is not there when drafting."""

    def slots(self, batch):
        return super().slots(type(batch)(**{**batch.__dict__, "aux": batch.aux.roll(-1, 1)}))


class DraftsOtherMask(DFlash):
    """Drafts with another mask token than it was trained with."""

    def propose(self, state, num_slots, sampling, seeds):
        honest, self.mask_token = self.mask_token, 4
        made = super().propose(state, num_slots, sampling, seeds)
        self.mask_token = honest
        return made


def planted(kind: type[DFlash], target: Target, convention: str) -> DFlash:
    torch.manual_seed(0)
    return kind(target.parts, None, num_slots=4, layers=[0, 2, 3], slot_convention=convention).eval()


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("kind", [DraftsOtherConvention, SeesAnchorFeature, DraftsOtherMask])
def test_draft_equals_train_catches(kind, convention, target):
    with pytest.raises(AssertionError, match="drafting and training differ"):
        checks.draft_equals_train(planted(kind, target, convention), target)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "dflash"])
def test_checks_catch_a_correction_that_reads_the_anchor_in_every_slot(name, target, monkeypatch):
    drafter = build(name, target, "anchor_first")
    step, logits, walk = drafter.step, drafter.logits, drafter._walk

    def stale(hidden, anchor, *rest):
        with monkeypatch.context() as patched:
            patched.setattr(drafter, "step", lambda states, prev_ids, carry: step(states, anchor, carry))
            patched.setattr(drafter, "logits", lambda states, prev_ids: logits(states, anchor))
            return walk(hidden, anchor, *rest)

    monkeypatch.setattr(drafter, "_walk", stale)
    with pytest.raises(AssertionError, match="drafting and training differ"):
        checks.draft_equals_train(drafter, target)
    with pytest.raises(AssertionError, match="slots over drafted tokens and drafting differ"):
        checks.own_tokens_are_read(drafter, target)


def test_frontier_catches_an_anchor_leak(target):
    faulty = planted(SeesAnchorFeature, target, "fill_in")
    with pytest.raises(AssertionError, match="frontier"):
        checks.frontier(faulty, checks.train_batch(target, faulty))


def test_confidences_are_handed_over(target):
    drafter = build("dspark", target, "anchor_first")
    made = generate(target, drafter, [[5, 6, 7]], DecodeSettings(num_slots=4, max_new_tokens=8))
    assert len(made[0].tokens) == 8
    state = drafter.begin(1, 8)
    drafter.observe(state, torch.tensor([[5]]), torch.randn(1, 1, 3, 32), torch.zeros(1, 1, 32), torch.tensor([1]))
    sure = drafter.propose(state, 4, Sampling(), torch.tensor([0])).confidences
    assert sure is not None
    assert sure.shape == (1, 4)
    assert ((sure > 0) & (sure < 1)).all()
