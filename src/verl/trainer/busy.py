"""A clock that runs while something is at work."""

from __future__ import annotations

import threading
import time


class Busy:
    """Seconds between `start` and `stop`, over all of them so far; safe to read from another thread.

    spans: (start, stop) by time.perf_counter, of those that are over.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self._since: float | None = None
        self._total = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Nothing new if it runs already."""
        with self._lock:
            if self._since is None:
                self._since = time.perf_counter()

    def stop(self) -> None:
        with self._lock:
            if self._since is not None:
                now = time.perf_counter()
                self.spans.append((self._since, now))
                self._total += now - self._since
                self._since = None

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._since is not None else 0.0)
