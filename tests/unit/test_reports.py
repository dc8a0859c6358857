"""What a report's page says of losslessness."""

from eval.sections import _verdict


def test_a_comparison_by_the_same_noise_is_named() -> None:
    found = {"greedy_identical": None, "noise_identical": 0.5, "failures": []}
    (line,) = _verdict(found)
    assert line == "Sampled output: 50% of answers are the target's own from the same noise, token by token."
    (other,) = _verdict(found | {"noise_identical": None})
    assert "was not compared" in other
