"""The transfer queue of one process, between its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.core.transfer_queue.api import Row, Unfinished, Waiting
from verl.core.transfer_queue.ledger import Bounds, Entry, Ledger
from verl.core.transfer_queue.rows import batch_of, check_value, pack, sizes, unpack
from verl.data.batch import SampleBatch

FORMAT = 1


class LocalTransferQueue:
    """See `TransferQueue`. Every method may be called from any thread."""

    def __init__(
        self,
        capacity: int | None = None,
        staleness: float | None = None,
        groups_per_version: int | None = None,
        in_order: bool = False,
        version: int = 0,
    ):
        """version: of the policy at the start, for a run that goes on from a checkpoint without a queue in it."""
        self._ledger = Ledger(Bounds(capacity, staleness, groups_per_version, in_order), version)
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.RLock()
        # Producers and consumers wait apart, so that a sample's fields wake no producer.
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)

    def add_group(self, uid: str, size: int, order: int, version: int, timeout: float | None = None) -> bool:
        with self._lock:
            request = self._ledger.ask_room(threading.current_thread().name, uid, size, order, version)
            try:
                added = self._room.wait_for(lambda: self._ledger.try_add(request), timeout)
            finally:
                self._ledger.settle(request)
                self._room.notify_all()  # those who let a lower order go first
            if added:
                self._rows[uid] = [{} for _ in range(size)]
                self._ready.notify_all()
            return added

    def put(self, uid: str, index: int, fields: Mapping[str, Any]) -> None:
        self.put_many([(uid, index, fields)])

    def put_many(self, rows: Sequence[Row]) -> None:
        rows = checked(rows)
        with self._lock:
            ready = self._ledger.put(entries(rows))
            for uid, index, fields in rows:
                self._rows[uid][index].update(fields)
            if ready:
                self._ready.notify_all()

    def register(self, consumer: str, needs: Sequence[str], gives: Sequence[str] = ()) -> None:
        with self._lock:
            self._ledger.register(consumer, needs, gives)

    def take(self, consumer: str, groups: int, timeout: float | None = None) -> SampleBatch | None:
        with self._lock:
            request = self._ledger.ask_groups(consumer, consumer, groups)
            try:
                self._ready.wait_for(lambda: self._ledger.try_take(request), timeout)
            finally:
                self._ledger.settle(request)
            if request.given is None:
                return None
            uids = [group.uid for group in request.given for _ in range(group.size)]
            # A row may get more fields while the batch is put together outside the lock.
            rows = [dict(row) for group in request.given for row in self._rows[group.uid]]
        return batch_of(uids, rows)

    def release(self, uids: Iterable[str]) -> None:
        with self._lock:
            uids = list(uids)
            self._ledger.release(uids)
            self._forget(uids)

    def drop(self, uid: str) -> None:
        with self._lock:
            self._ledger.drop(uid)
            self._forget([uid])

    def _forget(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._rows.pop(uid, None)
        self._wake()

    def _wake(self) -> None:
        self._room.notify_all()
        self._ready.notify_all()

    def advance(self, version: int) -> None:
        with self._lock:
            self._ledger.advance(version)
            self._room.notify_all()

    def end(self) -> None:
        with self._lock:
            self._ledger.end()
            self._wake()

    def close(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._ledger.close(error)
            self._wake()

    def waiting(self) -> list[Waiting]:
        with self._lock:
            return self._ledger.waiting()

    def stats(self) -> dict[str, float]:
        with self._lock:
            return self._ledger.stats()

    def unfinished(self, needs: Sequence[str]) -> list[Unfinished]:
        with self._lock:
            return self._ledger.unfinished(needs)

    def read(self, uid: str) -> list[dict[str, Any]]:
        with self._lock:
            self._ledger.have(uid)
            return [dict(row) for row in self._rows[uid]]

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            books = self._ledger.state()
            groups = {uid: [dict(row) for row in rows] for uid, rows in self._rows.items()}
        return state_of(books, groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        books, groups = read_state(state)
        with self._lock:
            self._ledger.load(
                books, entries([(uid, i, row) for uid, rows in groups.items() for i, row in enumerate(rows)])
            )
            self._rows = groups
            self._wake()


def checked(rows: Sequence[Row]) -> list[tuple[str, int, dict[str, Any]]]:
    """Rows whose values are fit to be kept. A field `uid` is the group's own, and left out."""
    found = []
    for uid, index, fields in rows:
        if fields.get("uid", uid) != uid:
            raise ValueError(f"sample {index} of group '{uid}' has a field uid '{fields['uid']}'")
        for name, value in fields.items():
            check_value(name, value)
        found.append((uid, index, {name: value for name, value in fields.items() if name != "uid"}))
    return found


def entries(rows: Sequence[Row]) -> list[Entry]:
    """What the books say of rows."""
    return [(uid, index, list(fields), *sizes(fields)) for uid, index, fields in rows]


def state_of(books: dict[str, Any], groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A queue's state from its books and the rows of each group."""
    rows = []
    for known in books["groups"]:
        left_out = set(known.pop("left_out"))
        rows += [{name: v for name, v in row.items() if name not in left_out} for row in groups[known["uid"]]]
    return {"format": FORMAT, "books": books, "rows": pack(rows)}


def read_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The books and the rows of each group.

    Raises:
        ValueError: it is no such state, or one of another format.
    """
    if state.get("format") != FORMAT:
        raise ValueError(f"not the state of a transfer queue of format {FORMAT}: format is {state.get('format')!r}")
    books, rows = state["books"], iter(unpack(state["rows"]))
    return books, {known["uid"]: [next(rows) for _ in range(known["size"])] for known in books["groups"]}
