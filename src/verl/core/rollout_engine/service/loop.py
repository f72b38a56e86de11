"""`EngineLoop`: one thread that runs the engine for many callers.

Requests join the batch that is running where their sampling rule (temperature, top_k, top_p, stop tokens) is the batch's;
those of other rules wait until it has drained.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutEngine
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.service.jobs import Event, Failed, Finished, Job, Outbox, Refused, Tokens, Weights
from verl.core.rollout_engine.service.lobby import Lobby
from verl.errors import UserError

GOING_DOWN = "The server is going down."
NO_WEIGHTS = "The engine has no whole weights."


@dataclass
class Totals:
    """Since the start: tokens, samples by finish reason, and requests that failed."""

    prompt_tokens: int = 0
    response_tokens: int = 0
    stop: int = 0
    length: int = 0
    abort: int = 0
    failures: int = 0


@dataclass(frozen=True)
class State:
    """waiting: requests that have not been handed to the engine. running: those that have, with `samples` unfinished samples.

    broken: why the engine will not run again; None: it does.
    """

    waiting: int
    running: int
    samples: int
    paused: bool
    sleeping: bool
    weights: Weights
    broken: str | None


class EngineLoop:
    """Runs an engine; its methods may be called from any thread.

    Args:
        engine: with its weights loaded.
        longest: bound of prompt plus response, in tokens.
        slots: samples in the engine at once.
        max_waiting: requests that may wait; more are refused.
        weights: what the engine holds.
    """

    def __init__(self, engine: RolloutEngine, *, longest: int, slots: int, max_waiting: int, weights: Weights):
        self.engine, self.longest, self.slots, self.max_waiting = engine, longest, slots, max_waiting
        self.outbox, self.totals = Outbox(), Totals()
        self._weights = weights
        self._changed = threading.Condition(threading.RLock())
        self._lobby = Lobby()
        self._running: dict[int, Job] = {}  # by the engine's number
        self._taken = 0  # by the stream that is open
        self._watched: set[int] = set()  # numbers whose tokens it tells of as they are drawn
        self._calls: deque[tuple[Callable[[], Any], Future]] = deque()
        self._loads = 0  # of weights, that have been asked for and not ended
        self._paused = self._sleeping = self._closing = self._streaming = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End what runs, with what it has, and then the thread."""
        with self._changed:
            self._closing = True
            self._abort_running()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: list[Job]) -> None:
        """Take all of these or none.

        Raises:
            Refused: too many wait already, or nothing can be generated now.
        """
        with self._changed:
            if self._closing or self._broken is not None:
                raise Refused(503, self._broken or GOING_DOWN, "unavailable")
            if not self._loads and (self._sleeping or self._weights.label is None):
                why = "The engine sleeps." if self._sleeping else NO_WEIGHTS
                raise Refused(503, f"{why} Ask again later.", "unavailable")
            if len(self._lobby) + len(jobs) > self.max_waiting:
                raise Refused(429, f"{len(self._lobby)} requests wait already. Ask again later.", "queue_full")
            self._lobby.add(jobs)
            self._changed.notify_all()

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Nobody waits for these any more: they are dropped, and their slots freed."""
        chosen = {job for job in jobs if job.unfinished}
        for job in chosen:
            job.abandoned = True
        self._stop(chosen)

    def abort(self, names: Iterable[str] | None) -> int:
        """Stop the jobs of these names (None: all); who waits for them gets what they have. Returns how many there were."""
        wanted = None if names is None else set(names)
        with self._changed:
            known = [*self._lobby.jobs, *self._running.values()]
            chosen = {job for job in known if wanted is None or job.name in wanted}
            self._stop(chosen)
        return len(chosen)

    def pause(self, abort: bool) -> Future:
        """Start nothing more until `resume`; done when nothing runs. abort: what runs ends with what it has."""
        with self._changed:
            self._paused = True
            return self.call(lambda: None, abort=abort)

    def resume(self) -> None:
        """Undo pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def sleep(self, abort: bool) -> Future:
        """Put the engine to sleep when nothing runs; what waits then is refused."""

        def sleep() -> None:
            self.engine.sleep()
            with self._changed:
                self._sleeping = True
                self._fail(self._lobby.clear(), Failed(503, "The engine was put to sleep."))

        return self.call(sleep, abort=abort)

    def wake(self) -> Future:
        """Undo sleep."""

        def wake() -> None:
            self.engine.wake()
            with self._changed:
                self._sleeping = False
                if getattr(self.engine, "needs_weights", False):
                    self._weights = replace(self._weights, label=None)

        return self.call(wake, abort=False)

    def load(self, weights: Iterable[tuple[str, Any]], new: Weights, abort: bool) -> Future:
        """Give the engine other weights when nothing runs; requests that come meanwhile wait for them.

        If that fails it has none that count, and requests are refused until it gets some.
        """

        def load() -> None:
            with self._changed:
                self._weights = replace(self._weights, label=None)
            try:
                self.engine.wake()
                self.engine.load_weights(weights, new.version)
                with self._changed:
                    self._weights, self._sleeping = new, False
            finally:
                with self._changed:
                    self._loads -= 1
                    if self._weights.label is None and not self._loads:
                        self._fail(self._lobby.clear(), Failed(503, NO_WEIGHTS))

        with self._changed:
            self._loads += 1
            return self.call(load, abort=abort)

    def call(self, function: Callable[[], Any], abort: bool) -> Future:
        """Run `function` on the engine's thread as soon as nothing runs; no request starts before it.

        abort: what runs ends with what it has; else it runs to its end.
        """
        done: Future = Future()
        with self._changed:
            if self._closing:
                done.set_exception(Refused(503, GOING_DOWN, "unavailable"))
                return done
            self._calls.append((function, done))
            if abort:
                self._abort_running()
            self._changed.notify_all()
        return done

    def state(self) -> State:
        with self._changed:
            samples = sum(len(job.unfinished) for job in self._running.values())
            counts = (len(self._lobby), len(self._running), samples)
            return State(*counts, self._paused, self._sleeping, self._weights, self._broken)

    # -- on the engine's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._calls or (len(self._lobby) and not self._paused))
                if self._closing:
                    break
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                _answer(*call)
            else:
                self._generate()
            self.outbox.flush()
        with self._changed:
            self._fail(self._lobby.clear(), Failed(503, GOING_DOWN))
            for _, done in self._calls:
                done.set_exception(Refused(503, GOING_DOWN, "unavailable"))
        self.outbox.flush()

    def _generate(self) -> None:
        """One stream of the engine: from the first request to where nothing of its rule is left."""
        with self._changed:
            if not len(self._lobby):
                return
            sampling = self._lobby.next_sampling()
        rule = SamplingRule.of(sampling)
        feed = Feed(
            take=lambda idle: self._take(rule, idle),
            sampling=replace(sampling, max_tokens=self.longest),
            longest=self.longest,
            samples=self.slots,
            show=self._show,
        )
        self._watched = feed.watched
        try:
            stream = self.engine.stream([], feed)
            with self._changed:
                self._streaming, self._taken = True, 0
            for number, sample, completion in stream:
                self._finish(number, sample, completion)
            left = Failed(500, "The engine gave no result.")
        except Exception as error:
            left = Failed(500, f"{type(error).__name__}: {error}")
            if not isinstance(error, UserError):
                traceback.print_exc()
                self._broken = f"The engine failed. {left.message}"
        with self._changed:
            self._streaming = False
            self._fail(self._running.values(), left)
            self._running.clear()

    def _take(self, rule: SamplingRule, idle: bool) -> list[Request] | None:
        """Requests that join the stream; None: it ends when those inside are finished."""
        self.outbox.flush()
        with self._changed:
            if self._closing or self._calls or self._paused:
                return None
            room = self.slots - sum(len(job.unfinished) for job in self._running.values())
            jobs = self._lobby.take(rule, room if self._running else max(room, self._largest()))
            stale = [job for job in jobs if job.expects not in (None, self._weights.label)]
            if stale:
                self._fail(stale, Failed(409, f"The engine holds the weights {self._weights.label}."))
                jobs = [job for job in jobs if job not in stale]
            if not jobs:
                return None if idle else []
            self._running.update(enumerate(jobs, self._taken))
            self._watched.update(number for number, job in enumerate(jobs, self._taken) if job.watched)
            self._taken += len(jobs)
            self.totals.prompt_tokens += sum(len(job.request.prompt_ids) for job in jobs)
            return [job.request for job in jobs]

    def _largest(self) -> int:
        """Samples of the largest request: one with more than there are slots has to start at some time."""
        return max((job.request.sampling.n for job in self._lobby.jobs), default=0)

    def _show(self, number: int, sample: int, token_ids: list[int], log_probs: list[float]) -> None:
        if all(map(math.isfinite, log_probs)):  # if not, the sample's end is an error that tells of it
            self.outbox.put(self._running[number], Tokens(sample, token_ids, log_probs))

    def _finish(self, number: int, sample: int, completion: Completion) -> None:
        with self._changed:
            job = self._running[number]
            job.unfinished.discard(sample)
            if not job.unfinished:
                del self._running[number]
                self._watched.discard(number)
            reason = completion.finish_reason
            setattr(self.totals, reason, getattr(self.totals, reason) + 1)
            self.totals.response_tokens += len(completion.token_ids)
            self.outbox.put(job, Finished(sample, completion, self._weights))

    # -- with the lock held

    def _fail(self, jobs: Iterable[Job], event: Event) -> None:
        for job in jobs:
            self.totals.failures += 1
            job.unfinished.clear()
            self.outbox.put(job, event)

    def _abort_running(self) -> None:
        if self._streaming:
            self.engine.abort(list(self._running))

    def _stop(self, jobs: set[Job]) -> None:
        with self._changed:
            for job in self._lobby.remove(jobs):
                for sample in sorted(job.unfinished):
                    nothing = Completion([], [], "abort", self._weights.version)
                    self.outbox.put(job, Finished(sample, nothing, self._weights))
                job.unfinished.clear()
            numbers = [number for number, job in self._running.items() if job in jobs]
            if numbers and self._streaming:
                self.engine.abort(numbers)
            self.outbox.flush()


def _answer(function: Callable[[], Any], done: Future) -> None:
    """Run a call, and give its result or its error to who waits."""
    try:
        done.set_result(function())
    except Exception as error:
        done.set_exception(error)
