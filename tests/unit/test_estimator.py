"""The estimator of heads without confidences: planted values come back, and only verified slots count."""

import math
from dataclasses import replace

import pytest
import torch

from drafters.contract import Proposal
from drafters.sampling import Sampling
from eval.calibration import Rounds, attach_estimator, calibrate, load_calibrated, save_calibration
from eval.drafted import draft
from eval.estimator import BIAS, WEIGHT, Calibrated, Estimator, fit_estimator

GREEDY = {"temperature": 0.0, "top_k": None, "top_p": None}


def planted(count: int, weight: float, biases: list[float]) -> Rounds:
    """Rounds that are accepted as sigmoid(weight * logit(q_max) + b_k) says, confidences being q_max."""
    peaks = torch.sigmoid(2 * torch.randn(count, len(biases), dtype=torch.float64))
    chance = Estimator(weight, biases)(peaks)
    accepted = (torch.rand_like(chance) < chance).long().cumprod(1).sum(1)
    return Rounds(peaks, accepted, torch.full((count,), len(biases)), torch.arange(count) // 10)


def test_by_hand() -> None:
    # logit(0.8) = log 4: sigmoid(0.5 * log 4) = 2 / 3; with bias log 2: 4 / 5.
    found = Estimator(0.5, [0.0, math.log(2)])
    assert found(torch.tensor([[0.8, 0.8]])).tolist() == [pytest.approx([2 / 3, 4 / 5])]
    assert found(torch.tensor([0.8])).tolist() == pytest.approx([2 / 3])
    with pytest.raises(ValueError, match="fitted for 2 slots, got 3"):
        found(torch.zeros(3))


def test_planted_values_are_recovered() -> None:
    rounds = planted(20000, 0.9, [0.6, -0.4, 0.1])
    found = fit_estimator(rounds.confidences, rounds.accepted, rounds.proposed)
    assert found.weight == pytest.approx(0.9, abs=0.05)
    assert found.biases == pytest.approx([0.6, -0.4, 0.1], abs=0.1)


def test_slots_behind_the_first_rejection_and_unproposed_ones_do_not_count() -> None:
    """Slot 2 follows a rejection in every round but two, where it is accepted once; slot 3 was never proposed."""
    peaks = torch.full((6, 3), 0.5)  # logit 0: only the biases matter
    accepted, proposed = torch.tensor([0, 0, 0, 0, 1, 2]), torch.full((6,), 2)
    found = fit_estimator(peaks, accepted, proposed)
    # Slot 1 was accepted 2 times of 6, slot 2 once of 2; the pull moves both a little towards the start.
    assert found.biases[0] == pytest.approx(math.log(2 / 4), abs=0.05)
    assert found.biases[1] == pytest.approx(0.0, abs=0.05)
    assert (found.weight, found.biases[2]) == pytest.approx((WEIGHT, BIAS))
    changed = peaks.clone()
    changed[:4, 1:], changed[:, 2] = 0.99, 0.01
    assert fit_estimator(changed, accepted, proposed).biases == pytest.approx(found.biases)


def test_everything_accepted_stays_finite() -> None:
    found = fit_estimator(torch.full((1000, 1), 0.9), torch.ones(1000).long(), torch.ones(1000).long())
    assert math.isfinite(found.weight)
    assert 0.95 < float(found(torch.tensor([0.9]))) < 1


def test_calibration_fits_it_first_and_keeps_it_beside_the_head(tmp_path) -> None:
    rounds = planted(8000, 0.5, [1.0, 0.5])
    found = calibrate(rounds, estimate=True)
    assert found.estimator is not None
    assert found.after.ece < 0.03 < found.before.ece
    assert found.temperatures == pytest.approx([1.0, 1.0], rel=0.25)
    save_calibration(tmp_path, found, GREEDY)
    assert load_calibrated(tmp_path, GREEDY) == Calibrated(found.temperatures, found.estimator)
    drafter = torch.nn.Module()
    assert attach_estimator(drafter, tmp_path, GREEDY)
    assert drafter.estimator == Calibrated(found.temperatures, found.estimator)
    assert not attach_estimator(torch.nn.Module(), tmp_path, GREEDY | {"temperature": 1.0})
    assert not attach_estimator(torch.nn.Module(), tmp_path / "none", GREEDY)
    save_calibration(tmp_path, own := calibrate(rounds), GREEDY)
    assert load_calibrated(tmp_path, GREEDY) == Calibrated(own.temperatures)


class Sure(torch.nn.Module):
    """A head that gives confidences of its own."""

    def __init__(self, estimator: Calibrated | None) -> None:
        super().__init__()
        self.estimator = estimator

    def propose(self, state: None, num_slots: int, sampling: Sampling, seeds: torch.Tensor) -> Proposal:
        return Proposal(torch.zeros(1, 3).long(), None, torch.tensor([[0.9, 0.9, 0.9]]))


def test_temperatures_reach_a_head_with_confidences(tmp_path) -> None:
    """logit(0.9) = 2 log 3: sigmoid of its half is 0.75, of its double 81 / 82. The third slot was not calibrated."""
    rounds = planted(100, 0.5, [1.0, 0.5])
    save_calibration(tmp_path, replace(calibrate(rounds), temperatures=[2.0, 0.5]), GREEDY)
    head = Sure(None)
    assert attach_estimator(head, tmp_path, GREEDY)  # type: ignore[arg-type]
    seeds = torch.zeros(1).long()
    found = draft(head, None, 3, Sampling(), seeds).confidences  # type: ignore[arg-type]
    assert found is not None
    assert found[0].tolist() == pytest.approx([0.75, 81 / 82, 0.9])
    raw = draft(Sure(None), None, 3, Sampling(), seeds).confidences  # type: ignore[arg-type]
    assert raw is not None
    assert raw[0].tolist() == pytest.approx([0.9] * 3)


def test_an_estimate_is_made_honest_too() -> None:
    """w = 1, b = 0 gives q_max itself; then the temperature."""
    found = Calibrated([2.0], Estimator(1.0, [0.0]))(torch.tensor([[0.9]]))
    assert found.tolist() == [[pytest.approx(0.75)]]
    with pytest.raises(ValueError, match="q_max says nothing"):
        Calibrated([2.0])(torch.tensor([[0.9]]))
