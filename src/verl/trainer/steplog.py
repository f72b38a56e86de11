"""Numbers and seconds of one training step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StepLog:
    """Collects the metrics of one step; `with log.time("gen")` adds the seconds of a phase to `timing/gen`."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._started = time.perf_counter()

    def add(self, metrics: dict[str, float], prefix: str = "") -> None:
        """Set these metrics, each name behind `prefix`."""
        self.metrics.update({prefix + name: value for name, value in metrics.items()})

    @contextlib.contextmanager
    def time(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            name = f"timing/{phase}"
            self.metrics[name] = self.metrics.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, phase: str) -> float:
        return self.metrics.get(f"timing/{phase}", 0.0)

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started
