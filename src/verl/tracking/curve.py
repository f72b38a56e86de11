"""The learning curve in a terminal, drawn with braille dots (or plain ASCII where those cannot be written)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from verl.tracking.files import METRICS, read_lines, series
from verl.tracking.names import REWARD, VALIDATION, first
from verl.tracking.scales import Point, thin, tick_label, ticks

# Bit of each dot of a braille cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def learning_curve(folder: Path | str, width: int = 60, height: int = 8, ascii_only: bool | None = None) -> str:
    """Validation scores and the training reward of a run, as text; "" if neither was logged.

    width, height: of the plot in characters, without axes. ascii_only: None decides by standard output's encoding.
    """
    lines = read_lines(Path(folder) / METRICS)
    logged = list(dict.fromkeys(name for line in lines for name in line))
    names = [name for name in logged if name.startswith(VALIDATION)]
    if reward := first(REWARD, logged):
        names.append(reward)
    if ascii_only is None:
        ascii_only = not (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    plots = []
    for name in names:
        if points := series(lines, name):
            change = points[-1][1] - points[0][1]
            title = f"{name}  {points[0][1]:.3f} -> {points[-1][1]:.3f} ({change:+.3f})"
            plots.append("\n".join([title, *plot(points, width, height, ascii_only)]))
    return "\n\n".join(plots)


def plot(points: Sequence[Point], width: int, height: int, ascii_only: bool = False) -> list[str]:
    """Lines of text with the curve through `points`, values on the left and the first and last step below."""
    across, down = (1, 1) if ascii_only else (2, 4)
    shown = thin(points, width * across)
    marks = ticks(min(y for _, y in shown), max(y for _, y in shown), 4)
    left, right, low, high = shown[0][0], shown[-1][0], marks[0], marks[-1]

    def column(x: float) -> int:
        return round((x - left) / ((right - left) or 1) * (width * across - 1))

    def row(y: float) -> int:
        return round((high - y) / (high - low) * (height * down - 1))

    cells = [[0] * width for _ in range(height)]
    for x, y in _line([(column(x), row(y)) for x, y in shown]):
        cells[y // down][x // across] |= 1 if ascii_only else _DOTS[y % 4][x % 2]
    labels = {row(value) // down: tick_label(value, marks[1] - marks[0]) for value in marks}
    margin = max(map(len, labels.values()))
    edge, corner, bar = ("|", "+", "-") if ascii_only else ("┤", "└", "─")
    out = []
    for i, line in enumerate(cells):
        drawn = "".join((" " if not c else "*") if ascii_only else (chr(0x2800 + c) if c else " ") for c in line)
        out.append(f"{labels.get(i, ''):>{margin}} {edge}{drawn}".rstrip())
    first_step, last_step = f"{left:g}", f"step {right:g}"
    out.append(f"{'':>{margin}} {corner}{bar * width}")
    out.append(f"{'':>{margin}}  {first_step}{last_step:>{width - len(first_step)}}")
    return out


def _line(corners: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every dot on the straight lines from corner to corner."""
    dots = [corners[0]]
    for (x0, y0), (x1, y1) in pairwise(corners):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        dots += [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(1, count + 1)]
    return dots
