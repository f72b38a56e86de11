"""The process that keeps the books of a cluster's transfer queue. It never looks into the payload, and needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef

from verl.core.transfer_queue.ledger import Bounds, Entry, Ledger, RoomRequest, TakeRequest

SMALL = 100_000
"""Bytes of a chunk that is kept here and travels with the answer, as small arguments of Ray's calls do."""

Chunk = bytes | ObjectRef


@dataclass(frozen=True)
class Stored:
    """Where the rows of some groups are. uids: of each row. chunks: of rows. places: for each row, the numbers of its chunks."""

    uids: list[str]
    chunks: list[Chunk]
    places: list[list[int]]


class QueueActor:
    """The books, small chunks of rows, and references to large ones in Ray's object store.

    This process puts them there and so owns them: what a producer has put outlives it. Callers wait in coroutines, which keep
    nobody else waiting.
    """

    def __init__(self, bounds: Bounds, version: int):
        self._ledger = Ledger(bounds, version)
        self._chunks: dict[str, list[list[Chunk]]] = {}  # uid -> sample -> chunks with fields of it
        lock = asyncio.Lock()
        self._room, self._ready = asyncio.Condition(lock), asyncio.Condition(lock)

    async def add_group(self, who: str, uid: str, size: int, order: int, version: int, timeout: float | None) -> bool:
        async with self._room:
            request = self._ledger.ask_room(who, uid, size, order, version)
            try:
                await _wait(self._room, lambda: self._ledger.try_add(request), timeout)
            finally:
                self._settle(request)
            if request.added:
                self._chunks[uid] = [[] for _ in range(size)]
                self._ready.notify_all()
            return request.added

    async def take(self, consumer: str, groups: int, timeout: float | None) -> Stored | None:
        async with self._ready:
            request = self._ledger.ask_groups(consumer, consumer, groups)
            try:
                await _wait(self._ready, lambda: self._ledger.try_take(request), timeout)
            finally:
                self._settle(request)
            return None if request.given is None else self._stored([group.uid for group in request.given])

    def _settle(self, request: RoomRequest | TakeRequest) -> None:
        self._ledger.settle(request)
        self._room.notify_all()  # those who let a lower order go first

    async def put(self, rows: Sequence[Entry], chunk: bytes) -> None:
        async with self._ready:
            ready = self._ledger.put(rows)
            self._keep(rows, chunk)
            if ready:
                self._ready.notify_all()

    def _keep(self, rows: Sequence[Entry], chunk: bytes) -> None:
        kept = chunk if len(chunk) <= SMALL else ray.put(chunk)
        for uid, index in dict.fromkeys((uid, index) for uid, index, *_ in rows):
            self._chunks[uid][index].append(kept)

    async def books(self, method: str, *arguments: Any) -> Any:
        """Call a method of the books that changes them without waiting."""
        async with self._room:
            result = getattr(self._ledger, method)(*arguments)
            for uid in [uid for uid in self._chunks if uid not in self._ledger.groups]:
                del self._chunks[uid]
            self._room.notify_all()
            self._ready.notify_all()
            return result

    async def report(self, method: str, *arguments: Any) -> Any:
        """Call a method of the books that changes nothing."""
        async with self._room:
            return getattr(self._ledger, method)(*arguments)

    async def read(self, uid: str) -> Stored:
        async with self._room:
            self._ledger.have(uid)
            return self._stored([uid])

    async def state(self) -> tuple[dict[str, Any], Stored]:
        async with self._room:
            return self._ledger.state(), self._stored(list(self._chunks))

    async def load(self, books: dict[str, Any], chunks: Sequence[tuple[Sequence[Entry], bytes]]) -> None:
        async with self._room:
            self._ledger.load(books, [entry for rows, _ in chunks for entry in rows])
            self._chunks = {known["uid"]: [[] for _ in range(known["size"])] for known in books["groups"]}
            for rows, chunk in chunks:
                self._keep(rows, chunk)

    def _stored(self, uids: Sequence[str]) -> Stored:
        rows = [(uid, chunks) for uid in uids for chunks in self._chunks[uid]]
        distinct = {id(chunk): chunk for _, chunks in rows for chunk in chunks}
        numbers = dict(zip(distinct, range(len(distinct))))
        places = [[numbers[id(chunk)] for chunk in chunks] for _, chunks in rows]
        return Stored([uid for uid, _ in rows], list(distinct.values()), places)


async def _wait(condition: asyncio.Condition, attempt: Callable[[], bool], timeout: float | None) -> None:
    """Try now, and whenever something changes, until it works or the time has passed."""
    if not attempt() and timeout != 0:
        try:
            await asyncio.wait_for(condition.wait_for(attempt), timeout)
        except TimeoutError:
            return
