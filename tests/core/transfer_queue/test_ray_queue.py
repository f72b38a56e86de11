"""What only the cluster's queue can get wrong: processes that die, many that wait, chunks, and what they hold."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray
import torch
from tests.core.transfer_queue.helpers import add, fill, ids, until

from verl.core.transfer_queue.api import QueueClosed
from verl.core.transfer_queue.ray_queue import RayTransferQueue, from_bytes, to_bytes

pytestmark = pytest.mark.e2e


@pytest.fixture
def queue(cluster):
    return RayTransferQueue()


@ray.remote(num_cpus=0)
class Producer:
    def fill(self, queue, uid):
        add(queue, uid)
        queue.put(uid, 0, {"ids": torch.arange(50_000), "text": "from another process"})

    def wait(self, queue):
        queue.take("trainer", 1)


def test_what_a_producer_has_put_outlives_it(queue):
    queue.register("trainer", ["ids"])
    producer = Producer.remote()
    ray.get(producer.fill.remote(queue, "a"))
    ray.kill(producer)
    batch = queue.take("trainer", 1, timeout=10)
    assert batch["ids"].values.equal(torch.arange(50_000))
    assert batch["text"] == ["from another process"]


def test_many_who_wait_keep_nobody_waiting(queue, in_thread):
    queue.register("trainer", ["score"])
    takers = [in_thread(lambda: queue.take("trainer", 1)["uid"][0]) for _ in range(60)]
    until(lambda: len(queue.waiting()) == 60)
    uids = [f"u{i:02d}" for i in range(60)]
    add(queue, *uids)
    fill(queue, *uids)
    assert sorted(taker.result() for taker in takers) == uids


def test_a_dead_actor_closes_the_queue(queue, in_thread):
    queue.register("trainer", ["score"])
    waiting = in_thread(lambda: queue.take("trainer", 1))
    until(queue.waiting)
    ray.kill(queue._actor)
    assert isinstance(waiting.result(), QueueClosed)
    with pytest.raises(QueueClosed, match="ActorDiedError"):
        queue.put("a", 0, {"score": 1.0})


class Stubborn(Exception):
    """It pickles, and does not come back."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_travel_is_told_all_the_same(queue):
    queue.close(Stubborn("this", "that"))
    with pytest.raises(QueueClosed, match="RuntimeError: Stubborn: this and that"):
        queue.add_group("a", 1, 0, 0)


def test_released_rows_leave_the_object_store(queue):
    """Two groups of one call share a chunk, which goes with the second."""
    queue.register("trainer", ["ids"])
    add(queue, "a", "b")
    queue.put_many([(uid, 0, {"ids": torch.arange(100_000)}) for uid in ("a", "b")])
    weak = ray.get(queue._actor.__ray_call__.remote(lambda actor: actor._chunks["b"][0][0].hex()))

    def held():
        from ray._private.internal_api import memory_summary

        return weak in memory_summary(ray.get_runtime_context().gcs_address, stats_only=False)

    until(held)
    queue.release(["a"])
    assert len(queue.take("trainer", 1, timeout=0)["ids"].values) == 100_000
    queue.release(["b"])
    until(lambda: not held())


def test_chunks_keep_types_and_places():
    rows = [
        ("a", 1, {"p": torch.tensor([0.5], dtype=torch.bfloat16), "m": torch.tensor([True, False]), "n": 3}),
        ("b", 0, {"p": torch.tensor([], dtype=torch.bfloat16), "v": torch.tensor(2.5, dtype=torch.float64)}),
        ("a", 1, {"late": {"x": ids(1)}}),
    ]
    found = from_bytes(to_bytes(rows))
    assert list(found) == [("a", 1), ("b", 0)]
    first, second = found.values()
    assert (first["p"].dtype, first["p"].tolist(), first["n"]) == (torch.bfloat16, [0.5], 3)
    assert (first["m"].dtype, first["m"].tolist(), first["late"]["x"].tolist()) == (torch.bool, [True, False], [1])
    assert (second["v"].dtype, second["v"].item(), second["p"].shape) == (torch.float64, 2.5, (0,))
    second["v"] += 1  # the memory is the receiver's own


def test_the_process_that_keeps_the_books_needs_no_torch():
    code = "import sys, verl.core.transfer_queue.ray_actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
