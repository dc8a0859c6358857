"""Lossy verification by hand, and that its strictest form is the target's own text."""

import math

import pytest
import torch

from data.target import Target
from drafters.eagle3 import Eagle3
from drafters.sampling import Sampling
from eval.decoder import DecodeSettings, generate
from eval.lossy import Lossy, agreement, log_probs, verify_lossy
from tests.doubles import START_ID, tiny_target

# Even between tokens 0 and 1, with 8 % on token 2 and 2 % on token 3.
P = torch.tensor([0.45, 0.45, 0.08, 0.02])
PROMPTS = [[START_ID, 9, 10], [START_ID, 11]]


def head(target: Target) -> Eagle3:
    drafter = Eagle3(target.parts, None, num_slots=3, layers=[0, 2, 4])
    drafter.warm_start(target.parts)
    return drafter


def test_rules_by_hand() -> None:
    # H = -(2 * 0.45 log 0.45 + 0.08 log 0.08 + 0.02 log 0.02) = 0.99894; exp(-H) = 0.36827, times 0.3 is 0.11048,
    # so epsilon = 0.09 rules: 0.08 falls, 0.45 stands. With delta = 0.2 the edge is 0.07365, and 0.08 stands.
    p, tokens = P.expand(4, 4), torch.arange(4)
    assert Lossy("typical").stands(p, tokens).tolist() == [True, True, False, False]
    assert Lossy("typical", delta=0.2).stands(p, tokens).tolist() == [True, True, True, False]
    assert Lossy("threshold", threshold=0.08).stands(p, tokens).tolist() == [True, True, True, False]
    certain = torch.tensor([[1.0, 0.0]])
    assert Lossy("typical").stands(certain, torch.tensor([1])).tolist() == [False]
    with pytest.raises(ValueError, match="one of typical, threshold, got 'loose'"):
        Lossy("loose")
    with pytest.raises(ValueError, match="epsilon of a lossy verification must be >= 0"):
        Lossy("typical", epsilon=-1)


def test_verdict_by_hand() -> None:
    """K = 3, greedy, argmax 0 everywhere: 1 stands by the rule, 0 is the target's own pick, 3 falls."""
    logits = torch.tensor([0.46, 0.44, 0.08, 0.02]).log().expand(1, 4, 4)
    verdict = verify_lossy(
        logits, torch.tensor([[1, 0, 3]]), Lossy("typical"), Sampling(), torch.tensor([0]), torch.tensor([5])
    )
    assert verdict.accepted.tolist() == [2]
    assert verdict.tokens.tolist() == [[1, 0, 0, -1]]
    strict = Lossy("threshold", threshold=2.0)
    verdict = verify_lossy(logits, torch.tensor([[0, 1, 0]]), strict, Sampling(), torch.tensor([0]), torch.tensor([5]))
    assert verdict.accepted.tolist() == [1]
    assert verdict.tokens.tolist() == [[0, 0, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_strictest_rule_gives_the_targets_own_text_and_a_loose_one_does_not(temperature: float) -> None:
    target = tiny_target()
    settings = {"num_slots": 3, "max_new_tokens": 12, "sampling": Sampling(temperature)}
    own = generate(target, None, PROMPTS, DecodeSettings(**settings))
    strict = DecodeSettings(**settings, lossy=Lossy("threshold", threshold=2.0))
    loose = DecodeSettings(**settings, lossy=Lossy("threshold", threshold=0.0))
    kept = generate(target, head(target), PROMPTS, strict)
    assert [one.tokens for one in kept] == [one.tokens for one in own]
    taken = generate(target, head(target), PROMPTS, loose)
    assert all(n == 3 for one in taken for n in one.verified)
    assert [one.tokens for one in taken] != [one.tokens for one in own]


def test_agreement_by_hand() -> None:
    target = tiny_target()
    text = torch.tensor([[START_ID, 9, 10, 5, 6]])
    logits = target.logits(target.forward(text, ()).last)[0].log_softmax(-1)
    by_hand = [float(logits[2, 5]), float(logits[3, 6])]
    assert log_probs(target, [START_ID, 9, 10], [5, 6]).tolist() == pytest.approx(by_hand, abs=1e-5)
    found = agreement(target, [[START_ID, 9, 10]] * 2, [[5, 6], [5, 6]], [[5, 6], [5]], greedy=True)
    assert found.same_answers == 0.5
    assert found.log_prob == pytest.approx(sum(by_hand) / 2, abs=1e-5)
    assert found.target_log_prob == pytest.approx((2 * by_hand[0] + by_hand[1]) / 3, abs=1e-5)
    assert agreement(target, [[START_ID]], [[5]], [[5]], greedy=False).same_answers is None
    assert math.isfinite(found.log_prob)
