"""One stream over the engines of several workers, with requests that come while it runs.

In each worker a method generates until it is told that no more will come. Beside it a second one, in a thread of its own,
exchanges requests for samples (`Desk`): it is under way all the time, and comes back as soon as something has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.core.controller.desk import FeedSettings
from verl.core.controller.dispatch import unpack_completions
from verl.core.rollout_engine.api import Completion, Feed, Request
from verl.core.rollout_engine.requests import take_from

LOOK_SECONDS = 0.05
"""Of an exchange in which nothing finishes, and so the longest that a new request or an abort waits."""


class Group(Protocol):
    """The part of a worker group that a stream needs."""

    def submit(self, method: str, arguments: Sequence[tuple], ranks: Sequence[int], beside: bool = False) -> list[Any]:
        """Start a method on each of `ranks`. beside: while another one runs there."""

    def next_of(self, calls: Sequence[Any]) -> tuple[Any, Any]:
        """(call, result) of one of these that has ended, waiting for it."""


@dataclass
class Lane:
    """One worker's part. numbers: of its requests in the stream, by their number in the worker. left: samples to come."""

    rank: int
    numbers: list[int] = field(default_factory=list)
    outgoing: list[Request] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    left: int = 0


class FedStream:
    """`items` yields until the feed ends and everything has come; `abort` may be called from another thread.

    A request goes to the worker with the fewest samples to come, and its samples stay there together.
    """

    def __init__(self, group: Group, ranks: Sequence[int], requests: list[Request], feed: Feed):
        self._group, self._feed = group, feed
        self._lanes = [Lane(rank) for rank in ranks]
        self._lane_of: list[tuple[Lane, int]] = []  # by the request's number
        self._ended = False
        for request in requests:
            self._send(request)

    def abort(self, requests: Iterable[int]) -> None:
        for number in requests:
            if number < len(self._lane_of):
                lane, own = self._lane_of[number]
                lane.aborts.append(own)

    def items(self) -> Iterator[tuple[int, int, Completion]]:
        ranks = [lane.rank for lane in self._lanes]
        settings = FeedSettings(self._feed.sampling, self._feed.longest, -(-self._feed.samples // len(ranks)))
        generating = self._group.submit("generate_fed", [(settings,)] * len(ranks), ranks)
        under_way: dict[Any, Lane] = {}
        try:
            while True:
                self._take_in()
                if self._ended and not any(lane.left for lane in self._lanes):
                    break
                idle = [lane for lane in self._lanes if lane not in under_way.values()]
                for lane in idle:
                    under_way[self._exchange(lane, ended=False)] = lane
                call, finished = self._group.next_of([*under_way, *generating])
                if call in generating:
                    raise RuntimeError(f"worker {call.rank} ended its stream by itself")
                yield from self._received(under_way.pop(call), finished)
        except GeneratorExit:  # left early
            self._end(under_way, generating)
            raise
        self._end(under_way, generating)

    def _take_in(self) -> None:
        if self._ended:
            return
        requests = take_from(self._feed, idle=not any(lane.left for lane in self._lanes))
        if requests is None:
            self._ended = True
        for request in requests or ():
            self._send(request)

    def _send(self, request: Request) -> None:
        lane = min(self._lanes, key=lambda lane: lane.left)
        self._lane_of.append((lane, len(lane.numbers)))
        lane.numbers.append(len(self._lane_of) - 1)
        lane.outgoing.append(request)
        lane.left += request.sampling.n

    def _exchange(self, lane: Lane, ended: bool) -> Any:
        requests, lane.outgoing = lane.outgoing, []
        aborts, lane.aborts = lane.aborts, []
        arguments = (requests, aborts, ended, 0.0 if ended else LOOK_SECONDS)
        return self._group.submit("exchange", [arguments], [lane.rank], beside=True)[0]

    def _received(self, lane: Lane, finished: tuple[list, dict]) -> Iterator[tuple[int, int, Completion]]:
        keys, packed = finished
        for (own, sample), completion in zip(keys, unpack_completions(packed), strict=True):
            lane.left -= 1
            yield lane.numbers[own], sample, completion

    def _end(self, under_way: dict[Any, Lane], generating: list[Any]) -> None:
        """Let the workers end. What is still in generation, if the stream is left early, is stopped."""
        waiting = [*under_way, *generating]
        for lane in self._lanes:
            lane.aborts = list(range(len(lane.numbers))) if lane.left else []
            waiting.append(self._exchange(lane, ended=True))
        while waiting:
            call, _ = self._group.next_of(waiting)
            waiting.remove(call)
