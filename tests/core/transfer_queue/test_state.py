"""A queue's state: everything that is not released survives, in either implementation, and nothing is given twice."""

from __future__ import annotations

import pytest
import torch
from tests.core.transfer_queue.helpers import add, fill, ids

from verl.core.transfer_queue.api import Unfinished
from verl.core.transfer_queue.local import LocalTransferQueue


def through_a_file(state, folder):
    torch.save(state, folder / "queue.pt")
    return torch.load(folder / "queue.pt", weights_only=True)


def test_mid_flight(make_queue, tmp_path):
    """One group released, one taken, one whole, one partly there, one only reserved."""
    queue = make_queue(staleness=2, groups_per_version=2)
    queue.register("trainer", ["ids", "score"])
    add(queue, "gone", "taken", "whole", "partly", "empty", size=2, version=1)
    for uid in ("gone", "taken", "whole"):
        queue.put_many([(uid, i, {"ids": ids(i, 7), "score": i + 0.5, "text": uid}) for i in range(2)])
    queue.put("partly", 1, {"ids": ids(9), "logp": torch.tensor([-1.5], dtype=torch.bfloat16)})
    queue.take("trainer", 2)
    queue.release(["gone"])
    queue.advance(1)
    state = through_a_file(queue.state_dict(), tmp_path)

    for kind in (make_queue, LocalTransferQueue):
        other = kind(staleness=2, groups_per_version=2)
        other.load_state_dict(state)
        other.register("trainer", ["ids", "score"])
        assert other.unfinished(["ids", "score"]) == [
            Unfinished("partly", 2, 3, 1, {0: ("ids", "score"), 1: ("score",)}),
            Unfinished("empty", 2, 4, 1, {0: ("ids", "score"), 1: ("ids", "score")}),
        ]
        first, second = other.read("partly")
        assert (first, second["ids"].tolist(), second["logp"].dtype) == ({}, [9], torch.bfloat16)
        batch = other.take("trainer", 2, timeout=0)
        assert batch["uid"] == ["taken", "taken", "whole", "whole"]
        assert batch["ids"].values.tolist() == [0, 7, 1, 7] * 2
        assert batch["score"].tolist() == [0.5, 1.5] * 2
        assert batch["text"] == ["taken"] * 2 + ["whole"] * 2
        assert other.take("trainer", 1, timeout=0) is None
        # 5 were added; version 1 allows (1 + 1 + 2) * 2 = 8.
        assert [other.add_group(f"n{i}", 1, 5 + i, 1, timeout=0) for i in range(4)] == [True] * 3 + [False]


def test_what_a_consumer_gives_tells_whether_it_is_done(make_queue, tmp_path):
    queue = make_queue()
    queue.register("reference", ["ids"], gives=["ref"])
    add(queue, "done", "begun", "fresh", size=2)
    for uid in ("done", "begun", "fresh"):
        queue.put_many([(uid, i, {"ids": ids(i)}) for i in range(2)])
    queue.take("reference", 2)
    queue.put_many([("done", 0, {"ref": 1.0}), ("done", 1, {"ref": 2.0}), ("begun", 1, {"ref": 3.0})])
    state = through_a_file(queue.state_dict(), tmp_path)
    assert queue.unfinished(["ref"])[0].missing == {0: ("ref",)}  # saving changes nothing

    middle = make_queue()
    middle.load_state_dict(state)
    other = make_queue()
    other.load_state_dict(through_a_file(middle.state_dict(), tmp_path))  # once more, before anybody registered
    other.register("reference", ["ids"], gives=["ref"])
    assert other.take("reference", 2, timeout=0)["uid"] == ["begun", "begun", "fresh", "fresh"]
    fill(other, "begun", "fresh", size=2, field="ref")
    other.register("trainer", ["ref"])
    assert other.take("trainer", 3, timeout=0)["ref"].tolist() == [1.0, 2.0, 0.0, 1.0, 0.0, 1.0]


def test_other_bounds_than_before(make_queue):
    """At version 3 with 4 groups a version, 2 were ahead of it; so they are with 6 a version."""
    queue = make_queue(staleness=1, groups_per_version=4, version=3)
    add(queue, "a", "b", version=3)
    other = make_queue(staleness=0, groups_per_version=6)
    other.load_state_dict(queue.state_dict())
    assert [other.add_group(f"n{i}", 1, 2 + i, 3, timeout=0) for i in range(5)] == [True] * 4 + [False]

    unbounded = make_queue()
    add(unbounded, "a", "b", "c")
    unbounded.release(["a"])
    unbounded.advance(9)
    other = make_queue(staleness=0, groups_per_version=3)
    other.load_state_dict(unbounded.state_dict())
    assert [other.add_group(f"n{i}", 1, 3 + i, 9, timeout=0) for i in range(2)] == [True, False]


def test_order_goes_on(make_queue):
    queue = make_queue(in_order=True)
    add(queue, "a", "b", orders=[4, 9])
    queue.release(["b"])
    other = make_queue(in_order=True)
    other.load_state_dict(queue.state_dict())
    with pytest.raises(ValueError, match="order 9 and comes after one of order 9"):
        other.add_group("c", 1, 9, 0)
    assert other.add_group("c", 1, 10, 0)


def test_a_full_queue_takes_a_larger_state(make_queue):
    queue = make_queue()
    add(queue, "a", "b", "c")
    other = make_queue(capacity=2)
    other.load_state_dict(queue.state_dict())
    other.release(["a"])
    assert not other.add_group("d", 1, 3, 0, timeout=0)
    other.release(["b"])
    assert other.add_group("d", 1, 3, 0, timeout=0)


def test_states_that_cannot_be_loaded(make_queue):
    queue = make_queue()
    add(queue, "a")
    state = queue.state_dict()
    with pytest.raises(ValueError, match="has been used"):
        queue.load_state_dict(state)
    with pytest.raises(ValueError, match="format is None"):
        make_queue().load_state_dict({"groups": []})
