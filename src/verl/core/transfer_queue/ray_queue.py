"""The transfer queue of a Ray cluster: books in one actor, rows beside them or, where they are large, in the object store."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.core.transfer_queue.api import QueueClosed, Row, Unfinished, Waiting
from verl.core.transfer_queue.ledger import Bounds
from verl.core.transfer_queue.local import checked, entries, read_state, state_of
from verl.core.transfer_queue.ray_actor import QueueActor, Stored
from verl.core.transfer_queue.rows import batch_of, pack, unpack
from verl.data.batch import SampleBatch

MOST_WAITING = 10_000


class RayTransferQueue:
    """See `TransferQueue`. It may be handed to other Ray processes, and used from all of their threads.

    The queue lives as long as the process that made it, or until no process holds it any more. Its actor takes no CPU away
    from the cluster. If it dies, every call raises QueueClosed.
    """

    def __init__(
        self,
        capacity: int | None = None,
        staleness: float | None = None,
        groups_per_version: int | None = None,
        in_order: bool = False,
        version: int = 0,
    ):
        """As LocalTransferQueue. Ray has to be up."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = ray.remote(QueueActor).options(num_cpus=0, max_concurrency=MOST_WAITING, scheduling_strategy=here)
        self._actor = options.remote(Bounds(capacity, staleness, groups_per_version, in_order), version)

    def add_group(self, uid: str, size: int, order: int, version: int, timeout: float | None = None) -> bool:
        who = f"{threading.current_thread().name} (process {os.getpid()})"
        return self._call("add_group", who, uid, size, order, version, timeout)

    def put(self, uid: str, index: int, fields: Mapping[str, Any]) -> None:
        self.put_many([(uid, index, fields)])

    def put_many(self, rows: Sequence[Row]) -> None:
        rows = checked(rows)
        self._call("put", entries(rows), to_bytes(rows))

    def register(self, consumer: str, needs: Sequence[str], gives: Sequence[str] = ()) -> None:
        self._call("books", "register", consumer, needs, gives)

    def take(self, consumer: str, groups: int, timeout: float | None = None) -> SampleBatch | None:
        stored = self._call("take", consumer, groups, timeout)
        return None if stored is None else batch_of(stored.uids, fetch(stored))

    def release(self, uids: Iterable[str]) -> None:
        self._call("books", "release", list(uids))

    def drop(self, uid: str) -> None:
        self._call("books", "drop", uid)

    def advance(self, version: int) -> None:
        self._call("books", "advance", version)

    def end(self) -> None:
        self._call("books", "end")

    def close(self, error: BaseException | None = None) -> None:
        self._call("books", "close", _travelling(error))

    def waiting(self) -> list[Waiting]:
        return self._call("report", "waiting")

    def stats(self) -> dict[str, float]:
        return self._call("report", "stats")

    def unfinished(self, needs: Sequence[str]) -> list[Unfinished]:
        return self._call("report", "unfinished", needs)

    def read(self, uid: str) -> list[dict[str, Any]]:
        return fetch(self._call("read", uid))

    def state_dict(self) -> dict[str, Any]:
        books, stored = self._call("state")
        groups: dict[str, list[dict[str, Any]]] = {}
        for uid, row in zip(stored.uids, fetch(stored), strict=True):
            groups.setdefault(uid, []).append(row)
        return state_of(books, groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        books, groups = read_state(state)
        # A chunk a group, so that each is freed with its group.
        rows = [[(uid, i, row) for i, row in enumerate(rows)] for uid, rows in groups.items()]
        self._call("load", books, [(entries(group), to_bytes(group)) for group in rows])

    def _call(self, method: str, *arguments: Any) -> Any:
        """What the actor's method gives or raises. A caller that is interrupted no longer waits there either."""
        try:
            answer = getattr(self._actor, method).remote(*arguments)
            try:
                return ray.get(answer)
            except (RayTaskError, RayActorError):
                raise
            except BaseException:
                ray.cancel(answer)
                raise
        except RayTaskError as error:
            if isinstance(error.cause, QueueClosed):
                raise QueueClosed(error.cause.error) from error.cause.error
            raise error.cause from None
        except RayActorError as error:
            raise QueueClosed(error) from error


def to_bytes(rows: Sequence[Row]) -> bytes:
    """Rows with their places as one chunk. Tensors travel as numpy arrays, which pickle much faster."""
    packed = pack([fields for _, _, fields in rows])
    for part in packed["parts"]:
        if isinstance(part["values"], torch.Tensor):
            part["values"], part["dtype"] = _to_numpy(part["values"])
    return pickle.dumps(([(uid, index) for uid, index, _ in rows], packed), protocol=5)


def from_bytes(chunk: bytes) -> dict[tuple[str, int], dict[str, Any]]:
    """{(uid, index): fields}."""
    places, packed = pickle.loads(chunk)
    for part in packed["parts"]:
        if "dtype" in part:
            part["values"] = torch.from_numpy(part["values"]).view(part["dtype"])
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for place, row in zip(places, unpack(packed), strict=True):
        rows.setdefault(place, {}).update(row)
    return rows


def _to_numpy(values: torch.Tensor) -> tuple[Any, torch.dtype]:
    """The same bits as an array of a type that numpy has, and the tensor's own type."""
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = values.detach().cpu()
    return values.view(plain[values.dtype.itemsize]).numpy(), values.dtype


def fetch(stored: Stored) -> list[dict[str, Any]]:
    """The rows, each with the fields of all its chunks."""
    large = [chunk for chunk in stored.chunks if isinstance(chunk, ray.ObjectRef)]
    fetched = dict(zip(large, ray.get(large)))
    chunks = [from_bytes(fetched[c] if isinstance(c, ray.ObjectRef) else c) for c in stored.chunks]
    rows, index, previous = [], 0, None
    for uid, numbers in zip(stored.uids, stored.places, strict=True):
        index = index + 1 if uid == previous else 0
        previous = uid
        row: dict[str, Any] = {}
        for number in numbers:
            row.update(chunks[number][uid, index])
        rows.append(row)
    return rows


def _travelling(error: BaseException | None) -> BaseException | None:
    """The error, or one that says the same where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
