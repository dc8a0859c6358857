"""Training from top-k tokens: equal to the whole teacher where k is the vocabulary, bounded below that, and refused
where a hidden state is needed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.convert import convert
from data.features import capture
from data.layout import StoreSettings
from data.target import Target
from drafters.contract import Batch, Drafter
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import tiny_target
from tests.unit.test_layout import conversations
from training.objectives import FLOOR, MEASURES, WHOLE_TEACHER, Objective, slot_terms, top_logits
from training.teacher import check_store

WORKING = [name for name in MEASURES if name not in WHOLE_TEACHER]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return checks.build("eagle3", target, 3, DraftVocabulary(torch.arange(0, 64, 2), 64))


def topped(target: Target, batch: Batch, count: int) -> Batch:
    """The batch with the target's most likely tokens in place of its last hidden state."""
    values, ids = target.parts.logits(batch.last).float().topk(count, -1)
    return replace(batch, last=batch.last[..., :0], top_ids=ids, top_logp=values - batch.lse[..., None])


def test_top_logits_by_hand() -> None:
    """Draft ids 2 and none at one position, lse 1: logits 1 - 0.5 at 2, the floor elsewhere."""
    found = top_logits(torch.tensor([[2, -1]]), torch.tensor([[-0.5, -1.0]]), torch.tensor([1.0]), 3)
    assert found.tolist() == [[FLOOR, FLOOR, 0.5]]
    assert found.softmax(-1).tolist() == [[0.0, 0.0, 1.0]]
    assert float((found - 1.0).exp()[0, 2]) == pytest.approx(0.6065307)


@pytest.mark.parametrize("name", WORKING)
def test_all_tokens_are_the_whole_teacher(target: Target, drafter: Drafter, name: str) -> None:
    batch = checks.train_batch(target, drafter)
    objective, slots = Objective({name: 1.0}, chunk=5), drafter.slots(batch)
    whole = slot_terms(drafter, slots, batch, target.parts, objective).loss
    kept = slot_terms(drafter, slots, topped(target, batch, 64), target.parts, objective).loss
    assert torch.isfinite(kept)
    torch.testing.assert_close(kept, whole, rtol=1e-4, atol=1e-4)


def test_overlap_misses_at_most_the_mass_left_out(target: Target, drafter: Drafter) -> None:
    batch = checks.train_batch(target, drafter)
    slots, objective = drafter.slots(batch), Objective({"tv": 1.0})
    whole = slot_terms(drafter, slots, batch, target.parts, objective)
    few = topped(target, batch, 8)
    kept = slot_terms(drafter, slots, few, target.parts, objective)
    assert few.top_logp is not None
    left_out = 1 - few.top_logp.exp().sum(-1)
    missing = (whole.overlap - kept.overlap).sum()
    assert 0 <= float(missing) <= float(left_out.max()) * float(whole.supervised.sum())
    assert float(missing) > 0


def test_a_drafter_or_objective_that_needs_more_is_refused(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    plain = capture(target, conversations(), (0, 2, 3), tmp_path / "plain")
    tops = convert(target, plain.folder, tmp_path / "tops", StoreSettings("int8", topk=4))
    answers = convert(target, plain.folder, tmp_path / "answers", StoreSettings(teacher_at="answers"))
    soft = Objective()
    assert check_store(tops, None, drafter, soft, False) == "layers int8:32, top 4 of the target"
    assert check_store(tops, "int8", drafter, soft, False)
    assert check_store(answers, "bfloat16", drafter, soft, True)
    with pytest.raises(ValueError, match="holds layers as bfloat16, batch.precision asks for int8"):
        check_store(plain, "int8", drafter, soft, False)
    for name in WHOLE_TEACHER:
        with pytest.raises(ValueError, match=rf"{name} need the target's last hidden state, .* its 4 most likely"):
            check_store(tops, None, drafter, Objective({name: 1.0}), False)
    with pytest.raises(ValueError, match="self-forcing needs the last hidden state"):
        check_store(tops, None, drafter, soft, True)
    medusa, pushed = checks.build("medusa", target, 3), checks.build("kforcing", target, 3)
    for reader in (medusa, pushed):
        with pytest.raises(ValueError, match="reads the target's last hidden state, .* 4 most likely tokens"):
            check_store(tops, None, reader, soft, False)
    with pytest.raises(ValueError, match="reads the last hidden state of every token, .* in answers only"):
        check_store(answers, None, medusa, soft, False)
    assert check_store(answers, None, pushed, soft, False)
