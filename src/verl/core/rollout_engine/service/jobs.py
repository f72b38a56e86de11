"""What a request is while the engine works on it, and what its waiting handler is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl.core.rollout_engine.api import Completion, Request


@dataclass(frozen=True)
class Weights:
    """What the engine generates with. label: the sender's name for them; None: no whole weights are loaded."""

    version: int
    label: str | None


@dataclass(frozen=True)
class Tokens:
    """Tokens of a running sample, those drawn since the last time."""

    sample: int
    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Finished:
    """A sample's whole completion."""

    sample: int
    completion: Completion
    weights: Weights


@dataclass(frozen=True)
class Failed:
    """Nothing more comes for this job. status: of HTTP."""

    status: int
    message: str


Event = Tokens | Finished | Failed


class Refused(Exception):
    """A request that is not taken. status: of HTTP. code: a short word for programs."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(eq=False)
class Job:
    """One prompt and its samples.

    name: by which it can be aborted. watched: tokens are told of as they are drawn. expects: label of the weights that it
    has to be drawn with; None: any. events: where (job, event) pairs go; they are put there by the event loop's thread.
    """

    request: Request
    events: asyncio.Queue[tuple[Job, Event]]
    name: str = ""
    watched: bool = False
    expects: str | None = None
    unfinished: set[int] = field(init=False)
    abandoned: bool = False  # nobody waits for it any more

    def __post_init__(self) -> None:
        self.unfinished = set(range(self.request.sampling.n))


class Outbox:
    """Events on their way from the engine's thread to the event loop, one wake-up for many."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._held: list[tuple[Job, Event]] = []

    def put(self, job: Job, event: Event) -> None:
        self._held.append((job, event))

    def flush(self) -> None:
        """Hand over what is held. A loop that is closed has nobody left who waits."""
        if not self._held:
            return
        held, self._held = self._held, []
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_deliver, held)


def _deliver(events: Iterable[tuple[Job, Event]]) -> None:
    for job, event in events:
        if not job.abandoned:
            job.events.put_nowait((job, event))
