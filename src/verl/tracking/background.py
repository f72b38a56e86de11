"""A logger in a thread of its own: a slow or dead server costs the run neither time nor life."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from verl.tracking.backends import Backend

FAILURES_IN_A_ROW = 5


class Background:
    """Hands records to `backend` in order; drops them, with one notice, when it fails or cannot keep up.

    notify: called from the logger's thread with one line of text. capacity: records that may wait.
    """

    def __init__(self, backend: Backend, notify: Callable[[str], None], capacity: int = 10_000):
        self._backend, self._notify = backend, notify
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)
        self._failures_in_a_row = 0
        self._lost = 0
        self._overrun = False
        # A daemon: a call that hangs for ever must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"log-{backend.name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._put(lambda: self._backend.log(metrics, step))

    def log_generations(self, rows: list[dict[str, Any]], step: int) -> None:
        self._put(lambda: self._backend.log_generations(rows, step))

    def close(self, status: str, timeout: float = 60.0) -> None:
        """Let the logger finish what waits, for at most `timeout` seconds, and say what was lost."""
        if not self._backend.closes_in_caller:
            self._put(lambda: self._backend.close(status))
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._lost += self._queue.qsize()
            self._notify(f"trainer.logger={self._backend.name} did not finish within {timeout:.0f} s")
        elif self._backend.closes_in_caller:
            self._call(lambda: self._backend.close(status))
        if self._lost:
            self._notify(f"trainer.logger={self._backend.name} lost {self._lost} records; metrics.jsonl has them all")

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._lost += 1
            if not self._overrun:
                self._overrun = True
                self._notify(f"trainer.logger={self._backend.name} cannot keep up: records are dropped")

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if self._failures_in_a_row >= FAILURES_IN_A_ROW:
                self._lost += 1
                continue
            self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._failures_in_a_row = 0
        except Exception as error:  # whatever a logger raises, the run goes on
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._lost += 1
        self._failures_in_a_row += 1
        name = self._backend.name
        if self._failures_in_a_row == 1:
            self._notify(f"trainer.logger={name} failed, the run goes on: {type(error).__name__}: {error}")
        elif self._failures_in_a_row == FAILURES_IN_A_ROW:
            self._notify(f"trainer.logger={name} failed {FAILURES_IN_A_ROW} times in a row and is turned off")
