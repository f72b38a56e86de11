"""The books of a transfer queue: which groups are held, what their samples have, and who may go on.

No payload, no locks, no waiting: both queues keep their books with this class, and so behave alike. A caller that may have
to wait asks with a request, tries it as often as something changes, and settles it in the end.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from verl.core.transfer_queue.api import QueueClosed, QueueEnded, Unfinished, Waiting

Entry = tuple[str, int, Sequence[str], int, int]
"""Of a row: (uid, index, field names, tokens, bytes)."""


@dataclass(frozen=True)
class Bounds:
    """See TransferQueue. capacity: groups, None for any number. staleness: None for any; else groups_per_version is needed."""

    capacity: int | None = None
    staleness: float | None = None
    groups_per_version: int | None = None
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; it has to be at least 1 group")
        if self.staleness is not None and (self.staleness < 0 or not self.groups_per_version):
            raise ValueError(
                f"staleness is {self.staleness} with groups_per_version {self.groups_per_version}; they have to be at least 0 and 1"
            )


@dataclass(eq=False, slots=True)
class Group:
    """A group that is held. have: the fields of each sample. counts: {field: samples that have it}."""

    uid: str
    size: int
    order: int
    version: int
    serial: int
    have: list[set[str]]
    counts: Counter[str] = field(default_factory=Counter)
    taken_by: set[str] = field(default_factory=set)
    tokens: int = 0
    bytes: int = 0

    def has(self, fields: Iterable[str]) -> bool:
        return all(self.counts[name] == self.size for name in fields)

    def lacking(self, fields: Sequence[str]) -> dict[int, tuple[str, ...]]:
        missing = ((i, tuple(f for f in fields if f not in have)) for i, have in enumerate(self.have))
        return {i: names for i, names in missing if names}

    def __lt__(self, other: Group) -> bool:
        return (self.order, self.serial) < (other.order, other.serial)


@dataclass(eq=False)
class Consumer:
    """left: held groups that it has not taken, by uid, in the order in which they were added. ready: those it could take."""

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    left: dict[str, Group] = field(default_factory=dict)
    ready: dict[str, Group] = field(default_factory=dict)


@dataclass(eq=False)
class RoomRequest:
    """added: whether the group was."""

    who: str
    uid: str
    size: int
    order: int
    version: int
    since: float = field(default_factory=time.monotonic)
    added: bool = False


@dataclass(eq=False)
class TakeRequest:
    """given: the groups, once it is granted."""

    who: str
    consumer: Consumer
    groups: int
    since: float = field(default_factory=time.monotonic)
    given: list[Group] | None = None


class Ledger:
    """The books. Not safe for threads; each queue serialises its calls."""

    def __init__(self, bounds: Bounds, version: int = 0):
        """version: of the policy at the start. The groups of versions before it count as added."""
        self.bounds = bounds
        self.version = version
        self.groups: dict[str, Group] = {}
        self.consumers: dict[str, Consumer] = {}
        self.ended = False
        self.closed: QueueClosed | None = None
        self._added = version * (bounds.groups_per_version or 0)
        self._last_order: int | None = None
        self._serial = 0
        self._rooms: list[RoomRequest] = []
        self._takes: list[TakeRequest] = []
        self._done: dict[str, set[str]] = {}  # uid -> consumers that a loaded state says are done with it
        self._counts: Counter[str] = Counter()
        self._waited = {"producer": 0.0, "consumer": 0.0}

    def check_open(self) -> None:
        if self.closed is not None:
            raise QueueClosed(self.closed.error) from self.closed.error

    # Producers.

    def ask_room(self, who: str, uid: str, size: int, order: int, version: int) -> RoomRequest:
        self.check_open()
        if size < 1:
            raise ValueError(f"group '{uid}' has {size} samples; it needs at least one")
        request = RoomRequest(who, uid, size, order, version)
        self._rooms.append(request)
        return request

    def try_add(self, request: RoomRequest) -> bool:
        """Whether the group is added now."""
        self.check_open()
        if self.ended:
            raise QueueEnded(f"group '{request.uid}' comes after the queue's end")
        if request.uid in self.groups:
            raise ValueError(f"a group '{request.uid}' is held already")
        if self.bounds.in_order and self._last_order is not None and request.order <= self._last_order:
            raise ValueError(
                f"group '{request.uid}' has order {request.order} and comes after one of order {self._last_order}; a queue that "
                "keeps the order takes groups by ascending order"
            )
        if self._held_back(request) is not None:
            return False
        self._added += 1
        self._counts["groups_added"] += 1
        self._hold(request.uid, request.size, request.order, request.version)
        request.added = True
        return True

    def _hold(self, uid: str, size: int, order: int, version: int) -> Group:
        group = Group(uid, size, order, version, self._serial, [set() for _ in range(size)])
        self._serial += 1
        self._last_order = order if self._last_order is None else max(order, self._last_order)
        self.groups[uid] = group
        for consumer in self.consumers.values():
            self._offer(group, consumer)
        return group

    def _offer(self, group: Group, consumer: Consumer) -> None:
        """A group that is new to a consumer."""
        if consumer.name in self._done.get(group.uid, ()):
            group.taken_by.add(consumer.name)
        else:
            consumer.left[group.uid] = group
            if group.has(consumer.needs):
                consumer.ready[group.uid] = group

    def _held_back(self, request: RoomRequest) -> tuple[str, str] | None:
        """(kind, words) of what keeps a producer back."""
        bounds = self.bounds
        if bounds.capacity is not None and len(self.groups) >= bounds.capacity:
            taken = sum(bool(g.taken_by) for g in self.groups.values())
            held = f"{len(self.groups)} groups are held, {taken} of them taken and not released; capacity {bounds.capacity}"
            return "room", f"room for group '{request.uid}': {held}"
        if bounds.staleness is not None:
            limit = (self.version + 1 + bounds.staleness) * bounds.groups_per_version
            if self._added >= limit:
                rule = f"version {self.version} allows {limit:g} groups in all and {self._added} were added"
                return "staleness", f"a newer policy to start group '{request.uid}': {rule}"
        first = min(self._rooms, key=lambda r: r.order, default=request)
        if first.order < request.order:
            return "turn", f"group '{first.uid}' to be added before group '{request.uid}'"
        return None

    def put(self, rows: Sequence[Entry]) -> bool:
        """Enter rows, all or none. Whether a group became ready for a consumer."""
        self.check_open()
        new: set[tuple[str, int, str]] = set()
        for uid, index, names, _, _ in rows:
            group = self._group(uid)
            if not 0 <= index < group.size:
                raise ValueError(f"group '{uid}' has samples 0 to {group.size - 1}, not {index}")
            for name in names:
                if name in group.have[index] or (uid, index, name) in new:
                    raise ValueError(f"sample {index} of group '{uid}' has a field '{name}' already")
                new.add((uid, index, name))
        self._counts["puts"] += len(rows)
        return self._enter(rows)

    def _enter(self, rows: Sequence[Entry]) -> bool:
        woken = False
        for uid, index, names, tokens, size in rows:
            group = self.groups[uid]
            group.have[index].update(names)
            group.counts.update(names)
            group.tokens += tokens
            group.bytes += size
            if any(group.counts[name] == group.size for name in names):
                for consumer in self.consumers.values():
                    if uid in consumer.left and group.has(consumer.needs):
                        consumer.ready[uid] = group
                        woken = True
        return woken

    def _group(self, uid: str) -> Group:
        try:
            return self.groups[uid]
        except KeyError:
            raise ValueError(f"no group '{uid}' is held: it was never added, or is released or dropped") from None

    # Consumers.

    def register(self, name: str, needs: Sequence[str], gives: Sequence[str]) -> None:
        known = self.consumers.get(name)
        if known is not None:
            if (known.needs, known.gives) != (tuple(needs), tuple(gives)):
                raise ValueError(f"consumer '{name}' is registered with needs {known.needs} and gives {known.gives}")
            return
        consumer = self.consumers[name] = Consumer(name, tuple(needs), tuple(gives))
        for group in self.groups.values():
            self._offer(group, consumer)

    def ask_groups(self, who: str, consumer: str, groups: int) -> TakeRequest:
        self.check_open()
        if consumer not in self.consumers:
            raise ValueError(f"no consumer '{consumer}' is registered; there are {sorted(self.consumers)}")
        if groups < 1 or groups > (self.bounds.capacity or groups):
            raise ValueError(f"'{consumer}' asks for {groups} groups of a queue that holds 1 to {self.bounds.capacity}")
        request = TakeRequest(who, self.consumers[consumer], groups)
        self._takes.append(request)
        return request

    def try_take(self, request: TakeRequest) -> bool:
        """Whether the groups are given now, to be found in `request.given`."""
        self.check_open()
        consumer = request.consumer
        if self.ended and not consumer.left:
            raise QueueEnded(f"consumer '{consumer.name}' has had all groups")
        count = min(request.groups, len(consumer.left)) if self.ended else request.groups
        if len(consumer.ready) < count:
            return False
        if self.bounds.in_order:  # `left` ascends
            chosen = list(islice(consumer.left.values(), count))
            if not all(group.uid in consumer.ready for group in chosen):
                return False
        else:
            chosen = heapq.nsmallest(count, consumer.ready.values())
        for group in chosen:
            del consumer.left[group.uid], consumer.ready[group.uid]
            group.taken_by.add(consumer.name)
        self._counts["takes"] += 1
        request.given = chosen
        return True

    def settle(self, request: RoomRequest | TakeRequest) -> None:
        """The caller has what it asked for, or asks no longer."""
        side, requests = ("producer", self._rooms) if isinstance(request, RoomRequest) else ("consumer", self._takes)
        requests.remove(request)
        self._waited[side] += time.monotonic() - request.since

    def release(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._group(uid)
        for uid in set(uids):
            self._forget(uid)
            self._counts["groups_released"] += 1

    def drop(self, uid: str) -> None:
        self._group(uid)
        self._forget(uid)
        self._added -= 1
        self._counts["groups_dropped"] += 1

    def _forget(self, uid: str) -> None:
        del self.groups[uid]
        self._done.pop(uid, None)
        for consumer in self.consumers.values():
            consumer.left.pop(uid, None)
            consumer.ready.pop(uid, None)

    def advance(self, version: int) -> None:
        if version < self.version:
            raise ValueError(f"the policy's version goes from {self.version} back to {version}")
        self.version = version

    def end(self) -> None:
        self.ended = True

    def close(self, error: BaseException | None) -> None:
        if self.closed is None:
            self.closed = QueueClosed(error)

    # Reports.

    def waiting(self) -> list[Waiting]:
        now = time.monotonic()
        found = [Waiting(r.who, *(self._held_back(r) or ("turn", "its turn")), now - r.since) for r in self._rooms]
        found += [Waiting(r.who, *self._lacks(r), now - r.since) for r in self._takes]
        return sorted(found, key=lambda w: -w.seconds)

    def _lacks(self, request: TakeRequest) -> tuple[str, str]:
        """(kind, words) of what keeps a consumer waiting."""
        consumer = request.consumer
        have = f"{len(consumer.ready)} of {request.groups} groups are ready"
        slow = min((g for uid, g in consumer.left.items() if uid not in consumer.ready), default=None)
        if slow is None:
            return "groups", f"more groups to be added: {have}"
        index, names = next(iter(slow.lacking(consumer.needs).items()))
        return "fields", f"{', '.join(names)} of sample {index} of group '{slow.uid}' (order {slow.order}): {have}"

    def stats(self) -> dict[str, float]:
        now, held = time.monotonic(), self.groups.values()
        needs = {name for consumer in self.consumers.values() for name in consumer.needs}
        counted = ("groups_added", "groups_released", "groups_dropped", "puts", "takes")
        return {
            "groups_held": len(held),
            "groups_complete": sum(group.has(needs) for group in held),
            "groups_taken": sum(bool(group.taken_by) for group in held),
            "tokens_held": sum(group.tokens for group in held),
            "bytes_held": sum(group.bytes for group in held),
            **{name: self._counts[name] for name in counted},
            "producer_wait_seconds": self._waited["producer"] + sum(now - r.since for r in self._rooms),
            "consumer_wait_seconds": self._waited["consumer"] + sum(now - r.since for r in self._takes),
        }

    def unfinished(self, needs: Sequence[str]) -> list[Unfinished]:
        slow = sorted(group for group in self.groups.values() if not group.has(needs))
        return [Unfinished(g.uid, g.size, g.order, g.version, g.lacking(needs)) for g in slow]

    def have(self, uid: str) -> list[set[str]]:
        return self._group(uid).have

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Groups by order, each with the consumers that are done with it and the fields that are to be left out."""
        givers = [c for c in self.consumers.values() if c.gives]
        groups = []
        for group in sorted(self.groups.values()):
            taken = [c for c in givers if c.name in group.taken_by]
            done = {c.name for c in taken if group.has(c.gives)} | self._done.get(group.uid, set())
            partial = {name for c in taken if c.name not in done for name in c.gives}
            known = {"uid": group.uid, "size": group.size, "order": group.order, "version": group.version}
            groups.append({**known, "done": sorted(done), "left_out": sorted(partial)})
        per_version = self.bounds.groups_per_version
        ahead = len(self.groups) if per_version is None else self._added - self.version * per_version
        return {"version": self.version, "ahead": ahead, "last_order": self._last_order, "groups": groups}

    def load(self, state: Mapping[str, Any], rows: Sequence[Entry]) -> None:
        """Hold a state's groups with these rows."""
        if self._serial:
            raise ValueError("a state is loaded into a queue that has been used")
        self.version = state["version"]
        self._added = self.version * (self.bounds.groups_per_version or 0) + state["ahead"]
        for known in state["groups"]:
            self._done[known["uid"]] = set(known["done"])
            self._hold(known["uid"], known["size"], known["order"], known["version"])
        self._last_order = state["last_order"]
        self._enter(rows)
