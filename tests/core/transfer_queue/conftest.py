"""Both queues behind one fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.core.transfer_queue.helpers import Background

from verl.core.transfer_queue.local import LocalTransferQueue


@pytest.fixture(params=["local"])
def make_queue(request) -> Callable[..., Any]:
    return LocalTransferQueue


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
