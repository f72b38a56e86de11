"""Ticks that are round, cover the data, and fit on the axis."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking.scales import inner_ticks, smooth, thin, tick_label, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.31, 0.64, [0.3, 0.4, 0.5, 0.6, 0.7]),
        (0, 1, [0.0, 0.5, 1.0]),
        (0, 23, [0.0, 10.0, 20.0, 30.0]),
        (-3, 4, [-4.0, -2.0, 0.0, 2.0, 4.0]),
        (1e-6, 3e-6, [1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6]),
    ],
)
def test_ticks(low, high, expected):
    assert ticks(low, high, 5 if high != 23 else 4) == pytest.approx(expected, rel=1e-12)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_cover_the_data(low, spread):
    high = low + spread
    marks = ticks(low, high)
    slack = 1e-6 * (marks[1] - marks[0])
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack
    assert 2 <= len(marks) <= 12
    assert all(b > a for a, b in pairwise(marks))


def test_a_spread_too_small_to_divide_is_none():
    assert ticks(0.0, 5e-324) == ticks(0.0, 0.0)


@pytest.mark.parametrize("value", [0.0, 5.0, -0.2, 1e-7])
def test_a_flat_curve_still_has_an_axis(value):
    marks = ticks(value, value)
    assert marks[0] < value < marks[-1]


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.30000001, 0.1, "0.3"),
        (1500, 500, "1,500"),
        (2_000_000, 500_000, "2M"),
        (1_500_000, 500_000, "1.5M"),
        (1.5e-4, 5e-5, "1.5e-4"),
        (2e-6, 1e-6, "2e-6"),
        (-1e-10, 1e-10, "-1e-10"),
        (0, 1e-6, "0"),
        (0.25, 0.05, "0.25"),
    ],
)
def test_tick_labels(value, step, text):
    assert tick_label(value, step) == text


def test_step_ticks_are_whole_and_inside():
    assert inner_ticks(0, 24) == [0, 5, 10, 15, 20]
    assert inner_ticks(1, 3) == [1, 2, 3]
    assert inner_ticks(7, 7) == [7]


def test_thin_keeps_the_mean_and_the_last_step():
    assert thin([(i, float(i)) for i in range(10)], limit=4) == [(2, 1.0), (5, 4.0), (8, 7.0), (9, 9.0)]
    assert thin([(0, 1.0)], limit=4) == [(0, 1.0)]


def test_smooth_is_centred():
    assert smooth([(0, 1.0), (1, 3.0), (2, 8.0), (3, 4.0)], span=3) == [(0, 1.0), (1, 4.0), (2, 5.0), (3, 4.0)]
    straight = [(i, 2.0 * i) for i in range(20)]
    assert all(math.isclose(a[1], b[1]) for a, b in zip(smooth(straight, 7), straight, strict=True)), "no lag"
