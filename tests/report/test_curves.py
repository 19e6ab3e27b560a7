"""Axes of the curves: round ticks within their range, whatever the range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyprec.colors import css_name
from anyprec.report.curves import chart, round_ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (20.3, 93.1, [30, 40, 50, 60, 70, 80, 90]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0.31, 2.4, [0.5, 1.0, 1.5, 2.0]),
        (91.17, 91.62, [91.2, 91.3, 91.4, 91.5, 91.6]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert round_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(0, 1000), st.floats(0.01, 1000))
def test_ticks_are_few_and_within_the_range(low, length):
    ticks = round_ticks(low, low + length)
    assert 3 <= len(ticks) <= 9
    assert low - 1e-6 <= ticks[0] and ticks[-1] <= low + length + 1e-6


def test_epochs_are_whole_numbers():
    assert round_ticks(1, 3, whole=True) == [1, 2, 3]
    assert round_ticks(1, 200, whole=True) == [50, 100, 150, 200]


def test_an_accuracy_axis_ends_at_100():
    drawn = chart({"1": [(1, 60.0), (2, 99.0)], "32": [(1, 70.0), (2, 99.9)]}, "accuracy, %")
    assert ">100</text>" in drawn and ">110</text>" not in drawn
    assert css_name(1) in drawn and css_name(32) in drawn  # colors of the page, light and dark
