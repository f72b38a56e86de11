"""One suite for every implementation: what goes in, what comes out, when, and who waits for what."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from tests.core.transfer_queue.helpers import add, fill, ids, until

from verl.core.transfer_queue.api import QueueClosed, QueueEnded
from verl.data.batch import Ragged


def test_fields_come_back_as_columns(make_queue):
    queue = make_queue()
    queue.register("trainer", ["response_ids", "score"])
    add(queue, "b", "a", size=2, orders=[7, 3])
    for uid, base in (("b", 10), ("a", 0)):
        queue.put(uid, 1, {"response_ids": ids(base + 2, base + 3), "score": base + 0.5, "reason": "stop"})
        queue.put(uid, 0, {"response_ids": ids(base + 1), "reason": "length"})
        queue.put(uid, 0, {"score": base + 0.25, "versions": torch.tensor(4)})
    batch = queue.take("trainer", 2)
    assert batch["uid"] == ["a", "a", "b", "b"]
    assert isinstance(batch["response_ids"], Ragged)
    assert batch["response_ids"].values.tolist() == [1, 2, 3, 11, 12, 13]
    assert batch["response_ids"].lengths.tolist() == [1, 2, 1, 2]
    assert batch["score"].dtype == torch.float32
    assert batch["score"].tolist() == [0.25, 0.5, 10.25, 10.5]
    assert batch["reason"] == ["length", "stop", "length", "stop"]
    assert "versions" not in batch  # two samples lack it


def test_a_group_comes_when_all_its_samples_have_all_fields(make_queue):
    queue = make_queue()
    queue.register("trainer", ["ids", "score"])
    add(queue, "a", size=2)
    queue.put("a", 0, {"ids": ids(1), "score": 1.0})
    queue.put("a", 1, {"ids": ids(2)})
    assert queue.take("trainer", 1, timeout=0) is None
    queue.put("a", 1, {"score": 0.0})
    assert queue.take("trainer", 1, timeout=0)["ids"].values.tolist() == [1, 2]
    assert queue.take("trainer", 1, timeout=0) is None  # once


def test_a_consumer_takes_as_many_groups_as_it_asks_for_or_none(make_queue):
    queue = make_queue()
    queue.register("trainer", ["score"])
    add(queue, "a", "b", "c", "d")
    fill(queue, "d", "b")
    assert queue.take("trainer", 3, timeout=0) is None
    fill(queue, "c")
    assert queue.take("trainer", 2, timeout=0)["uid"] == ["b", "c"]  # lowest first of those that are whole
    fill(queue, "a")
    assert queue.take("trainer", 2, timeout=0)["uid"] == ["a", "d"]


def test_in_order_no_group_overtakes(make_queue):
    queue = make_queue(in_order=True)
    queue.register("trainer", ["score"])
    add(queue, "a", "b", "c", orders=[2, 5, 6])
    fill(queue, "b", "c")
    assert queue.take("trainer", 1, timeout=0) is None
    fill(queue, "a")
    assert queue.take("trainer", 2, timeout=0)["uid"] == ["a", "b"]
    with pytest.raises(ValueError, match="'d' has order 6 and comes after one of order 6"):
        queue.add_group("d", 1, 6, 0)
    add(queue, "d", "e", orders=[7, 8])
    queue.drop("d")
    fill(queue, "e")
    assert queue.take("trainer", 2, timeout=0)["uid"] == ["c", "e"]


def test_each_consumer_gets_each_group_once(make_queue):
    queue = make_queue()
    queue.register("reference", ["ids"], gives=["ref"])
    queue.register("trainer", ["ids", "ref"])
    add(queue, "a", "b")
    queue.put_many([("a", 0, {"ids": ids(1)}), ("b", 0, {"ids": ids(2, 3)})])
    assert queue.take("trainer", 1, timeout=0) is None
    batch = queue.take("reference", 2, timeout=0)
    queue.put_many([(uid, 0, {"ref": row * 1.0}) for uid, row in zip(batch["uid"], batch["ids"].rows())])
    assert queue.take("reference", 1, timeout=0) is None
    assert queue.take("trainer", 2, timeout=0)["ref"].values.tolist() == [1.0, 2.0, 3.0]
    queue.register("late", ["ids"])
    assert queue.take("late", 2, timeout=0)["uid"] == ["a", "b"]
    queue.release(["a", "b"])
    assert queue.stats()["groups_held"] == 0


def test_two_takers_of_one_name_share_the_groups(make_queue, in_thread):
    queue = make_queue()
    queue.register("trainer", ["score"])
    takers = [in_thread(lambda: queue.take("trainer", 1)["uid"]) for _ in range(2)]
    add(queue, "a", "b")
    fill(queue, "a", "b")
    assert sorted(taker.result() for taker in takers) == [["a"], ["b"]]


def test_capacity_counts_taken_groups_until_they_are_released(make_queue, in_thread):
    queue = make_queue(capacity=2)
    queue.register("trainer", ["score"])
    add(queue, "a", "b")
    assert not queue.add_group("c", 1, 2, 0, timeout=0)
    assert not queue.add_group("c", 1, 2, 0, timeout=0.02)
    fill(queue, "a")
    queue.take("trainer", 1)
    assert not queue.add_group("c", 1, 2, 0, timeout=0)
    producer = in_thread(lambda: queue.add_group("c", 1, 2, 0))
    until(queue.waiting)
    queue.release(["a", "a"])  # as a batch's uid column says it
    assert producer.result() is True
    queue.drop("b")
    assert queue.add_group("d", 1, 3, 0, timeout=0)
    with pytest.raises(ValueError, match="asks for 3 groups of a queue that holds 1 to 2"):
        queue.take("trainer", 3)


@pytest.mark.parametrize(("staleness", "allowed"), [(0, [2, 4, 6]), (0.5, [3, 5, 7]), (2, [6, 8, 10])])
def test_staleness_bound(make_queue, staleness, allowed):
    """(version + 1 + s) * 2 groups in all."""
    queue = make_queue(staleness=staleness, groups_per_version=2)
    added = 0
    for version, limit in enumerate(allowed):
        queue.advance(version)
        while queue.add_group(f"u{added}", 1, added, version, timeout=0):
            added += 1
        assert added == limit


def test_a_new_version_wakes_producers_and_a_dropped_group_makes_way(make_queue, in_thread):
    queue = make_queue(staleness=0, groups_per_version=1)
    add(queue, "a")
    producer = in_thread(lambda: queue.add_group("b", 1, 1, 1))
    (blocked,) = until(queue.waiting)
    assert (blocked.kind, "version 0 allows 1 groups in all and 1 were added" in blocked.what) == ("staleness", True)
    queue.advance(1)
    assert producer.result() is True
    producer = in_thread(lambda: queue.add_group("c", 1, 2, 1))
    until(queue.waiting)
    queue.drop("b")  # another prompt has to stand in for it, or the step would never be full
    assert producer.result() is True
    queue.release(["a"])  # consumed, which makes no group staler or fresher
    assert not queue.add_group("d", 1, 3, 1, timeout=0)
    with pytest.raises(ValueError, match="from 1 back to 0"):
        queue.advance(0)


def test_a_run_that_starts_at_a_later_version_has_the_same_bound(make_queue):
    queue = make_queue(staleness=0, groups_per_version=2, version=50)
    add(queue, "a", "b")
    assert not queue.add_group("c", 1, 2, 50, timeout=0)


def test_the_lowest_order_gets_room_first(make_queue, in_thread):
    queue = make_queue(capacity=1, in_order=True)
    add(queue, "a")
    later = in_thread(lambda: queue.add_group("c", 1, 2, 0), "later")
    until(lambda: len(queue.waiting()) == 1)
    sooner = in_thread(lambda: queue.add_group("b", 1, 1, 0), "sooner")
    until(lambda: len(queue.waiting()) == 2)
    queue.release(["a"])
    assert sooner.result() is True
    queue.release(["b"])
    assert later.result() is True


def test_mistakes_are_named_and_change_nothing(make_queue):
    queue = make_queue()
    queue.register("trainer", ["score"])
    queue.register("trainer", ["score"])
    with pytest.raises(ValueError, match="'trainer' is registered with needs"):
        queue.register("trainer", ["other"])
    add(queue, "a", size=2)
    with pytest.raises(ValueError, match="'a' is held already"):
        queue.add_group("a", 1, 1, 0)
    with pytest.raises(ValueError, match="needs at least one"):
        queue.add_group("z", 0, 1, 0)
    queue.put("a", 0, {"score": 1.0})
    for rows, message in (
        ([("a", 1, {"score": 2.0}), ("a", 0, {"score": 2.0})], "sample 0 of group 'a' has a field 'score' already"),
        ([("a", 1, {"score": 2.0}), ("a", 1, {"score": 2.0})], "sample 1 of group 'a' has a field 'score' already"),
        ([("a", 1, {"score": 2.0}), ("b", 0, {})], "no group 'b' is held"),
        ([("a", 2, {"score": 2.0})], "samples 0 to 1, not 2"),
        ([("a", -1, {"score": 2.0})], "samples 0 to 1, not -1"),
        ([("a", 1, {"uid": "b"})], "has a field uid 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            queue.put_many(rows)
    with pytest.raises(TypeError, match=r"field 'extra' holds a builtins\.set.*checkpoint"):
        queue.put("a", 1, {"extra": {"tags": [{1}]}})
    with pytest.raises(ValueError, match="no consumer 'x' is registered"):
        queue.take("x", 1)
    with pytest.raises(ValueError, match="no group 'b' is held"):
        queue.release(["a", "b"])
    queue.put("a", 1, {"score": 3.0, "uid": "a"})
    assert queue.take("trainer", 1, timeout=0)["score"].tolist() == [1.0, 3.0]


def test_end_gives_what_is_left(make_queue, in_thread):
    queue = make_queue()
    queue.register("trainer", ["score"])
    add(queue, "a", "b", "c")
    fill(queue, "a", "c")
    trainer = in_thread(lambda: queue.take("trainer", 5))
    until(queue.waiting)
    queue.end()
    assert queue.take("trainer", 5, timeout=0) is None  # b may still come
    with pytest.raises(QueueEnded, match="group 'd' comes after"):
        queue.add_group("d", 1, 3, 0)
    fill(queue, "b")
    assert trainer.result()["uid"] == ["a", "b", "c"]
    with pytest.raises(QueueEnded, match="'trainer' has had all"):
        queue.take("trainer", 1)


def test_end_wakes_who_waits_in_vain(make_queue, in_thread):
    queue = make_queue(capacity=1)
    queue.register("trainer", ["score"])
    add(queue, "a")
    producer = in_thread(lambda: queue.add_group("b", 1, 1, 0))
    consumer = in_thread(lambda: queue.take("trainer", 1))
    until(lambda: len(queue.waiting()) == 2)
    queue.end()
    assert isinstance(producer.result(), QueueEnded)
    queue.drop("a")  # the last that it could have had
    assert isinstance(consumer.result(), QueueEnded)


def test_close_wakes_everybody_with_the_error(make_queue, in_thread):
    queue = make_queue(capacity=1)
    queue.register("trainer", ["score"])
    add(queue, "a")
    waiting = [in_thread(lambda: queue.add_group("b", 1, 1, 0)), in_thread(lambda: queue.take("trainer", 1))]
    until(lambda: len(queue.waiting()) == 2)
    queue.close(RuntimeError("the engine died"))
    queue.close(RuntimeError("what came of it"))
    for thread in waiting:
        error = thread.result()
        assert isinstance(error, QueueClosed)
        assert (type(error.__cause__), str(error.__cause__)) == (RuntimeError, "the engine died")
        assert str(error) == "the transfer queue was closed because of RuntimeError: the engine died"
    calls = (
        lambda: queue.add_group("c", 1, 1, 0),
        lambda: fill(queue, "a"),
        lambda: queue.take("trainer", 1, timeout=0),
    )
    for call in calls:
        with pytest.raises(QueueClosed, match="the engine died"):
            call()
    # What a run needs to save and end.
    assert [u.uid for u in queue.unfinished(["score"])] == ["a"]
    assert len(queue.state_dict()["books"]["groups"]) == 1
    queue.advance(1)
    queue.end()
    queue.release(["a"])
    assert queue.stats()["groups_held"] == 0
    assert queue.waiting() == []


def test_closed_without_an_error(make_queue):
    queue = make_queue()
    queue.close()
    with pytest.raises(QueueClosed, match=r"was closed$") as caught:
        queue.add_group("a", 1, 0, 0)
    assert caught.value.__cause__ is None


def test_an_interrupted_caller_waits_no_longer(make_queue):
    """A signal whose handler raises, as Ctrl-C does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    queue = make_queue()
    queue.register("trainer", ["score"])
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            queue.take("trainer", 1)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    until(lambda: not queue.waiting())
    add(queue, "a")
    fill(queue, "a")
    assert queue.take("trainer", 1, timeout=0)["uid"] == ["a"]


def test_waiting_names_who_waits_for_what(make_queue, in_thread):
    queue = make_queue(capacity=2)
    queue.register("trainer", ["ids", "score"])
    consumer = in_thread(lambda: queue.take("trainer", 2), "main")
    (blocked,) = until(queue.waiting)
    assert (blocked.who, blocked.kind) == ("trainer", "groups")
    assert blocked.what == "more groups to be added: 0 of 2 groups are ready"
    add(queue, "a", "b", size=2)
    queue.put_many([("a", i, {"ids": ids(1), "score": 0.0}) for i in range(2)])
    queue.put_many([("b", 0, {"ids": ids(1), "score": 0.0}), ("b", 1, {"ids": ids(1)})])
    (blocked,) = queue.waiting()
    assert blocked.kind == "fields"
    assert blocked.what == "score of sample 1 of group 'b' (order 1): 1 of 2 groups are ready"
    producer = in_thread(lambda: queue.add_group("c", 1, 2, 0), "generator")
    until(lambda: len(queue.waiting()) == 2)
    time.sleep(0.06)
    first, second = queue.waiting()
    assert first.who == "trainer"
    assert first.seconds > second.seconds > 0.05
    assert (second.who.split(" (")[0], second.kind) == ("generator", "room")
    assert second.what == "room for group 'c': 2 groups are held, 0 of them taken and not released; capacity 2"
    assert str(second) == f"{second.who} has waited {second.seconds:.1f} s for {second.what}"
    queue.put("b", 1, {"score": 0.0})
    queue.release(set(consumer.result()["uid"]))
    assert producer.result() is True
    assert queue.waiting() == []


def test_stats_by_hand(make_queue):
    queue = make_queue(capacity=3)
    queue.register("trainer", ["score"])
    add(queue, "a", "b", "c", size=2)
    queue.put_many([("a", i, {"prompt_ids": ids(1, 2, 3), "response_ids": ids(4), "score": 1.0}) for i in range(2)])
    queue.put("b", 0, {"response_ids": ids(5, 6), "text": "four"})
    stats = queue.stats()
    waits = [stats.pop(f"{side}_wait_seconds") for side in ("producer", "consumer")]
    assert max(waits) < 0.05
    assert stats == {
        "groups_held": 3,
        "groups_complete": 1,
        "groups_taken": 0,
        "tokens_held": 2 * 4 + 2,
        "bytes_held": 2 * (32 + 8) + 16 + 4,
        "groups_added": 3,
        "groups_released": 0,
        "groups_dropped": 0,
        "puts": 3,
        "takes": 0,
    }
    queue.take("trainer", 1)
    assert queue.take("trainer", 1, timeout=0.1) is None
    assert not queue.add_group("d", 1, 3, 0, timeout=0.2)
    queue.release(["a"])
    queue.drop("b")
    stats = queue.stats()
    names = ("groups_held", "groups_taken", "tokens_held", "bytes_held", "groups_released", "groups_dropped", "takes")
    assert [stats[name] for name in names] == [1, 0, 0, 0, 1, 1, 1]
    assert 0.1 <= stats["consumer_wait_seconds"] < 0.2 <= stats["producer_wait_seconds"] < 1
