"""Charts as SVG text. Colours are classes (s0 to s7), so that the page decides on them for light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from verl.tracking.scales import Point, inner_ticks, smooth, thin, tick_label, ticks

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 12, 34
# From here on a line is too noisy to follow, and its moving mean is drawn over it.
SMOOTH_FROM = 40
COLOURS = 8


@dataclass(frozen=True)
class Frame:
    """A plot's area: data ranges, and the ticks on both axes."""

    left: float
    right: float
    marks: list[float]

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / ((self.right - self.left) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, unit: str, lines: Mapping[str, Sequence[Point]], zero: bool = False) -> str:
    """A figure with one line a name. unit: label of the y axis. zero: the y axis begins at 0. "" without points."""
    lines = {name: thin(points) for name, points in lines.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    frame = Frame(min(xs), max(xs), ticks(min(0.0, *ys) if zero else min(ys), max(ys)))
    body = [_axes(frame, unit)]
    for i, points in enumerate(lines.values()):
        body.append(_curve(frame, points, i % COLOURS))
    return _figure(title, list(lines), body, _hover(frame, lines))


def bar_chart(title: str, unit: str, parts: Mapping[str, Mapping[float, float]], steps: Sequence[float]) -> str:
    """A figure with one bar a step, its parts stacked in order. parts: by name, the value at each step."""
    if not parts or not steps:
        return ""
    bins = [steps[i : i + max(1, -(-len(steps) // 80))] for i in range(0, len(steps), max(1, -(-len(steps) // 80)))]
    means = {
        name: [(group[-1], sum(values.get(s, 0.0) for s in group) / len(group)) for group in bins]
        for name, values in parts.items()
    }
    tops = [sum(points[i][1] for points in means.values()) for i in range(len(bins))]
    pitch = (bins[-1][-1] - bins[0][-1]) / max(len(bins) - 1, 1) or 1
    frame = Frame(bins[0][-1] - pitch / 2, bins[-1][-1] + pitch / 2, ticks(0, max(tops) or 1))
    width = (frame.x(pitch) - frame.x(0)) * 0.82
    body, floor = [_axes(frame, unit)], [0.0] * len(bins)
    for colour, points in enumerate(means.values()):
        for i, (step, value) in enumerate(points):
            if value > 0:
                y = frame.y(floor[i] + value)
                body.append(
                    f'<rect class="s{colour % COLOURS}" x="{frame.x(step) - width / 2:.1f}" y="{y:.1f}" '
                    f'width="{width:.1f}" height="{frame.y(floor[i]) - y:.1f}"/>'
                )
                floor[i] += value
    return _figure(title, list(means), body, _hover(frame, means))


def _axes(frame: Frame, unit: str) -> str:
    step, bottom = frame.marks[1] - frame.marks[0], HEIGHT - BOTTOM
    out = []
    for value in frame.marks:
        y = frame.y(value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick_label(value, step)}</text>')
    for value in inner_ticks(frame.left, frame.right):
        x = frame.x(value)
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{value:,}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    out.append(f'<text class="unit" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>')
    middle = (TOP + bottom) / 2
    out.append(
        f'<text class="unit" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{escape(unit)}</text>'
    )
    return "".join(out)


def _curve(frame: Frame, points: Sequence[Point], colour: int) -> str:
    if len(points) < SMOOTH_FROM:
        dots = "".join(
            f'<circle class="s{colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.4"/>' for x, y in points
        )
        return _path(frame, points, f"s{colour}") + dots
    averaged = smooth(points, max(5, len(points) // 20))
    return _path(frame, points, f"s{colour} raw") + _path(frame, averaged, f"s{colour}")


def _path(frame: Frame, points: Sequence[Point], kind: str) -> str:
    data = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{data}"/>'


def _hover(frame: Frame, lines: Mapping[str, Sequence[Point]]) -> str:
    """Numbers for the page's script: for each step its place and every line's value there."""
    places: dict[float, dict[str, float]] = {}
    for name, points in lines.items():
        for x, y in points:
            places.setdefault(x, {})[name] = y
    rows = [[x, round(frame.x(x), 1), values] for x, values in sorted(places.items())]
    return escape(json.dumps(rows), quote=True)


def _figure(title: str, names: Sequence[str], body: Sequence[str], hover: str) -> str:
    legend = "".join(f'<span><i class="s{i % COLOURS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return (
        f'<figure><figcaption><b>{escape(title)}</b><span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}" '
        f'data-rows="{hover}" data-top="{TOP}" data-bottom="{HEIGHT - BOTTOM}">{"".join(body)}</svg></figure>'
    )
