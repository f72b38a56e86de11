"""From jobs to answers: the events of some jobs, and responses that free the slots when their client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from verl.core.rollout_engine.service.jobs import Failed, Finished, Job, Refused, Tokens
from verl.core.rollout_engine.service.loop import EngineLoop

R = TypeVar("R")
T = TypeVar("T")

CLIENT_GONE = 499
END: Any = object()


async def events(jobs: Sequence[Job]) -> AsyncIterator[tuple[Job, Tokens | Finished]]:
    """Events of `jobs`, which share one queue, to the last sample's.

    Raises:
        Refused: a job failed.
    """
    left = sum(job.request.sampling.n for job in jobs)
    while left:
        job, event = await jobs[0].events.get()
        if isinstance(event, Failed):
            raise Refused(event.status, event.message, "failed")
        left -= isinstance(event, Finished)
        yield job, event


async def with_beats(items: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """The items, and None whenever nothing came for so long."""
    coming = asyncio.ensure_future(anext(items, END))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield None
                continue
            item = coming.result()
            if item is END:
                return
            coming = asyncio.ensure_future(anext(items, END))
            yield item
    finally:
        coming.cancel()


async def finished(jobs: Sequence[Job]) -> list[list[Finished]]:
    """All samples of each job, in order."""
    found: dict[tuple[Job, int], Finished] = {}
    async for job, event in events(jobs):
        if isinstance(event, Finished):
            found[job, event.sample] = event
    return [[found[job, j] for j in range(job.request.sampling.n)] for job in jobs]


async def unless_gone(request: HTTPRequest, loop: EngineLoop, jobs: Sequence[Job], result: Coroutine[Any, Any, R]) -> R:
    """The result, for which these jobs are done; they are dropped when their client goes.

    Raises:
        Refused: the client has gone.
    """
    waiting, leaving = asyncio.ensure_future(result), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refused(CLIENT_GONE, "The client has gone.")
        return waiting.result()
    finally:
        waiting.cancel()
        leaving.cancel()
        loop.abandon(jobs)


async def _gone(request: HTTPRequest) -> None:
    """Returns when the client closes the connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class JobStream(StreamingResponse):
    """An answer in pieces. When it ends, for whatever reason, what the engine still does for it is dropped."""

    def __init__(self, content: AsyncIterator[str], jobs: Sequence[Job], loop: EngineLoop, **options: Any):
        super().__init__(content, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, **options)
        self._pieces, self._jobs, self._engine_loop = content, jobs, loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces):  # type: ignore[type-var]
                await super().__call__(scope, receive, send)
        finally:
            self._engine_loop.abandon(self._jobs)
