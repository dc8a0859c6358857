"""Calibration against values worked out by hand, and temperatures that were planted."""

import pytest
import torch

from eval.calibration import (
    Quality,
    Rounds,
    auc,
    brier,
    calibrate,
    calibrated,
    expected_calibration_error,
    fit_temperatures,
    load_calibrated,
    reliability,
    save_calibration,
)
from eval.decoder import Generation
from eval.estimator import Calibrated

GREEDY = {"temperature": 0.0, "top_k": None, "top_p": None}


def test_errors_by_hand() -> None:
    confidences = torch.tensor([0.10, 0.12, 0.90, 0.95])
    happened = torch.tensor([False, True, True, True])
    # 15 bins of 1/15: 0.10 and 0.12 share bin 1 (mean 0.11, half happened), 0.90 is in bin 13, 0.95 in bin 14.
    # 2/4 * |0.5 - 0.11| + 1/4 * |1 - 0.90| + 1/4 * |1 - 0.95|
    assert expected_calibration_error(confidences, happened) == pytest.approx(0.195 + 0.025 + 0.0125)
    # (0.01 + 0.7744 + 0.01 + 0.0025) / 4
    assert brier(confidences, happened) == pytest.approx(0.199225)
    assert expected_calibration_error(torch.tensor([1.0]), torch.tensor([True])) == 0.0
    assert expected_calibration_error(torch.zeros(0), torch.zeros(0)) == brier(torch.zeros(0), torch.zeros(0)) == 0.0
    with pytest.raises(ValueError, match=r"\[0, 1\], got 0.5..1.5"):
        expected_calibration_error(torch.tensor([0.5, 1.5]), torch.tensor([True, True]))


def test_auc_by_hand_with_ties() -> None:
    # Happened: 0.9, 0.5, 0.5; did not: 0.5, 0.2. Pairs: 0.9 wins twice; each 0.5 ties once (1/2) and wins once.
    confidences, happened = torch.tensor([0.5, 0.9, 0.5, 0.2, 0.5]), torch.tensor([1, 1, 0, 0, 1]).bool()
    assert auc(confidences, happened) == pytest.approx((2 + 1.5 + 1.5) / 6)
    assert auc(torch.full((4,), 0.3), torch.tensor([1, 0, 0, 1])) == pytest.approx(0.5)
    assert auc(torch.tensor([0.1, 0.9]), torch.tensor([True, False])) == 0.0
    assert auc(torch.tensor([0.1, 0.9]), torch.tensor([True, True])) is None
    assert auc(torch.zeros(0), torch.zeros(0)) is None


def test_reliability_by_hand() -> None:
    # Two bins: 0.1 and 0.4 below one half (mean 0.25, one of two happened), 0.5 and 1.0 above (mean 0.75, both did).
    confidences, happened = torch.tensor([0.5, 0.1, 1.0, 0.4]), torch.tensor([True, False, True, True])
    found = reliability(confidences, happened, bins=2)
    assert [list(one.values()) for one in found] == [pytest.approx([0.25, 0.5, 2]), pytest.approx([0.75, 1.0, 2])]
    # ECE is what the diagram says: 2/4 * |0.5 - 0.25| + 2/4 * |1 - 0.75|.
    assert expected_calibration_error(confidences, happened, bins=2) == pytest.approx(0.25)
    assert reliability(torch.zeros(0), torch.zeros(0)) == []


def test_quality_holds_all_of_them() -> None:
    found = Quality.of(Rounds(torch.tensor([[0.9], [0.3]]), torch.tensor([1, 0]), torch.ones(2), torch.arange(2)))
    assert (found.auc, found.rounds) == (1.0, 2)
    assert [one["count"] for one in found.reliability] == [1, 1]


def test_rounds_count_what_alpha_counts() -> None:
    """K = 3. First answer: a round keeps 1 of 3, a round keeps all. Second: the answer ends at slot 2, kept."""
    one = Generation(accepted=[1, 3], proposed=[3, 3], confidences=[[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    two = Generation(accepted=[2], proposed=[2], confidences=[[0.3, 0.2, 0.1]])
    rounds = Rounds.of([one, Generation(), two])
    assert rounds is not None
    assert rounds.answer.tolist() == [0, 0, 2]
    confidence, happened = rounds.conditional()
    assert confidence.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2])
    assert happened.tolist() == [True, False, True, True, True, True, True]
    product, whole = rounds.prefix(3)
    assert product.tolist() == pytest.approx([0.9 * 0.8 * 0.7, 0.6 * 0.5 * 0.4])
    assert whole.tolist() == [False, True]
    assert Rounds.of([Generation(accepted=[1], proposed=[1])]) is None


def planted(count: int, temperatures: list[float]) -> Rounds:
    """Rounds whose slots are accepted with chance sigmoid(logit / T_k) while they report sigmoid(logit)."""
    logits = 2.5 * torch.randn(count, len(temperatures), dtype=torch.float64) + 1
    chance = torch.sigmoid(logits / torch.tensor(temperatures, dtype=torch.float64))
    accepted = (torch.rand_like(chance) < chance).long().cumprod(1).sum(1)
    full = torch.full((count,), len(temperatures))
    return Rounds(torch.sigmoid(logits), accepted, full, torch.arange(count) // 10)


def test_planted_temperatures_are_recovered() -> None:
    rounds = planted(20000, [2.0, 0.5, 1.0])
    assert fit_temperatures(rounds) == pytest.approx([2.0, 0.5, 1.0], rel=0.2)
    found = calibrate(rounds)
    assert found.held_out
    assert found.before.rounds + calibrate(rounds.where(rounds.answer % 2 == 0)).before.rounds == 20000
    assert found.before.ece_prefix[0] > 0.05
    assert max(found.after.ece_prefix) < 0.03
    assert found.after.ece < found.before.ece
    assert found.after.brier < found.before.brier


def test_honest_confidences_stay() -> None:
    assert fit_temperatures(planted(20000, [1.0, 1.0])) == pytest.approx([1.0, 1.0], rel=0.2)


def test_few_rounds_move_no_temperature() -> None:
    """Honest confidences of 300 rounds, the last slots hardly ever reached: their best temperatures are noise."""
    torch.manual_seed(0)
    for _ in range(5):
        assert fit_temperatures(planted(300, [1.0] * 7)) == [1.0] * 7


def test_a_lone_answer_serves_both_and_an_unproposed_slot_stays_at_one() -> None:
    kept = torch.tensor([1, 0, 1, 1]).repeat(100)
    rounds = Rounds(torch.full((400, 2), 0.9), kept, torch.ones_like(kept), torch.zeros_like(kept))
    found = calibrate(rounds)
    assert not found.held_out
    assert found.before.rounds == 400
    assert found.temperatures[1] == 1.0
    # 300 of 400 happened: sigmoid(logit(0.9) / 2) is 0.75, since logit(0.9) = 2 log 3.
    assert found.temperatures[0] == pytest.approx(2.0, rel=0.03)
    assert calibrated(torch.tensor([[0.9, 0.5]]), [2.0, 3.0])[0].tolist() == pytest.approx([0.75, 0.5])
    with pytest.raises(ValueError, match="2 slots need as many temperatures, got 1"):
        calibrated(torch.tensor([[0.9, 0.5]]), [2.0])


def test_saved_by_sampling(tmp_path) -> None:
    rounds = planted(4000, [2.0, 2.0])
    found, sampled = calibrate(rounds), GREEDY | {"temperature": 1.0}
    save_calibration(tmp_path, found, GREEDY)
    save_calibration(tmp_path, calibrate(planted(4000, [1.0, 1.0])), sampled)
    save_calibration(tmp_path, found, GREEDY)
    assert load_calibrated(tmp_path, GREEDY) == Calibrated(found.temperatures)
    other = load_calibrated(tmp_path, sampled)
    assert other is not None
    assert other.temperatures != found.temperatures
    assert load_calibrated(tmp_path, GREEDY | {"temperature": 0.7}) is None
