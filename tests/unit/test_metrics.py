"""Metrics against values worked out by hand, and the proof of near ties."""

import math

import pytest
import torch

from data.target import Target
from eval import lossless
from eval.decoder import Generation
from eval.lossless import Difference, compare, first_difference, float32_weights, rounding_bound
from eval.metrics import Work, acceptance, speed
from tests.doubles import START_ID, tiny_model, tiny_target, tiny_tokenizer

# K = 3. First request: rounds accept 3, 0, 2. Second: accepts 1, then all three, but the end of turn stands at slot 2.
ONE = Generation([1] * 9, emitted=[4, 1, 3], accepted=[3, 0, 2], proposed=[3, 3, 3], verified=[3, 0, 2])
TWO = Generation([1] * 5, emitted=[2, 2], accepted=[1, 2], proposed=[3, 2], verified=[1, 3], stopped=True)


def margin(target: Target, text: list[int], pair: tuple[int, int]) -> tuple[float, float]:
    """(gap, bound) of two tokens after a text, in float32."""
    dtype = target.dtype
    with lossless.float32_weights(target):
        return lossless.margin(target, text, pair, dtype)


def test_acceptance_by_hand() -> None:
    found = acceptance([ONE, TWO], 3)
    assert found.tau == pytest.approx(12 / 5)
    assert found.accepted == pytest.approx(7 / 5)
    assert found.tau_verified == pytest.approx(1 + 9 / 5)
    # Slot 1: accepted in 4 of 5 rounds. Slot 2: 3 of the 4 that kept slot 1. Slot 3: the first and third round kept 1,
    # 2 and proposed 3; only the first kept it.
    assert found.trials == [5, 4, 2]
    assert found.alpha == pytest.approx([4 / 5, 3 / 4, 1 / 2])
    assert found.survival == pytest.approx([4 / 5, 3 / 5, 1 / 4])
    assert found.rounds == 5
    assert found.tokens == 14
    assert [acceptance([one], 3).tau for one in (ONE, TWO)] == pytest.approx([8 / 3, 4 / 2])


def test_acceptance_without_rounds() -> None:
    found = acceptance([Generation([1])], 2)
    assert (found.tau, found.tau_verified, found.alpha, found.trials) == (0.0, 0.0, [0.0, 0.0], [0, 0])
    assert found.accepted == 0.0


def test_speed_by_hand() -> None:
    drafted = Work(101, 50, {"prefill": 1.0, "draft": 2.0, "verify": 6.0, "rest": 1.0})
    plain = Work(101, 100, {"prefill": 1.0, "draft": 0.0, "verify": 8.5, "rest": 0.5})
    found = speed(drafted, plain)
    assert found.tokens_per_s == pytest.approx(10.1)
    assert found.baseline_tokens_per_s == pytest.approx(10.1)
    assert found.speedup == pytest.approx(1.0)
    # 9 s / 50 rounds against 9 s / 100 rounds: tau must reach 2.
    assert found.break_even_tau == pytest.approx(2.0)
    assert found.split == pytest.approx({"prefill": 0.1, "draft": 0.2, "verify": 0.6, "rest": 0.1})
    assert speed(drafted, None).speedup is None
    assert (drafted + plain).tokens == 202
    assert (drafted + plain).seconds["verify"] == pytest.approx(14.5)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_rounding_bound_by_hand() -> None:
    # bf16 keeps 7 bits: between 16 and 32 a unit in the last place is 2 ** (4 - 7) = 0.125.
    assert rounding_bound(20.0, torch.bfloat16) == 0.25
    assert rounding_bound(-3.0, torch.float16) == 2 * 2.0 ** (1 - 10)
    assert rounding_bound(20.0, torch.float32) == 1e-3


def test_identical_answers_give_no_difference() -> None:
    assert compare(tiny_target(), ["a"], [[START_ID]], [[5, 6]], [[5, 6]]) == []


def test_a_changed_token_is_no_near_tie_and_a_tie_is() -> None:
    target = tiny_target()
    prompt = [START_ID, 9, 10]
    logits = target.logits(target.forward(torch.tensor([prompt]), ()).last)[0, -1]
    best, second = logits.topk(2).indices.tolist()
    (found,) = compare(target, ["a"], [prompt], [[best, 1]], [[second, 1]])
    assert (found.prompt, found.position, found.baseline, found.drafted) == ("a", 0, best, second)
    assert found.gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert found.gap > 1e-2
    assert not found.near_tie
    # Make the two tokens' rows equal: now they tie, and only they.
    head = target.parts.head
    with torch.no_grad():
        head[second] = head[best]
    target = Target(target.model, target.tokenizer, name="tied")
    gap, bound = margin(target, prompt, (best, second))
    assert gap <= bound
    third = int(target.logits(target.forward(torch.tensor([prompt]), ()).last)[0, -1].argmin())
    assert margin(target, prompt, (best, third))[0] > 1.0


def test_weights_become_float32_once_for_all_that_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large target takes seconds a time; the bound stays that of the dtype it runs in."""
    target, entered = Target(tiny_model().to(torch.bfloat16), tiny_tokenizer(), name="tiny"), list[int]()
    held = lossless.float32_weights
    monkeypatch.setattr(lossless, "float32_weights", lambda given: entered.append(1) or held(given))
    same = ["a", "b"], [[START_ID]] * 2, [[5, 6], [5, 7]]
    assert compare(target, *same, [[5, 6], [5, 7]]) == []
    assert entered == []
    assert compare(target, *same, [[5, 8], [9, 7]]) == [
        Difference("a", 1, 6, 8, *margin(target, [START_ID, 5], (6, 8))),
        Difference("b", 0, 5, 9, *margin(target, [START_ID], (5, 9))),
    ]
    assert len(entered) == 3, "once for both, and once for each margin asked here"
    assert target.dtype == torch.bfloat16


def test_an_answer_that_ends_early_is_a_failure() -> None:
    (found,) = compare(tiny_target(), ["a"], [[START_ID]], [[5, 6]], [[5]])
    assert (found.position, found.baseline, found.drafted) == (1, 6, None)
    assert math.isinf(found.gap)
    assert not found.near_tie
    assert Difference("a", 0, 1, 2, 0.1, 0.25).near_tie


def test_float32_weights_are_put_back_to_the_bit() -> None:
    model = tiny_model().to(torch.bfloat16)
    target = Target(model, tiny_tokenizer(), name="tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.tensor([[START_ID, 9, 10, 11]])
    with torch.no_grad():
        rounded = target.forward(tokens, ()).last
        with float32_weights(target):
            exact = target.forward(tokens, ()).last
        again = target.forward(tokens, ()).last
    assert exact.dtype == torch.float32
    assert not torch.equal(exact, rounded.float())
    assert torch.equal(again, rounded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
