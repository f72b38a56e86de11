"""The inside of a reward worker process: score a chunk of samples, each under a time limit.

Nothing here or below imports torch, so a worker is up in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from typing import Any

from verl.errors import RewardError
from verl.rewards.custom import CustomFunction
from verl.rewards.outcome import call_arguments, failure, raised, read_outcome
from verl.rewards.types import Outcome, RewardInput, ScoreFunction

CHUNK_SECONDS = 1.0
"""A chunk of a slow function stops after this long and gives the rest back, for whichever worker is free."""
GRACE_SECONDS = 2.0
"""A function that does not react to its time limit for this long is killed with its process."""
LAG_INTERVAL = 0.05

_custom: ScoreFunction | str | None = None


class SampleTimeout(BaseException):
    """Raised inside a reward function at its time limit. Not an Exception, so that `except Exception` lets it pass."""


def start_worker(custom: CustomFunction | None, imports: tuple[str, ...], limit: float) -> None:
    """Import modules and load the user's function, once a process, in at most `limit` seconds.

    A failure is left to the first chunk to report.
    """
    global _custom
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    for name in imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if custom is None:
        return
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        _custom = custom.load()
    except RewardError as error:
        _custom = str(error)
    except SampleTimeout:
        _custom = f"The import of custom_reward_function.path={custom.path} took longer than {limit:.0f} s there."
    except BaseException as error:
        _custom = f"The import of custom_reward_function.path={custom.path} raised {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _end_with_parent() -> None:
    """Kill this process when the trainer is gone, also in the middle of a sample: nobody would take its score."""
    # Time limits interrupt what the main thread waits for only if their signal does not end up in this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def ready() -> bool:
    """An empty task, which makes the pool start its workers."""
    return True


def score_chunk(function: ScoreFunction | None, samples: list[RewardInput], timeout: float) -> list[Outcome | None]:
    """Outcomes of the samples; None for one that is given back unscored. function None: the user's own."""
    function = _custom if function is None else function
    if isinstance(function, str):
        raise RewardError(f"The reward function loads in the trainer but not in a worker process. {function}")
    if is_async(function):
        return _score_concurrently(function, samples, timeout)
    signal.signal(signal.SIGALRM, _on_alarm)
    started = time.monotonic()
    outcomes: list[Outcome | None] = []
    for sample in samples:
        if outcomes and time.monotonic() - started > CHUNK_SECONDS:
            break
        outcomes.append(_score_one(function, sample, timeout))
    return outcomes + [None] * (len(samples) - len(outcomes))


def is_async(function: ScoreFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _on_alarm(signum: int, frame: Any) -> None:
    raise SampleTimeout


def _score_one(function: ScoreFunction, sample: RewardInput, timeout: float) -> Outcome:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            value = function(**call_arguments(sample))
            if inspect.isawaitable(value):  # a plain function that hands on a coroutine
                value = asyncio.run(_awaited(value))
        finally:
            time_left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
            if time_left == 0:  # the function used the alarm itself: its handler may stand in the place of ours
                signal.signal(signal.SIGALRM, _on_alarm)
        return read_outcome(value, sample)
    except SampleTimeout:
        return failure(_too_slow(timeout), sample)
    except BaseException as error:  # a panic of a compiled extension, for instance, is no Exception
        return failure(raised(error), sample)


def _too_slow(timeout: float) -> str:
    return f"the reward function took longer than reward.timeout={timeout:g} s"


async def _awaited(value: Any) -> Any:
    return await value


def _score_concurrently(function: ScoreFunction, samples: list[RewardInput], timeout: float) -> list[Outcome | None]:
    """All samples of the chunk in one event loop, each with its own time limit."""
    signal.signal(signal.SIGALRM, _on_alarm)
    # For a coroutine that blocks the loop, so that no limit inside the loop can strike.
    signal.setitimer(signal.ITIMER_REAL, timeout + GRACE_SECONDS / 2)
    try:
        return asyncio.run(_gather(function, samples, timeout))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def _gather(function: ScoreFunction, samples: list[RewardInput], timeout: float) -> list[Outcome | None]:
    lag = 0.0  # seconds for which the loop was held up, all together, until the last tick
    tick = started = time.monotonic()  # when the watcher, and when a sample's first step, last had their turn

    def overdue() -> float:
        return max(0.0, time.monotonic() - tick - LAG_INTERVAL)

    async def watch_loop() -> None:
        nonlocal lag, tick
        while True:
            await asyncio.sleep(LAG_INTERVAL)
            lag, tick = lag + overdue(), time.monotonic()

    async def score(sample: RewardInput) -> Outcome | None:
        nonlocal started
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout) as limit:
                value = await function(**call_arguments(sample))
            return read_outcome(value, sample)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # the chunk as a whole is being ended; a function that raises it by itself is a failure
            blocked = isinstance(error, SampleTimeout)
            if not blocked and not limit.expired():
                return failure(raised(error), sample)
            guilty = blocked and time.monotonic() - max(tick, started) >= timeout  # it alone held the loop so long
            # Others may have held up the loop: who is slow shows only when each is tried in smaller company.
            starved = lag + overdue() > timeout / 2 and len(samples) > 1
            return None if starved and not guilty else failure(_too_slow(timeout), sample)

    watcher = asyncio.create_task(watch_loop())
    try:
        return list(await asyncio.gather(*map(score, samples)))
    finally:
        watcher.cancel()
