"""The console: one plain line a step, and a progress bar where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl.tracking.names import LINE_BEGINS_WITH, REWARD, first


def format_value(value: float) -> str:
    """Three decimals; in exponent form where those would hide the value (below 0.001) or drown it (1e9 and above).

    >>> [format_value(v) for v in (21.47, 0, 0.0123, 1e-6, -0.00042, 3e9, float("nan"))]
    ['21.470', '0.000', '0.012', '1.000e-06', '-4.200e-04', '3.000e+09', 'nan']
    """
    size = abs(value)
    if 0 < size < 1e-3 or 1e9 <= size < float("inf"):
        return f"{value:.3e}"
    return f"{value + 0.0:.3f}"  # + 0.0 turns -0.0 into 0.0


def format_line(metrics: Mapping[str, float], step: int) -> str:
    """One step as one line that greps.

    >>> format_line({"timing/gen": 21.47, "actor/reward_kl_penalty": 0.0}, 0)
    'step:0 - timing/gen:21.470 - actor/reward_kl_penalty:0.000'
    """
    ordered = sorted(metrics, key=_place)  # stable: the rest stays in the order of the step
    return " - ".join([f"step:{step}", *(f"{name}:{format_value(metrics[name])}" for name in ordered)])


def _place(name: str) -> int:
    """Where a metric stands in the line: those that a reader looks for first come first, then all others."""
    return next((i for i, start in enumerate(LINE_BEGINS_WITH) if name.startswith(start)), len(LINE_BEGINS_WITH))


class Console:
    """Prints lines to standard output; on a terminal a bar below them shows step, reward and the time left.

    total_steps: None shows no bar.
    """

    def __init__(self, total_steps: int | None = None, done_steps: int = 0):
        self._bar: Progress | None = None
        if total_steps and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[reward]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=RichConsole(),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=done_steps, reward="")
            self._bar.start()

    def print(self, text: str) -> None:
        """One line or several, as they are: not wrapped, coloured or parsed."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def progress(self, metrics: Mapping[str, float], step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is None:
            return
        fields: dict[str, Any] = {}
        if name := first(REWARD, metrics):
            fields["reward"] = f"reward {metrics[name]:.3f}"
        self._bar.update(self._task, completed=step, **fields)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
