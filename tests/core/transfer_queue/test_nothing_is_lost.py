"""Whatever happens in whatever order: each group reaches each consumer once, whole and in order, within both bounds."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.core.transfer_queue.helpers import ids

from verl.core.transfer_queue.api import QueueEnded
from verl.core.transfer_queue.local import LocalTransferQueue

FIELDS = ("ids", "score")
CONSUMERS = {"first": ("ids",), "second": ("ids", "score")}


def value(uid: str, index: int, name: str):
    """What sample `index` of a group has in a field: it tells where it belongs."""
    number = int(uid[1:]) * 100 + index
    return ids(*[number] * (index + 1)) if name == "ids" else float(number)


def check_batch(batch, needs, sizes) -> list[str]:
    """The batch's groups, each whole and side by side, every value in its place."""
    groups = list(dict.fromkeys(batch["uid"]))
    assert batch["uid"] == [uid for uid in groups for _ in range(sizes[uid])]
    places = [(uid, i) for uid in groups for i in range(sizes[uid])]
    for name in needs:
        column = batch[name] if name == "score" else batch[name].rows()
        for (uid, index), found in zip(places, column, strict=True):
            want = value(uid, index, name)
            assert found.tolist() == (want.tolist() if isinstance(want, torch.Tensor) else want)
    return groups


class Model(RuleBasedStateMachine):
    """A queue beside a plain account of what it must hold."""

    def __init__(self, make_queue):
        super().__init__()
        self.make_queue = make_queue

    @initialize(
        capacity=st.sampled_from([None, 2, 4]),
        bound=st.sampled_from([None, (0, 2), (0.5, 2), (1, 1)]),
        in_order=st.booleans(),
    )
    def start(self, capacity, bound, in_order):
        self.arguments = dict(
            zip(("staleness", "groups_per_version"), bound or ()), capacity=capacity, in_order=in_order
        )
        self.queue = self.make_queue(**self.arguments)
        self.register()
        self.version = self.added = self.counter = 0
        self.held: dict[str, int] = {}  # uid -> size
        self.fields: dict[str, set] = {}  # uid -> {(index, field)}
        self.given = {name: set() for name in CONSUMERS}
        self.ended = False

    def register(self):
        for name, needs in CONSUMERS.items():
            self.queue.register(name, needs)

    def allowed(self):
        room = self.arguments["capacity"] is None or len(self.held) < self.arguments["capacity"]
        if "staleness" not in self.arguments:
            return room
        limit = (self.version + 1 + self.arguments["staleness"]) * self.arguments["groups_per_version"]
        return room and self.added < limit

    @precondition(lambda self: not self.ended)
    @rule(size=st.integers(1, 3))
    def add(self, size):
        uid = f"u{self.counter}"
        allowed = self.allowed()
        assert self.queue.add_group(uid, size, self.counter, self.version, timeout=0) is allowed
        if allowed:
            self.counter += 1
            self.added += 1
            self.held[uid], self.fields[uid] = size, set()

    @precondition(lambda self: self.missing())
    @rule(data=st.data(), most=st.integers(1, 6))
    def put(self, data, most):
        """Some fields that are still missing, in one call."""
        chosen = data.draw(st.lists(st.sampled_from(self.missing()), max_size=most, unique=True))
        self.queue.put_many([(uid, index, {name: value(uid, index, name)}) for uid, index, name in chosen])
        for uid, index, name in chosen:
            self.fields[uid].add((index, name))

    def missing(self):
        places = ((uid, i, f) for uid, size in self.held.items() for i in range(size) for f in FIELDS)
        return [(uid, i, f) for uid, i, f in places if (i, f) not in self.fields[uid]]

    def ready(self, consumer):
        """Groups that the consumer may have now, lowest first."""
        left = [uid for uid in self.held if uid not in self.given[consumer]]  # ascends, as groups were added
        whole = [all((i, f) in self.fields[u] for i in range(self.held[u]) for f in CONSUMERS[consumer]) for u in left]
        if self.arguments["in_order"]:
            return left[: whole.index(False) if False in whole else len(left)], left
        return [uid for uid, ok in zip(left, whole) if ok], left

    @rule(consumer=st.sampled_from(sorted(CONSUMERS)), groups=st.integers(1, 3))
    def take(self, consumer, groups):
        groups = min(groups, self.arguments["capacity"] or groups)
        ready, left = self.ready(consumer)
        if self.ended:
            groups = min(groups, len(left))
            if not left:
                with pytest.raises(QueueEnded):
                    self.queue.take(consumer, 1, timeout=0)
                return
        batch = self.queue.take(consumer, groups, timeout=0)
        if len(ready) < groups:
            assert batch is None
            return
        assert check_batch(batch, CONSUMERS[consumer], self.held) == ready[:groups]
        self.given[consumer] |= set(ready[:groups])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        uids = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=3))
        self.queue.release(uids)
        for uid in set(uids):
            del self.held[uid], self.fields[uid]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        uid = data.draw(st.sampled_from(sorted(self.held)))
        self.queue.drop(uid)
        del self.held[uid], self.fields[uid]
        self.added -= 1

    @rule(steps=st.integers(0, 2))
    def advance(self, steps):
        self.version += steps
        self.queue.advance(self.version)

    @rule()
    def resume(self):
        """The process dies after a checkpoint, and another goes on: what was taken and not released comes again."""
        state = self.queue.state_dict()
        self.queue = self.make_queue(**self.arguments)
        self.queue.load_state_dict(state)
        self.register()
        self.given = {name: set() for name in CONSUMERS}
        if "staleness" not in self.arguments:
            self.added = len(self.held)
        if self.ended:
            self.queue.end()

    @rule()
    def end(self):
        self.ended = True
        self.queue.end()

    @invariant()
    def books_agree(self):
        if not hasattr(self, "held"):
            return
        stats = self.queue.stats()
        assert stats["groups_held"] == len(self.held)
        done = [uid for uid, size in self.held.items() if len(self.fields[uid]) == 2 * size]
        assert stats["groups_complete"] == len(done)

    def teardown(self):
        """In the end each consumer gets whatever it has not had."""
        if not hasattr(self, "held"):
            return
        self.queue.put_many([(uid, i, {name: value(uid, i, name)}) for uid, i, name in self.missing()])
        self.queue.end()
        for consumer, needs in CONSUMERS.items():
            left = [uid for uid in self.held if uid not in self.given[consumer]]
            while left:
                batch = self.queue.take(consumer, self.arguments["capacity"] or 3, timeout=0)
                assert batch is not None
                for uid in check_batch(batch, needs, self.held):
                    assert left.pop(0) == uid
            with pytest.raises(QueueEnded):
                self.queue.take(consumer, 1, timeout=0)


def test_random_interleavings(make_queue):
    examples = 100 if make_queue is LocalTransferQueue else 5
    options = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    fresh = []

    def model():
        fresh.append(0)
        return Model(make_queue)

    run_state_machine_as_test(model, settings=options)
    assert len(fresh) >= examples


class Plant:
    """Threads around a queue of groups of 4: producers, of which every seventh group fails in mid-generation; scorers; a
    consumer between that adds `ref`; trainers that release what they took and make a new version of every 4 groups.
    """

    SIZE, BATCH = 4, 4

    def __init__(self, queue, groups: int):
        self.queue, self.groups = queue, groups
        self.chance, self.lock = random.Random(0), threading.Lock()
        self.orders, self.unscored, self.all_put = iter(range(groups)), [], threading.Event()
        self.produced, self.trained, self.version = [], Counter(), 0
        queue.register("reference", ["ids"], gives=["ref"])
        queue.register("trainer", ["ids", "score", "ref"])

    def produce(self):
        while True:
            with self.lock:
                order = next(self.orders, None)
                samples = self.chance.sample(range(self.SIZE), self.SIZE)
            if order is None:
                return
            uid, fails = f"u{order}", order % 7 == 3
            assert self.queue.add_group(uid, self.SIZE, order, 0)
            for index in samples[: self.SIZE // 2 if fails else self.SIZE]:
                self.queue.put(uid, index, {"ids": value(uid, index, "ids")})
            if fails:
                self.queue.drop(uid)
                continue
            with self.lock:
                self.produced.append(uid)
                self.unscored.extend((uid, index) for index in samples)

    def score(self):
        while True:
            last = self.all_put.is_set()
            with self.lock:
                some = [self.unscored.pop(self.chance.randrange(len(self.unscored))) for _ in self.unscored[:3]]
            self.queue.put_many([(uid, i, {"score": value(uid, i, "score")}) for uid, i in some])
            if not some and last:
                return
            self.all_put.wait(0 if some else 0.001)

    def refer(self):
        while taken := self.queue.take("reference", 1):
            rows = enumerate(zip(taken["uid"], taken["ids"].rows()))
            self.queue.put_many([(uid, i, {"ref": row * 2}) for i, (uid, row) in rows])

    def train(self):
        sizes = {f"u{i}": self.SIZE for i in range(self.groups)}
        while taken := self.queue.take("trainer", 2):
            found = check_batch(taken, ("ids", "score"), sizes)
            assert (taken["ref"].values == taken["ids"].values * 2).all()
            self.queue.release(taken["uid"])
            with self.lock:
                self.trained.update(found)
                self.version = sum(self.trained.values()) // self.BATCH
                self.queue.advance(self.version)


def test_many_threads(make_queue, in_thread):
    groups = 240 if make_queue is LocalTransferQueue else 40
    queue = make_queue(capacity=3 * Plant.BATCH, staleness=2, groups_per_version=Plant.BATCH)
    plant = Plant(queue, groups)
    producers = [in_thread(plant.produce, f"producer {i}") for i in range(3)]
    scorers = [in_thread(plant.score, f"scorer {i}") for i in range(2)]
    takers = [in_thread(plant.refer), *(in_thread(plant.train, f"trainer {i}") for i in range(2))]
    for thread in producers:
        assert thread.result(60) is None, [str(w) for w in queue.waiting()]
    queue.end()
    plant.all_put.set()
    assert [thread.result(60) for thread in scorers] == [None, None]
    for thread in takers:
        assert isinstance(thread.result(60), QueueEnded), [str(w) for w in queue.waiting()]
    failed = [f"u{i}" for i in range(3, groups, 7)]
    assert len(plant.produced) == groups - len(failed)
    assert Counter(plant.produced) == plant.trained
    assert set(plant.produced).isdisjoint(failed)
    stats = queue.stats()
    counts = [stats[f"groups_{name}"] for name in ("held", "added", "released", "dropped")]
    assert counts == [0, groups, groups - len(failed), len(failed)]
    assert (stats["tokens_held"], stats["bytes_held"], queue.waiting()) == (0, 0, [])
