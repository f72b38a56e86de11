"""`Desk`: where a worker's stream of generation gets its requests and leaves its samples, while it runs in another thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutEngine, SamplingParams

Item = tuple[int, int, Completion]


@dataclass(frozen=True)
class FeedSettings:
    """What a `Feed` says of all of its requests."""

    sampling: SamplingParams
    longest: int
    samples: int


class Desk:
    """`run` streams in one thread what `exchange` brings in another.

    Requests are numbered in the order in which they are brought, from 0 in each run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._engine: RolloutEngine | None = None
        self._reset()

    def _reset(self) -> None:
        self._incoming: list[Request] = []
        self._finished: list[Item] = []
        self._aborted: set[int] = set()
        self._ended = False

    def exchange(self, requests: list[Request], aborted: list[int], ended: bool, seconds: float) -> list[Item]:
        """Bring requests and numbers to abort, say whether no more will come, and take what has finished.

        seconds: to wait for something to finish, if nothing has.
        """
        with self._changed:
            self._incoming += requests
            self._aborted.update(aborted)
            self._ended |= ended
            if aborted and self._engine is not None:
                self._engine.abort(aborted)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._finished, seconds)
            finished, self._finished = self._finished, []
            return finished

    def run(self, engine: RolloutEngine, settings: FeedSettings) -> None:
        """Generate until the end is told. What finishes last is still there for `exchange`."""
        with self._changed:
            self._engine, self._finished = engine, []
        try:
            feed = Feed(self._take, settings.sampling, settings.longest, settings.samples)
            for item in engine.stream([], feed):
                with self._changed:
                    self._finished.append(item)
                    self._changed.notify_all()
        finally:
            with self._changed:
                finished, self._engine = self._finished, None
                self._reset()
                self._finished = finished

    def _take(self, idle: bool) -> list[Request] | None:
        with self._changed:
            if idle:
                self._changed.wait_for(lambda: self._incoming or self._ended)
            if self._aborted and self._engine is not None:
                self._engine.abort(list(self._aborted))
            requests, self._incoming = self._incoming, []
            return requests or (None if self._ended else [])
