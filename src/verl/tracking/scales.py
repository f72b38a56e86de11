"""Axes: where the ticks go and how they are written; and fewer points where there are too many to see."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Point = tuple[float, float]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]: the first at or below `low`, the last at or above `high`.

    >>> ticks(0.31, 0.64)
    [0.3, 0.4, 0.5, 0.6, 0.7]
    >>> ticks(0, 23, 4)
    [0.0, 10.0, 20.0, 30.0]
    """
    # A spread near the precision of floating point is none, nor is one that steps would divide to zero.
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(about - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded to the step's digits: 3 * 0.1 should read 0.3.
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def inner_ticks(low: float, high: float, about: int = 6) -> list[int]:
    """Round whole numbers inside [low, high], for steps."""
    if high - low < 1:
        return [round(low)]
    return sorted({round(t) for t in ticks(low, high, about) if low <= t <= high and t == round(t)})


def tick_label(value: float, step: float) -> str:
    """A tick as short as its neighbours allow.

    >>> [tick_label(v, s) for v, s in ((0.30000001, 0.1), (1500, 500), (2_000_000, 500_000), (2e-6, 1e-6), (0, 1e-6))]
    ['0.3', '1,500', '2M', '2e-6', '0']
    """
    if value == 0:
        return "0"
    if abs(step) < 1e-3:
        # At most 6 characters: the axis has no room for 0.00015, and e-05 says no more than e-5.
        return re.sub(r"\.?0*e-0*", "e-", f"{value:.1e}")
    if abs(step) >= 1e5:
        return f"{value / 1e6:.10g}M"
    digits = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    return f"{value:,.{digits}f}"


def thin(points: Sequence[Point], limit: int = 400) -> list[Point]:
    """At most `limit` points: means of neighbours, at the last of their steps. The last point stays at its step."""
    if len(points) <= limit:
        return list(points)
    width = math.ceil(len(points) / limit)
    bins = [points[i : i + width] for i in range(0, len(points), width)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in bins]


def smooth(points: Sequence[Point], span: int) -> list[Point]:
    """Mean of each point with its neighbours, `span` of them in all; fewer, and as many on both sides, near the ends.

    Centred, because a running average would draw the curve later than it happened.

    >>> smooth([(0, 1.0), (1, 3.0), (2, 8.0), (3, 4.0)], span=3)
    [(0, 1.0), (1, 4.0), (2, 5.0), (3, 4.0)]
    """
    reach, out = span // 2, []
    for i, (x, _) in enumerate(points):
        side = min(reach, i, len(points) - 1 - i)
        near = points[i - side : i + side + 1]
        out.append((x, sum(y for _, y in near) / len(near)))
    return out
