"""`RayGroup`: one `Worker` on each device of a pool, as actors of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.core.controller.resources import ResourcePool
from verl.core.controller.worker import Seat, Worker
from verl.errors import UserError, WorkerDied

# After a first failure, seconds in which other ranks may say what went wrong: one that lost a peer fails before the news
# of the peer's death is here.
GRACE = 5.0
BESIDE = "beside"  # Ray's name for the thread of methods that run while another does


class WorkerFailure(RuntimeError):
    """An exception in a worker: the message has its rank and traceback."""


@dataclass(frozen=True)
class Place:
    """Where a worker runs. gpus: the ids of those that Ray gave it."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A method on its way in one worker."""

    reference: Any
    group: RayGroup
    rank: int


class RayGroup:
    """The workers of one pool, by rank. Ranks on one machine are neighbours."""

    def __init__(
        self,
        pool: ResourcePool,
        reserved: Sequence[PlacementGroup],
        span: int,
        timeout_seconds: int,
        beside: bool = False,
    ):
        """Start the workers and let them meet.

        Args:
            reserved: one placement group a node.
            span: that many neighbouring ranks see each other's GPUs (the devices of one rollout engine).
            timeout_seconds: of a collective.
            beside: whether a method may be called while another one runs.
        """
        self.pool = pool
        self._actors = [_start(pool, group, index, beside) for group in reserved for index in range(pool.per_node)]
        self.places: list[Place] = []
        places = collect([Call(a.__ray_call__.remote(_where), self, rank) for rank, a in enumerate(self._actors)])
        order = sorted(range(len(places)), key=lambda i: (places[i].address, places[i].node, places[i].gpus, i))
        self._actors, self.places = [self._actors[i] for i in order], [places[i] for i in order]
        self.address = self.places[0].address
        self.port: int = collect(self.submit("open_store", [(self.address, timeout_seconds)], [0]))[0]
        seats = [
            Seat(rank, self.size, place.address, self._visible(rank, span)) for rank, place in enumerate(self.places)
        ]
        self.scatter("join", [(seat, self.address, self.port, timeout_seconds) for seat in seats])

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any) -> list[Any]:
        """`method` with the same arguments on every rank; results by rank. Arguments go into Ray's store once."""
        shared = tuple(self.share(arg) for arg in args)
        return self.scatter(method, [shared] * self.size)

    def scatter(self, method: str, arguments: Sequence[tuple], ranks: Sequence[int] | None = None) -> list[Any]:
        """`method` on each of `ranks` (None: all), each with arguments of its own; results in that order."""
        return collect(self.submit(method, arguments, ranks))

    def submit(
        self, method: str, arguments: Sequence[tuple], ranks: Sequence[int] | None = None, beside: bool = False
    ) -> list[Call]:
        """Start what `scatter` waits for. beside: in a thread of its own in a worker that is at work already."""
        chosen = range(self.size) if ranks is None else ranks
        options = {"concurrency_group": BESIDE} if beside else {}
        return [
            Call(getattr(self._actors[rank], method).options(**options).remote(*args), self, rank)
            for rank, args in zip(chosen, arguments, strict=True)
        ]

    def next_of(self, calls: Sequence[Call]) -> tuple[Call, Any]:
        """(call, result) of one of these that has ended, waiting for it; raises what `collect` does."""
        done = ray.wait([call.reference for call in calls], num_returns=1)[0][0]
        call = next(call for call in calls if call.reference == done)
        return call, collect([call])[0]

    def stream(
        self, method: str, arguments: Sequence[tuple], ranks: Sequence[int], ahead: int = -1
    ) -> Iterator[tuple[int, Any]]:
        """(position among `ranks`, item) of a generator method, as the items come from any of them.

        ahead: a worker waits when so many of its items have not been taken; -1: never.
        """
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": ahead}
        running = {
            getattr(self._actors[rank], method).options(**options).remote(*args): position
            for position, (rank, args) in enumerate(zip(ranks, arguments, strict=True))
        }
        while running:
            generator = ray.wait(list(running), num_returns=1)[0][0]
            position = running[generator]
            try:
                reference = next(generator)
            except StopIteration:
                del running[generator]
                continue
            yield position, collect([Call(reference, self, ranks[position])])[0]

    def share(self, value: Any) -> Any:
        """The value in Ray's object store, as an argument of several workers."""
        return ray.put(value)

    def close(self) -> None:
        """End the workers."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _visible(self, rank: int, span: int) -> tuple[str, ...]:
        """GPUs that the rank may use, its own first."""
        if "GPU" not in self.pool.per_worker:
            return ()
        first = rank - rank % span
        others = [r for r in range(first, first + span) if r != rank]
        return tuple(self.places[r].gpus[0] for r in [rank, *others])


def collect(calls: Sequence[Call]) -> list[Any]:
    """Results of calls to one or several groups, in order.

    Raises:
        WorkerDied: a worker's process is gone.
        UserError: as a worker raised it.
        WorkerFailure: any other exception of a worker.
    """
    waiting = {call.reference: call for call in calls}
    results: dict[Any, Any] = {}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        for reference in done:
            call = waiting.pop(reference)
            results[reference], error = _outcome(reference)
            if error is not None:
                _fail([(call, error), *_errors_soon(list(waiting.values()))])
    return [results[call.reference] for call in calls]


def _outcome(reference: Any) -> tuple[Any, Exception | None]:
    """(result, None) or (None, what the call failed with)."""
    try:
        return ray.get(reference), None
    except (RayActorError, RayTaskError) as error:
        return None, error


def _errors_soon(calls: Sequence[Call]) -> list[tuple[Call, Exception]]:
    """What the other calls fail with within the time of grace."""
    if not calls:
        return []
    done, _ = ray.wait([call.reference for call in calls], num_returns=len(calls), timeout=GRACE)
    found = [(call, _outcome(call.reference)[1]) for call in calls if call.reference in done]
    return [(call, error) for call, error in found if error is not None]


def _fail(failures: list[tuple[Call, Exception]]) -> None:
    """Raise the failure that explains the others."""
    for call, error in failures:
        if isinstance(error, RayActorError):
            raise WorkerDied(f"{_named(call)} ended by itself. {_detail(error)}") from None
    for _, error in failures:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, UserError):
            raise cause from None
    call, error = failures[0]
    raise WorkerFailure(f"{_named(call)} failed:\n{error}") from None


def _named(call: Call) -> str:
    name = f"worker {call.rank} of {call.group.size} ({call.group.pool.words})"
    if not call.group.places:
        return name
    place = call.group.places[call.rank]
    return f"{name}, process {place.pid} on {place.address},"


def _detail(error: Exception) -> str:
    """Ray's reason, without its table of ids and its list of guesses."""
    text = str(error)
    if "exit detail:" in text:
        text = text.partition("exit detail:")[2].partition("Some common causes")[0]
        return f"{text.strip().rstrip('.')}: it was killed, perhaps by the system for its memory, or it crashed."
    return text.strip().splitlines()[-1]


def _start(pool: ResourcePool, group: PlacementGroup, index: int, beside: bool) -> Any:
    actor = ray.remote(concurrency_groups={BESIDE: 1})(Worker) if beside else ray.remote(Worker)
    return actor.options(
        num_cpus=pool.per_worker["CPU"],
        num_gpus=pool.per_worker.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote()


def _where(worker: Worker) -> Place:
    """Runs in the worker."""
    import os

    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Place(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus)
