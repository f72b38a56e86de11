"""Ctrl-C and SIGTERM: the step in hand is finished and saved; a second one stops at once."""

from __future__ import annotations

import signal
import sys
import threading


class Interrupt:
    """Within the block, the first SIGINT or SIGTERM sets `requested`; the second does what it did before."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: object) -> None:
        self.requested = True
        self._restore()
        print("\ninterrupted: finishing this step and saving; once more to stop at once.", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
