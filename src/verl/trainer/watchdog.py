"""Says who waits for whom when nothing moves, and ends the run when nothing ever will."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from verl.core.transfer_queue.api import TransferQueue
from verl.errors import UserError
from verl.trainer.generator import Generator

LOOKS = 4
"""So often does it look within its seconds."""


class Stalled(UserError):
    """Every part of a pipeline waits for another."""

    exit_code = 1


class Watchdog:
    """Looks at a queue from a thread of its own, within the block.

    seconds: without a sample put, a group taken or one released, after which it speaks, and again after as many.
    """

    def __init__(self, queue: TransferQueue, generator: Generator, seconds: float, say: Callable[[str], None]):
        self._queue, self._generator, self._seconds, self._say = queue, generator, seconds, say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        moved, since, looks_stuck = self._moved(), time.monotonic(), 0
        while not self._over.wait(self._seconds / LOOKS):
            now = self._moved()
            if now != moved:
                moved, since, looks_stuck = now, time.monotonic(), 0
                continue
            looks_stuck += self._everyone_waits()
            if time.monotonic() - since < self._seconds:
                continue
            if looks_stuck >= LOOKS:
                self._queue.close(Stalled(f"nothing will move any more: {self._words()}"))
                return
            self._say(f"no sample has come or gone for {time.monotonic() - since:.0f} s: {self._words()}")
            since = time.monotonic()

    def _moved(self) -> tuple[float, ...]:
        stats = self._queue.stats()
        return tuple(stats[name] for name in ("puts", "takes", "groups_added", "groups_released"))

    def _everyone_waits(self) -> bool:
        """Whether the trainer waits for samples that no one is making."""
        trainer = any(waiting.kind in ("fields", "groups", "turn") for waiting in self._queue.waiting())
        return trainer and self._generator.stuck

    def _words(self) -> str:
        who = "; ".join(map(str, self._queue.waiting())) or "no one waits for the queue"
        return f"{who}; {self._generator.doing()}"
