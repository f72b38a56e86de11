"""One request on its way through the servers, until all of its samples have come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx

from verl.core.rollout_engine.api import Completion, Request
from verl.core.rollout_engine.service.fleet import Fleet, Remote, describe, message_of
from verl.core.rollout_engine.service.wire import completion_of, generate_body
from verl.errors import UserError, WorkerDied

# A request that is lost with so many servers may be what kills them; one that fails so often is at fault itself.
MOST_LOSSES = 10
MOST_FAILURES = 3
BACKOFF_SECONDS = 0.5


class _Lost(Exception):
    """The server has gone, or cannot answer now."""


class _Busy(Exception):
    """The server has no room for more requests."""


class _Stale(Exception):
    """The server holds other weights."""


class _Failed(Exception):
    """The server's engine failed."""


class Group:
    """A request and its samples. Runs on the client's event loop.

    number: of the request in its stream. put: takes (number, sample, completion), or an error that ends the stream. left:
    samples that the stream has not yielded, counted by it. task: of `run`.
    """

    def __init__(self, number: int, request: Request, fleet: Fleet, put: Callable[[Any], None]):
        self.number, self.request, self._fleet, self._put = number, request, fleet, put
        self.left = request.sampling.n
        self.task: Future = Future()
        self._come: set[int] = set()
        self._remote: Remote | None = None
        self._name = ""
        self._aborted = self._done = False

    async def run(self) -> None:
        """Ask servers until every sample has come, each once."""
        try:
            await self._run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._put(error)
        finally:
            self._done = True

    async def _run(self) -> None:
        n, losses, failures = self.request.sampling.n, 0, 0
        while len(self._come) < n:
            remote = await self._fleet.choose(n, lambda: self._aborted)
            if remote is None:  # aborted before a server had it, or when its server died
                self._give_up()
                return
            try:
                await self._ask(remote)
            except _Busy:
                await asyncio.sleep(BACKOFF_SECONDS)
            except _Stale:
                await self._fleet.lose(remote, "it holds other weights")
                await self._fleet.look(remote)  # which sends it the right ones
            except _Failed as error:
                failures += 1
                if failures == MOST_FAILURES:
                    raise UserError(f"rollout server {remote.url}: {error}") from None
            except _Lost as error:
                losses += 1
                await self._fleet.lose(remote, str(error))
                if losses == MOST_LOSSES:
                    raise WorkerDied(
                        f"a request was lost with {losses} rollout servers, the last at {remote.url} ({error})."
                    ) from None
            finally:
                self._remote = None
                await self._fleet.free(remote, n)

    async def _ask(self, remote: Remote) -> None:
        self._remote, self._name = remote, uuid.uuid4().hex
        label = remote.label
        body = generate_body(self.request, self._name, label)
        try:
            async with (
                self._fleet.lane(remote) as http,
                http.stream("POST", f"{remote.url}/generate", json=body) as answer,
            ):
                if answer.status_code != 200:
                    await answer.aread()
                    _raise_status(answer.status_code, message_of(answer))
                async for line in answer.aiter_lines():
                    if line.strip():
                        self._take(json.loads(line), label)
        except (httpx.TransportError, ValueError) as error:
            raise _Lost(describe(error)) from None
        if len(self._come) < self.request.sampling.n:
            raise _Lost("it ended its answer early")

    def _take(self, line: dict[str, Any], label: str | None) -> None:
        if "error" in line:
            _raise_status(line["error"]["status"], line["error"]["message"])
        if line["weights"] != label:
            raise _Stale
        if line["finish_reason"] == "abort" and not self._aborted:
            raise _Lost("it stopped the request")
        if line["sample"] not in self._come:  # one that came before its first server died comes again
            self._come.add(line["sample"])
            self._put((self.number, line["sample"], completion_of(line)))

    async def abort(self) -> None:
        """End it with what it has. Told again until it ends: the server may not have had it yet."""
        self._aborted = True
        await self._fleet.wake()
        while not self._done:
            if self._remote is not None:
                url, names = self._remote.url, [self._name]
                with contextlib.suppress(httpx.HTTPError):  # the request itself will find out
                    await self._fleet.http.post(f"{url}/abort", json={"names": names})
            await asyncio.sleep(BACKOFF_SECONDS)

    def _give_up(self) -> None:
        for sample in range(self.request.sampling.n):
            if sample not in self._come:
                self._put((self.number, sample, Completion([], [], "abort", self._fleet.version)))


def _raise_status(status: int, message: str) -> None:
    if status == 409:
        raise _Stale
    if status == 429:
        raise _Busy
    if status == 500:
        raise _Failed(message)
    if status >= 500:
        raise _Lost(message)
    raise UserError(f"a rollout server refused a request (status {status}): {message}")
