"""What several ranks compute of a micro-step is what one rank computes of it: rows, anchors, noise, loss, gradient.

Ranks are played one after the other here; tests/smoke/test_ranks.py starts real ones.
"""

from dataclasses import replace

import pytest
import torch

from data.collate import Collate, Plan
from data.features import Sample
from data.module import Steps
from data.target import Target
from drafters.contract import Batch
from tests import checks
from tests.doubles import tiny_target
from training.objectives import slot_terms
from training.self_forcing import Rollout, SelfForcing, SelfForcingSettings, merged, with_drafts


class Texts:
    """Six conversations of unequal length, in rows of 24 tokens."""

    def __init__(self, target: Target, drafter) -> None:
        sizes = (20, 9, 12, 14, 8, 6)
        texts = [checks.random_text(target, n, n) for n in sizes]
        self.made = [checks.sample(target, drafter, t, [0] * 4 + [1] * (len(t) - 4), f"c{len(t)}") for t in texts]
        self.lengths, self.ids = list(sizes), [one.id for one in self.made]

    def samples(self, indices) -> list[Sample]:
        return [self.made[i] for i in indices]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def batches(source: Texts, ranks: int, anchors: int | None = None, step: int = 0) -> list[Batch]:
    """Every rank's batch of a micro-step of three rows."""
    plan = Plan(source.lengths, 24, 3, seed=0)
    assert len(plan.batch(step)) == 3
    return [Steps(source, plan, Collate(24, 1, anchors=anchors), 9, rank, ranks)[step] for rank in range(ranks)]


def gradients(
    drafter, batch: Batch, target: Target, objective
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    drafter.train().zero_grad()
    terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, objective)
    terms.loss.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in drafter.parameters()]
    return found, terms.loss.detach(), terms.denominator


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_sums_over_ranks_equal_one_rank(name, target):
    """Two ranks with two rows and one; five, of which two have none. Every drafter that draws while training draws by
    row number."""
    drafter, objective = checks.build(name, target, num_slots=3), checks.own_objective(name)
    source = Texts(target, drafter)
    anchors = drafter.anchors_per_row and 4
    (whole,) = batches(source, 1, anchors)
    wanted, loss, denominator = gradients(drafter, whole, target, objective)
    assert float(denominator) > 0
    for ranks in (2, 5):
        parts = [gradients(drafter, batch, target, objective) for batch in batches(source, ranks, anchors)]
        assert torch.allclose(sum(part[1] for part in parts), loss, rtol=1e-5)
        assert torch.allclose(sum(part[2] for part in parts), denominator, rtol=1e-6)
        for place, gradient in enumerate(wanted):
            summed = sum(part[0][place] for part in parts)
            scale = gradient.abs().max()
            assert (summed - gradient).abs().max() <= 1e-4 * scale + 1e-7, f"{ranks} ranks, parameter {place}"


def test_rows_and_anchors_do_not_depend_on_the_ranks(target):
    drafter = checks.build("dflash", target, num_slots=3)
    source = Texts(target, drafter)
    (whole,) = batches(source, 1, 4)
    assert int((whole.anchors >= 0).sum(1).max()) == 4
    for ranks in (2, 3):
        for rank, batch in enumerate(batches(source, ranks, 4)):
            assert torch.equal(batch.tokens, whole.tokens[rank::ranks])
            assert [a[a >= 0].tolist() for a in batch.anchors] == [
                a[a >= 0].tolist() for a in whole.anchors[rank::ranks]
            ]
    # The planted fault: a seed that counts ranks draws other anchors.
    moved = Collate(24, 1, anchors=4)([source.samples(row) for row in Plan(source.lengths, 24, 3, 0).batch(0)], seed=1)
    assert [a.tolist() for a in moved.anchors] != [a.tolist() for a in whole.anchors]


def test_a_rank_without_rows_counts_nothing(target):
    drafter = checks.build("eagle3", target, num_slots=3)
    empty = batches(Texts(target, drafter), 5)[4]
    assert empty.tokens.shape == (1, 24)
    assert not empty.turns.any()
    assert (empty.anchors == -1).all()
    forcing = SelfForcing(target, SelfForcingSettings(share=1.0), lambda step: empty)
    drafted = forcing(drafter, empty, 0)
    found, loss, denominator = gradients(drafter, drafted, target, checks.own_objective("eagle3"))
    assert (float(loss), float(denominator)) == (0.0, 0.0)
    assert all(not g.any() for g in found)


def test_rollouts_of_two_ranks_serve_one(target):
    """Drafted on two ranks, kept in a checkpoint, used on one: the batch that one rank would have made."""
    drafter = checks.build("eagle3", target, num_slots=3)
    source = Texts(target, drafter)
    settings = SelfForcingSettings(share=1.0, temperature=1.0, rejected=0.5)
    (whole,) = batches(source, 1)
    alone = with_drafts(whole, Rollout(1, *SelfForcing(target, settings, None).roll(drafter, whole)))
    parts = []
    for batch in batches(source, 2):
        rolled = SelfForcing(target, settings, None).roll(drafter, batch)
        parts.append(Rollout(1, *rolled, batch.row_numbers.tolist()).state_dict())
    joined = with_drafts(whole, Rollout.restore(merged(parts)))
    for row in range(3):
        real = alone.anchors[row] >= 0
        count = int(real.sum())
        assert joined.anchors[row][joined.anchors[row] >= 0].tolist() == alone.anchors[row][real].tolist()
        for name in ("tokens", "labels", "mask", "weights"):
            a, b = (getattr(one.drafted, name)[row][:count] for one in (alone, joined))
            assert torch.equal(a, b), name
    # And back: a rank of two takes its rows of the joined rollout, and one that has none is left out.
    second = batches(source, 2)[1]
    assert with_drafts(second, Rollout.restore(merged(parts))).anchors.tolist() == joined.anchors[1::2].tolist()
    stray = replace(second, first_row=7)
    assert (with_drafts(stray, Rollout.restore(merged(parts))).anchors == -1).all()
