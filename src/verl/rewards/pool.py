"""Worker processes that score chunks of samples and survive whatever a reward function does to them."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Protocol

from pebble import ProcessExpired, ProcessPool

from verl.errors import RewardError
from verl.rewards.custom import CustomFunction
from verl.rewards.outcome import failure
from verl.rewards.types import Outcome, RewardInput, ScoreFunction
from verl.rewards.worker import CHUNK_SECONDS, GRACE_SECONDS, ready, score_chunk, start_worker

LARGEST_CHUNK = 256
RESTARTS_IN_A_ROW = 3
LOOK_AFTER_SECONDS = 0.5
START_SECONDS = 60.0
"""A worker's import of the user's file takes no longer; one that blocks would keep the trainer waiting for ever."""


class Listener(Protocol):
    """Hears of each outcome as soon as it is there, from any thread."""

    def scored(self, index: int, outcome: Outcome | None) -> None: ...

    def stopped(self, error: BaseException) -> None:
        """The outcomes that have not come will not come."""


class PoolJob:
    """Samples handed to the pool together; `wait` gives their outcomes, in order."""

    def __init__(
        self,
        function: ScoreFunction | None,
        samples: list[RewardInput],
        timeout: float,
        look_after: Callable[[], None],
        listener: Listener | None = None,
    ):
        self.function, self.samples, self.timeout = function, samples, timeout
        self._look_after, self._listener = look_after, listener
        self._outcomes: list[Outcome | None] = [None] * len(samples)
        self._missing = len(samples)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not samples:
            self._done.set()

    def put(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            first = self._outcomes[index] is None
            self._missing -= first
            self._outcomes[index] = outcome
            if self._missing == 0:
                self._done.set()
        if first and self._listener is not None:
            self._listener.scored(index, outcome)

    def stop(self, error: BaseException) -> None:
        """Give up: `wait` raises this error."""
        self._error = self._error or error
        self._done.set()
        if self._listener is not None:
            self._listener.stopped(error)

    @property
    def stopped(self) -> bool:
        return self._error is not None

    def wait(self) -> list[Outcome]:
        while not self._done.wait(LOOK_AFTER_SECONDS):
            self._look_after()
        if self._error is not None:
            raise self._error
        return self._outcomes


class WorkerPool:
    """`workers` processes, started at the first use and started again when they die.

    A sample over its time limit is stopped inside its worker. A worker that does not react, or dies, costs its chunk:
    those samples are then scored one at a time, and only the sample that does it again is a failure.
    """

    def __init__(self, workers: int, custom: CustomFunction | None = None):
        self._workers, self._custom = workers, custom
        self._imports: tuple[str, ...] = ()
        self._start_limit = START_SECONDS
        self._lock = threading.RLock()
        self._pool: ProcessPool | None = None
        self._broken: list[ProcessPool] = []
        self._restarts = 0
        self._closed = False
        self._jobs: weakref.WeakSet[PoolJob] = weakref.WeakSet()
        self._under_way: dict[Future, ProcessPool] = {}
        self._orphans: set[Future] = set()

    def start(self, imports: tuple[str, ...] = (), limit: float = START_SECONDS) -> None:
        """Start the processes now, without waiting for them; each begins by importing these modules.

        limit: seconds that a process may take to load the user's function.
        """
        self._imports, self._start_limit = imports, limit
        self._current().schedule(ready)

    def submit(
        self,
        function: ScoreFunction | None,
        samples: list[RewardInput],
        timeout: float,
        chunk: int | None = None,
        listener: Listener | None = None,
    ) -> PoolJob:
        """Score samples with `function` (None: the user's own), `timeout` seconds each, in chunks of at most `chunk`."""
        job = PoolJob(function, samples, timeout, self.look_after, listener)
        self._jobs.add(job)
        self._spread(job, list(range(len(samples))), chunk or LARGEST_CHUNK)
        return job

    def close(self) -> None:
        """Kill the workers, reap them, and fail what is still unscored."""
        with self._lock:
            self._closed = True
            pools = [pool for pool in (self._pool, *self._broken) if pool is not None]
            self._pool, self._broken = None, []
            self._under_way.clear()
        for job in list(self._jobs):
            job.stop(RewardError("The reward workers were closed before these samples were scored."))
        for pool in pools:
            pool.stop()
            pool.join()

    def _current(self) -> ProcessPool:
        with self._lock:
            if self._closed:
                raise RewardError("The reward workers are closed.")
            if self._pool is None:
                # spawn: forking a process that holds threads and a GPU can deadlock.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(
                    self._workers,
                    initializer=start_worker,
                    initargs=(self._custom, self._imports, self._start_limit),
                    context=context,
                )
            return self._pool

    def _spread(self, job: PoolJob, indices: list[int], largest: int) -> None:
        """Send samples off in chunks: a few for each worker, so that none waits long for the slowest."""
        size = max(1, min(largest, len(indices) // (2 * self._workers)))
        for start in range(0, len(indices), size):
            self._send(job, indices[start : start + size])

    def _send(self, job: PoolJob, indices: list[int]) -> None:
        limit = CHUNK_SECONDS + job.timeout + GRACE_SECONDS
        chunk = [job.samples[i] for i in indices]
        for _ in range(RESTARTS_IN_A_ROW + 1):
            pool = self._current()
            try:
                future = pool.schedule(score_chunk, args=(job.function, chunk, job.timeout), timeout=limit)
            except RuntimeError:  # the pool broke since its last use, for instance because an idle worker was killed
                self._replace(pool)
                continue
            self._under_way[future] = pool
            future.add_done_callback(partial(self._collect, job, indices, pool))
            return

    def _collect(self, job: PoolJob, indices: list[int], pool: ProcessPool, future: Future) -> None:
        """Take in a finished chunk. Runs in a thread of the pool, where an exception would vanish: hand it to the job."""
        self._under_way.pop(future, None)
        if job.stopped:
            return
        try:
            self._take(job, indices, pool, future)
        except BaseException as error:
            job.stop(error)

    def _take(self, job: PoolJob, indices: list[int], pool: ProcessPool, future: Future) -> None:
        try:
            outcomes = future.result()
        except RewardError:
            raise
        except CancelledError:  # of the future, by the pool; one that a function raises is asyncio's
            job.stop(RewardError("The reward workers were closed before these samples were scored."))
        except BrokenProcessPool:
            self._replace(pool)
            self._send(job, indices)
        except BaseException as error:  # what a worker raised, of whatever kind
            if len(indices) > 1:
                for index in indices:
                    self._send(job, [index])
            else:
                job.put(indices[0], failure(_explained(error, job.timeout), job.samples[indices[0]]))
        else:
            self._restarts = 0
            for index, outcome in zip(indices, outcomes, strict=True):
                if outcome is not None:
                    job.put(index, outcome)
            rest = [index for index, outcome in zip(indices, outcomes, strict=True) if outcome is None]
            self._spread(job, rest, max(1, len(indices) // 2))

    def look_after(self) -> None:
        """End chunks that a pool took on just as it broke: it leaves those without an answer, for ever."""
        with self._lock:
            waiting = {f for f, pool in list(self._under_way.items()) if not f.done() and not pool.active}
            # Seen twice: a pool that is breaking now may still be about to answer.
            lost, self._orphans = waiting & self._orphans, waiting
        for future in lost:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(BrokenProcessPool("the pool broke before it began this chunk"))

    def _replace(self, pool: ProcessPool) -> None:
        """Put a broken pool aside, once, however many chunks notice it."""
        with self._lock:
            if self._pool is not pool:
                return
            self._restarts += 1
            if self._restarts > RESTARTS_IN_A_ROW:
                raise RewardError(
                    f"The reward workers died {self._restarts} times in a row before they scored anything. What they "
                    "printed stands above. A script of your own that starts a run needs `if __name__ == '__main__':`."
                )
            self._broken.append(pool)
            self._pool = None


def _explained(error: BaseException, timeout: float) -> str:
    if isinstance(error, ProcessExpired):
        return f"the reward function ended its worker process (exit code {error.exitcode})"
    if isinstance(error, TimeoutError):
        return (
            f"the reward function took longer than reward.timeout={timeout:g} s and did not react, so that its worker "
            "had to be killed (or the function ended its own process with exit code 0)"
        )
    return f"the sample could not be sent to or scored by a worker: {type(error).__name__}: {error}"
