"""Ctrl-C and SIGTERM: the step in hand is finished and saved, a validation is left; a second one stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Left(BaseException):
    """A signal has come within `attempt`. Not an Exception, so that nothing on the way takes it for a failure."""


class Interrupt:
    """Within the block, the first SIGINT or SIGTERM sets `requested`; the second does what it did before."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}
        self._attempting = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if a signal has come before it, or comes within, which ends it there and then."""
        if self.requested:
            return None
        try:
            try:
                self._attempting = True
                return work()
            finally:
                self._attempting = False
        except _Left:
            return None

    def _handle(self, number: int, frame: object) -> None:
        self.requested = True
        self._restore()
        leaves, self._attempting = self._attempting, False
        doing = "leaving the validation" if leaves else "finishing this step and saving"
        print(f"\ninterrupted: {doing}; once more to stop at once.", file=sys.stderr, flush=True)
        if leaves:
            raise _Left

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
