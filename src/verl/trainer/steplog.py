"""Numbers and seconds of one training step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

PEAK = "perf/peak_memory_gb/"


class StepLog:
    """Collects the metrics of one step.

    `with log.time("gen")` adds the seconds of a phase to `timing/gen` and, on a GPU, puts the most memory that was in use
    within it into `perf/peak_memory_gb/gen`. spans: gets (phase, start, stop) of each, by time.perf_counter.
    """

    def __init__(self, spans: list[tuple[str, float, float]] | None = None) -> None:
        self.metrics: dict[str, float] = {}
        self._spans = spans
        self._started = time.perf_counter()

    def add(self, metrics: dict[str, float], prefix: str = "") -> None:
        """Set these metrics (Python, numpy, or tensors with one element), each name behind `prefix`."""
        for name, value in metrics.items():
            self.metrics[prefix + name] = value.item() if hasattr(value, "item") else value

    @contextlib.contextmanager
    def time(self, phase: str) -> Iterator[None]:
        on_gpu = phase != "step" and torch.cuda.is_initialized()  # the step is the largest of its phases
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            yield
        finally:
            name = f"timing/{phase}"
            stopped = time.perf_counter()
            self.metrics[name] = self.metrics.get(name, 0.0) + stopped - started
            if self._spans is not None:
                self._spans.append((phase, started, stopped))
            if on_gpu:
                self.metrics[f"{PEAK}{phase}"] = torch.cuda.max_memory_allocated() / 2**30

    def seconds(self, phase: str) -> float:
        return self.metrics.get(f"timing/{phase}", 0.0)

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started


def merged(logs: Sequence[StepLog]) -> dict[str, float]:
    """Metrics of a step that was made in parts: seconds and failures add up, extremes stay extremes, others are means."""
    if len(logs) == 1:
        return logs[0].metrics
    out = {}
    for name in dict.fromkeys(name for log in logs for name in log.metrics):
        column = [log.metrics[name] for log in logs if name in log.metrics]
        if name.startswith("timing/") or name.endswith(("/failures", "/skipped_updates")):
            out[name] = sum(column)
        elif name.endswith(("/max", "_max")):
            out[name] = max(column)
        elif name.endswith(("/min", "_min")):
            out[name] = min(column)
        else:
            out[name] = column[-1] if name.endswith("/lr") else sum(column) / len(column)
    return out
