"""Requests that have not been handed to the engine, in order of arrival, and which of them may join a running batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container

from verl.core.rollout_engine.api import SamplingParams
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.service.jobs import Job

# For so long requests of the batch's rule overtake one of another rule; then the batch drains for it.
OVERTAKING_SECONDS = 0.5


class Lobby:
    """Not locked: its owner does that. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._entries: deque[tuple[float, SamplingRule, Job]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def jobs(self) -> list[Job]:
        return [job for _, _, job in self._entries]

    def add(self, jobs: list[Job]) -> None:
        now = self._clock()
        self._entries.extend((now, SamplingRule.of(job.request.sampling), job) for job in jobs)

    def next_sampling(self) -> SamplingParams:
        """That of the request which has waited longest."""
        return self._entries[0][2].request.sampling

    def take(self, rule: SamplingRule, room: int) -> list[Job]:
        """Jobs of this rule, the oldest first, with at most `room` samples in all; none if another rule's turn has come."""
        now = self._clock()
        if any(r != rule and now - arrived > OVERTAKING_SECONDS for arrived, r, _ in self._entries):
            return []
        chosen: list[Job] = []
        for _, own, job in self._entries:
            if own == rule:
                room -= job.request.sampling.n
                if room < 0:
                    break
                chosen.append(job)
        self.remove(set(chosen))
        return chosen

    def remove(self, jobs: Container[Job]) -> list[Job]:
        """Those of `jobs` that were here."""
        found = [job for job in self.jobs if job in jobs]
        if found:
            self._entries = deque(entry for entry in self._entries if entry[2] not in jobs)
        return found

    def clear(self) -> list[Job]:
        jobs = self.jobs
        self._entries.clear()
        return jobs
