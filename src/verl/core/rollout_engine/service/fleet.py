"""The servers of a run as its trainer sees them: which answer, what they hold, and how busy they are.

Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from verl.core.rollout_engine.service.kept_weights import KeptWeights
from verl.errors import CheckpointError, UserError, WorkerDied

HEALTH_SECONDS = 2.0
HEALTH_TIMEOUT = 5.0
# Looks without an answer after which a server counts as lost. A request that fails loses it at once.
MISSES = 2
# A server gets requests for somewhat more samples than it has slots, so that none is idle while the next request travels.
AHEAD = 1.25
SLICE_BYTES = 1 << 19


@dataclass(eq=False)
class Remote:
    """One server. label: of the weights that it holds; busy: samples that it has been asked for; error: why it is lost.

    lanes: HTTP clients that are not in use, each with a connection of its own.
    """

    url: str
    alive: bool = False
    label: str | None = None
    busy: int = 0
    slots: int = 1
    misses: int = 0
    error: str = "it has not answered yet"
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    lanes: list[httpx.AsyncClient] = field(default_factory=list)

    def has_room(self, samples: int) -> bool:
        return self.busy == 0 or self.busy + samples <= AHEAD * self.slots


class Fleet:
    """All servers of a run.

    Args:
        make_http: a client with the token in its headers.
        wait_seconds: for a server when there is none.
        notify: takes lines for the user.
    """

    def __init__(
        self,
        urls: list[str],
        make_http: Callable[[], httpx.AsyncClient],
        wait_seconds: float,
        notify: Callable[[str], None],
    ):
        self.remotes = [Remote(url) for url in urls]
        self._make_http, self._wait_seconds, self._notify = make_http, wait_seconds, notify
        self.http = make_http()
        self.kept: KeptWeights | None = None
        self._changed = asyncio.Condition()
        self._asleep = False

    @property
    def ready(self) -> list[Remote]:
        """Servers that answer and hold the newest weights."""
        return [r for r in self.remotes if r.alive and self.kept is not None and r.label == self.kept.label]

    @property
    def version(self) -> int:
        """Of the newest weights."""
        return self.kept.version if self.kept is not None else 0

    async def choose(self, samples: int, stopped: Callable[[], bool]) -> Remote | None:
        """The least busy server that has room, which is then busy with `samples` more; waits until there is one.

        None as soon as `stopped`; see `wake`.

        Raises:
            WorkerDied: no server was ready for `wait_seconds`.
        """
        async with self._changed:
            while not stopped():
                able = [r for r in self.ready if r.has_room(samples)]
                if able:
                    chosen = min(able, key=lambda r: r.busy / r.slots)
                    chosen.busy += samples
                    return chosen
                await self._wait_for_change(stopped)
        return None

    @contextlib.asynccontextmanager
    async def lane(self, remote: Remote) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one request at a time: a pool of httpx's looks at all of its connections for each request."""
        http = remote.lanes.pop() if remote.lanes else self._make_http()
        try:
            yield http
        finally:
            remote.lanes.append(http)

    async def close(self) -> None:
        """Close all connections."""
        for http in [self.http, *(lane for remote in self.remotes for lane in remote.lanes)]:
            await http.aclose()

    async def wake(self) -> None:
        """Let those that wait look again whether they are stopped."""
        async with self._changed:
            self._changed.notify_all()

    async def free(self, remote: Remote, samples: int) -> None:
        """The server is no longer busy with these."""
        async with self._changed:
            remote.busy -= samples
            self._changed.notify_all()

    async def _wait_for_change(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """With the condition held. While servers are ready, they take their time; without one, only so long."""
        if self.ready:
            await self._changed.wait()
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._changed.wait_for(lambda: self.ready or stopped())
        except TimeoutError:
            raise self._all_lost() from None

    def _all_lost(self) -> WorkerDied:
        words = "; ".join(f"{r.url}: {r.error}" for r in self.remotes)
        return WorkerDied(
            f"no rollout server was ready for {self._wait_seconds:g} seconds (rollout.server.wait_seconds). {words}"
        )

    async def lose(self, remote: Remote, error: str) -> None:
        """Take a server for dead until it answers again."""
        async with self._changed:
            if remote.alive:
                self._notify(f"rollout server {remote.url} is lost ({error}); what it had goes to others.")
            remote.alive, remote.label, remote.error = False, None, error
            self._changed.notify_all()

    async def watch(self) -> None:
        """Look after the servers for ever: who is back gets the weights, then requests."""
        while True:
            await asyncio.gather(*(self.look(remote) for remote in self.remotes))
            await asyncio.sleep(HEALTH_SECONDS)

    async def look(self, remote: Remote) -> None:
        """One look at one server."""
        if remote.sending.locked():
            return
        try:
            answer = await self.http.get(f"{remote.url}/health", timeout=HEALTH_TIMEOUT)
            facts = answer.json()
            if answer.status_code != 200:
                raise httpx.HTTPError(facts.get("reason", f"status {answer.status_code}"))
        except (httpx.HTTPError, ValueError) as error:
            remote.misses += 1
            if remote.misses >= MISSES or not remote.alive:
                await self.lose(remote, describe(error))
            return
        remote.misses, remote.slots, remote.label = 0, facts["slots"], facts["weights"]
        sleeps = facts["status"] == "sleeping"
        if self._asleep and not sleeps:
            sleeps = await self._order(remote, "/sleep")
            if not sleeps:
                return
        kept = self.kept
        if kept is not None and kept.whole and remote.label != kept.label and not sleeps:
            with contextlib.suppress(UserError, httpx.HTTPError):
                await self.send(remote, kept)
        elif not remote.alive:
            await self._found(remote)

    async def _found(self, remote: Remote) -> None:
        async with self._changed:
            if not remote.alive and self.kept is not None:
                self._notify(f"rollout server {remote.url} is there.")
            remote.alive = True
            self._changed.notify_all()

    async def publish(self, kept: KeptWeights) -> None:
        """Send new weights to every server; returns when all that are there have them, and at least one has.

        Raises:
            CheckpointError: a server says that they do not fit its model.
            WorkerDied: no server took them.
        """
        results = await asyncio.gather(*(self.send(r, kept) for r in self.remotes if r.alive), return_exceptions=True)
        for error in results:
            if isinstance(error, UserError):
                raise error
        async with self._changed:
            while not self.ready:
                await self._wait_for_change()

    async def send(self, remote: Remote, kept: KeptWeights) -> None:
        """Send weights to one server, which is lost if that fails.

        Raises:
            CheckpointError: they do not fit its model.
        """
        async with remote.sending:
            try:
                await self._send(remote, kept)
            except httpx.HTTPError as error:
                await self.lose(remote, f"while it was sent weights: {describe(error)}")
                return
            remote.label = kept.label
        await self._found(remote)

    async def _send(self, remote: Remote, kept: KeptWeights) -> None:
        about: dict[str, Any] = {"version": kept.version, "label": kept.label}
        if kept.folder is not None:
            await kept.wait_whole()
            await self._post_weights(remote, json={"path": str(kept.folder), **about})
            return
        about["update"], number = uuid.uuid4().hex, 0
        part = await kept.part(0)
        while part is not None:
            following = await kept.part(number + 1)
            about.update(part=number, last=following is None)
            await self._post_weights(remote, part, params=about)
            part, number = following, number + 1

    async def _post_weights(self, remote: Remote, part: bytes | None = None, **body: Any) -> None:
        if part is not None:
            body["headers"] = {"Content-Type": "application/octet-stream", "Content-Length": str(len(part))}
            body["content"] = slices(part)
        waits = httpx.Timeout(HEALTH_TIMEOUT, read=self._wait_seconds, write=self._wait_seconds, pool=None)
        answer = await self.http.post(f"{remote.url}/update_weights", timeout=waits, **body)
        if answer.status_code == 400:
            raise CheckpointError(f"rollout server {remote.url}: {message_of(answer)}")
        if answer.status_code != 200:
            raise httpx.HTTPError(f"status {answer.status_code}: {message_of(answer)}")

    async def sleep(self) -> None:
        """All servers give their memory back; one that comes later does so when it comes, until `rouse`."""
        self._asleep = True
        await self._order_all("/sleep")

    async def rouse(self) -> None:
        """Undo `sleep`."""
        self._asleep = False
        await self._order_all("/wake")

    async def _order_all(self, path: str) -> None:
        await asyncio.gather(*(self._order(remote, path) for remote in self.remotes if remote.alive))

    async def _order(self, remote: Remote, path: str) -> bool:
        """A control route of a server, which is lost if that fails; whether it has done it."""
        try:
            answer = await self.http.post(f"{remote.url}{path}", json={}, timeout=self._wait_seconds)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            await self.lose(remote, f"{path}: {describe(error)}")
            return False
        return True


async def slices(part: bytes) -> AsyncIterator[bytes]:
    """In pieces: the event loop moves what is left of a large one after each write."""
    for start in range(0, len(part), SLICE_BYTES):
        yield part[start : start + SLICE_BYTES]


def describe(error: Exception) -> str:
    """A failure in words; many of httpx's have none of their own."""
    words = {
        httpx.ConnectError: "no connection",
        httpx.ConnectTimeout: "no connection",
        httpx.ReadTimeout: "it is silent",
        httpx.RemoteProtocolError: "the connection broke",
        httpx.ReadError: "the connection broke",
    }
    return words.get(type(error)) or str(error) or type(error).__name__


def message_of(answer: httpx.Response) -> str:
    """What an answer says is wrong."""
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
