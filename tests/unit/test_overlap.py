"""Streams' clocks against the arithmetic of overlap."""

import pytest

from eval.overlap import PLANS, Task, Times, expected_period, round_period, run


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "times", [Times(1.0, 3.0, 0.5, 0.02), Times(2.0, 2.0, 6.0, 0.1), Times(4.0, 1.0, 0.25), Times(0.0, 5.0, 0.0)]
)
def test_simulated_periods_are_the_formulas(plan: str, times: Times) -> None:
    assert round_period(plan, times) == pytest.approx(expected_period(plan, times))


def test_periods_by_hand() -> None:
    times = Times(draft=1.0, verify=3.0, host=0.5, sync=0.02)
    assert round_period("sync", times) == pytest.approx(4.52)
    assert round_period("overlapped", times) == pytest.approx(4.0)
    assert round_period("halves", times) == pytest.approx(6.0)
    assert round_period("overlapped", Times(1.0, 3.0, 7.0)) == pytest.approx(7.0)


def test_streams_and_dependencies_by_hand() -> None:
    spans = run(
        [
            Task("a", "draft", 2.0),
            Task("b", "verify", 1.0),
            Task("c", "draft", 1.0, ("b",)),
            Task("d", "host", 1.0, ("c",)),
        ]
    )
    assert [(spans[n].start, spans[n].end) for n in "abcd"] == [(0, 2), (0, 1), (2, 3), (3, 4)]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="not issued before"):
        run([Task("a", "host", 1.0, ("b",))])
    with pytest.raises(ValueError, match="sync, overlapped, halves"):
        round_period("magic", Times(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="negative"):
        Times(-1.0, 1.0, 1.0)
