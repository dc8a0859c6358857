"""What a report's page says of losslessness, and of slots that nobody tried."""

import math
from typing import Any

from matplotlib.figure import Figure

from eval.comparison import Comparison, Entry
from eval.plots import draw_plots, tried_alpha
from eval.sections import _verdict, alphas


def test_a_comparison_by_the_same_noise_is_named() -> None:
    found = {"greedy_identical": None, "noise_identical": 0.5, "failures": []}
    (line,) = _verdict(found)
    assert line == "Sampled output: 50% of answers are the target's own from the same noise, token by token."
    (other,) = _verdict(found | {"noise_identical": None})
    assert "was not compared" in other


SEVEN: dict[str, Any] = {"num_slots": 7, "domains": {}, "alpha": [0.5, 0.25, *[0.0] * 5], "trials": [8, 4, 1, *[0] * 4]}


def test_a_slot_that_nobody_tried_has_no_figure() -> None:
    assert alphas(SEVEN) == ["0.50", "0.25", "0.00", "-", "-", "-", "-"]
    assert list(draw_plots(SEVEN)) == ["alpha.png"]
    shown = tried_alpha(SEVEN)
    assert shown[:3] == [0.5, 0.25, 0.0]
    assert all(math.isnan(value) for value in shown[3:])


def test_a_server_that_tells_no_slots_leaves_its_picture_out() -> None:
    """Or tells of other slots than were asked for."""
    assert draw_plots(SEVEN | {"alpha": [], "trials": []}) == {}
    assert list(draw_plots(SEVEN | {"alpha": [0.5, 0.4, 0.3], "trials": [8, 4, 1]})) == ["alpha.png"]


def test_a_comparisons_picture_shows_tried_slots_alone() -> None:
    entry = Entry(overrides=[], drafter={}, trained={}, curve=[], replay=SEVEN)
    axes = Figure().add_subplot()
    Comparison({}, {"one": entry})._plot_alpha(axes)
    (line,) = axes.get_lines()
    assert [math.isnan(value) for value in line.get_ydata()] == [False] * 3 + [True] * 4
