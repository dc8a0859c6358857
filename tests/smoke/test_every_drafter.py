"""The generic checks on every conf/drafter/*.yaml, and planted faults that each check must catch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.sampled_text import measure
from checkpoints.folder import load_drafter, save_drafter
from data.target import Target
from drafters.contract import Batch, Drafter, SlotBatch, TargetParts
from drafters.eagle3 import Eagle3
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from eval.decoder import DecodeSettings
from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective, plain_terms, slot_terms
from training.self_forcing import SelfForcing, SelfForcingSettings
from training.train import lasting

OBJECTIVE = Objective({"hard_ce": 1.0}, {"kind": "uniform"}, chunk=16)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(params=checks.DRAFTERS)
def drafter(request, target):
    torch.manual_seed(0)
    return checks.build(request.param, target)


def test_frontier(drafter, target):
    checks.frontier(drafter, checks.train_batch(target, drafter))


def test_draft_equals_train(drafter, target):
    checks.draft_equals_train(drafter, target)


def test_own_tokens_are_read(drafter, target):
    if not drafter.follows_drafts:
        settings = SelfForcingSettings(share=1.0, rejected=1.0)
        with pytest.raises(ValueError, match=r"self_forcing\.rejected must be 0"):
            SelfForcing(target, settings, lambda step: None).roll(drafter, checks.train_batch(target, drafter))
        return
    checks.own_tokens_are_read(drafter, target)


def test_packed_equals_alone(drafter, target):
    checks.packed_equals_alone(drafter, target)


def test_overfit_one(drafter, target):
    checks.overfit_one(drafter, target, OBJECTIVE)


def test_lossless_greedy(drafter, target):
    checks.lossless(drafter, target)


def sampled_p(drafter: Drafter, target: Target) -> float:
    """p value of 1500 sampled continuations of three tokens against the target's exact chances."""
    settings = DecodeSettings(2, 3, 1500, Sampling(6.0, top_k=6))  # so that cells reach the third token
    return measure(target, drafter, [5, 6, 7, 8], settings, 1500, 0).p


def test_lossless_sampled(drafter, target):
    assert sampled_p(checks.awake(drafter), target) > 1e-3


@pytest.mark.parametrize("name", ["dspark", "dflash2", "domino"])
def test_lossless_sampled_catches_the_q_of_before_the_correction(name, target, monkeypatch):
    torch.manual_seed(0)
    drafter = checks.awake(checks.build(name, target))
    if name == "domino":  # its correction begins at slot 2, which few rounds reach: make it large
        drafter.embed_proj[-1].weight.data *= 30
    propose = drafter.propose

    def uncorrected(state, num_slots, sampling, seeds):
        base = drafter.lm_head(drafter._slot_states(state, num_slots))
        return replace(propose(state, num_slots, sampling, seeds), probs=sampling.probs(base))

    monkeypatch.setattr(drafter, "propose", uncorrected)
    assert sampled_p(drafter, target) < 1e-4


def test_round_trip(drafter, target, tmp_path):
    checks.awake(drafter)
    save_drafter(tmp_path / "head", drafter, target_identity=target.identity)
    again = load_drafter(tmp_path / "head", target.parts)
    batch = checks.train_batch(target, drafter)
    assert again.settings() == drafter.settings()
    kept = lasting(drafter)  # every name of training_only is a setting
    assert kept.keys() <= drafter.settings().keys()
    slots = drafter.slots(batch)
    assert torch.equal(again.slots(batch).hidden, slots.hidden)
    states, prev = slots.hidden.flatten(0, 2), slots.prev_ids.flatten()
    assert torch.equal(again.logits(states, prev), drafter.logits(states, prev))


@torch.no_grad()
@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_reduced_vocabulary_drafts_only_inside_it(name, target):
    some = DraftVocabulary(torch.arange(1, 64, 3), 64)
    narrow = checks.build(name, target, vocabulary=some)
    checks.draft_equals_train(narrow, target)
    checks.lossless(narrow, target)
    state = narrow.begin(2, 16)
    narrow.start(state, torch.tensor([5, 6]))
    count, last = torch.tensor([3, 1]), torch.randn(2, 3, 32)
    aux = torch.randn(2, 3, len(narrow.needs.layers), 32)
    narrow.observe(state, torch.randint(4, 60, (2, 3)), aux, last, count)
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9)):
        proposal = narrow.propose(state, 4, sampling, torch.tensor([1, 2]))
        assert set(proposal.tokens.flatten().tolist()) <= set(some.ids.tolist())


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_trains_with_its_own_objective(name, target):
    """Two steps, because a part that starts at zero hides others from the first gradient."""
    drafter = checks.build(name, target)
    batch = checks.train_batch(target, drafter)
    batch.progress = 0.25  # inside every curriculum
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    checks.fit(drafter, target, batch, checks.own_objective(name), steps=2)
    still = [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])]
    assert not still, f"no gradient reached {still}"


def test_objective_equals_its_plain_form(drafter, target):
    batch = checks.train_batch(target, drafter)
    terms = dict.fromkeys(drafter.fitting_measures or ("soft_ce", "tv"), 0.5)
    objective = Objective(terms, {"kind": "geometric", "beta": 0.8}, chunk=8)
    fast = slot_terms(drafter, drafter.slots(batch), batch, target.parts, objective).loss
    assert fast.item() == pytest.approx(
        plain_terms(drafter, drafter.slots(batch), batch, target.parts, objective).item(), rel=1e-5
    )


# Planted faults: each check fails on a fault of its kind.


class SeesAnchorFeature(Eagle3):
    """Row of the anchor itself: one feature too many."""

    def slots(self, batch: Batch) -> SlotBatch:
        leaked = Batch(**{**batch.__dict__, "aux": torch.roll(batch.aux, -1, 1)})
        return super().slots(leaked)


class ForgetsItsState(Eagle3):
    """Slot 2 reads the features again instead of slot 1's output, in drafting only."""

    features: Tensor | None = None

    def propose(self, state, num_slots, sampling, seeds):
        self.features = state.fused[:, None]
        made = super().propose(state, num_slots, sampling, seeds)
        self.features = None
        return made

    def _recycle(self, output: Tensor) -> Tensor:
        return super()._recycle(output) if self.features is None else self.features


class LeaksDocuments(Eagle3):
    """Documents are not isolated."""

    def slots(self, batch: Batch) -> SlotBatch:
        return super().slots(Batch(**{**batch.__dict__, "documents": torch.zeros_like(batch.documents)}))


class UnshiftedLabel(Eagle3):
    """Learns the token before the one each slot predicts."""

    def slots(self, batch: Batch) -> SlotBatch:
        made = super().slots(batch)
        made.teacher = (made.teacher - 1).clamp_min(0)
        return made


class SwappedLayers(Eagle3):
    """Drafts with the captured layers in another order than it was trained on."""

    def observe(self, state, next_ids, aux, last, lengths):
        super().observe(state, next_ids, aux.flip(2), last, lengths)


def planted(kind: type[Eagle3], target) -> Eagle3:
    torch.manual_seed(0)
    parts: TargetParts = target.parts
    return kind(parts, None, num_slots=4, layers=[0, 2, 3]).eval()


def test_frontier_catches_a_leaked_feature(target):
    faulty = planted(SeesAnchorFeature, target)
    with pytest.raises(AssertionError, match="frontier"):
        checks.frontier(faulty, checks.train_batch(target, faulty))


def test_draft_equals_train_catches_a_lost_state(target):
    with pytest.raises(AssertionError, match="differ"):
        checks.draft_equals_train(planted(ForgetsItsState, target), target)


def test_draft_equals_train_catches_swapped_layers(target):
    with pytest.raises(AssertionError, match="differ"):
        checks.draft_equals_train(planted(SwappedLayers, target), target)


def test_packing_catches_leaking_documents(target):
    with pytest.raises(AssertionError, match="packed|leak"):
        checks.packed_equals_alone(planted(LeaksDocuments, target), target)


def test_overfit_catches_an_unshifted_label(target):
    with pytest.raises(AssertionError, match="overfitting"):
        checks.overfit_one(planted(UnshiftedLabel, target), target, OBJECTIVE)


def test_lossless_catches_a_target_that_believes_the_drafter(target, monkeypatch):
    import eval.decoder as decoder
    from eval.verification import verify_greedy

    def credulous(best: Tensor, tokens: Tensor):
        verdict = verify_greedy(torch.cat([tokens, best[:, -1:]], 1), tokens)
        return verdict

    faulty = planted(Eagle3, target)
    prompts = [[5, 6, 7, 8]]
    plain = decoder.generate(target, None, prompts, decoder.DecodeSettings(max_new_tokens=12))
    monkeypatch.setattr(decoder, "verify_greedy", credulous)
    drafted = decoder.generate(target, faulty, prompts, decoder.DecodeSettings(num_slots=4, max_new_tokens=12))
    assert plain[0].tokens != drafted[0].tokens
