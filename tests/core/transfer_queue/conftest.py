"""Both queues behind one fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.core.transfer_queue.helpers import Background

from verl.core.transfer_queue.local import LocalTransferQueue


@pytest.fixture(scope="package")
def cluster():
    """A small Ray cluster for all files here: starting one takes longer than most of the tests."""
    from verl.config.compose import compose
    from verl.core.controller.cluster import Cluster

    started = Cluster(compose(["data.train_files=t", "ray_kwargs.ray_init.num_cpus=2"]))
    yield started
    started.close()


@pytest.fixture(scope="package")
def actors(cluster):
    """Actors for queues, which the tests use again and again: each takes a second to start."""
    return []


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.e2e)])
def make_queue(request) -> Callable[..., Any]:
    """Makes an empty queue, of each kind in turn."""
    return LocalTransferQueue if request.param == "local" else reusing(request.getfixturevalue("actors"))


def reusing(actors: list) -> Callable[..., Any]:
    """Makes Ray queues in the same few actors in turn, with books started anew; a test has no more than four at a time."""
    import ray

    from verl.core.transfer_queue.ledger import Bounds
    from verl.core.transfer_queue.ray_queue import RayTransferQueue

    def make(capacity=None, staleness=None, groups_per_version=None, in_order=False, version=0):
        if len(actors) < 4:
            queue = RayTransferQueue(capacity, staleness, groups_per_version, in_order, version)
            actors.append(queue._actor)
            return queue
        queue = RayTransferQueue.__new__(RayTransferQueue)
        queue._actor = actors.pop(0)
        actors.append(queue._actor)
        bounds = Bounds(capacity, staleness, groups_per_version, in_order)
        ray.get(queue._actor.__ray_call__.remote(lambda actor, *arguments: actor.__init__(*arguments), bounds, version))
        return queue

    return make


@pytest.fixture
def in_thread():
    """Run a call in a thread of a name; the thread's `outcome` is what it returned or raised. All must have ended in the end."""
    threads: list[Background] = []

    def start(call: Callable[[], Any], name: str = "background") -> Background:
        threads.append(Background(call, name))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} still waits"
