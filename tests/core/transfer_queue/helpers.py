"""Threads whose end is looked at, and samples for any queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class Background(threading.Thread):
    def __init__(self, call: Callable[[], Any], name: str):
        super().__init__(name=name, daemon=True)
        self.call, self.outcome = call, None

    def run(self) -> None:
        try:
            self.outcome = self.call()
        except BaseException as error:
            self.outcome = error

    def result(self, seconds: float = 10) -> Any:
        self.join(seconds)
        assert not self.is_alive(), f"{self.name} still waits"
        return self.outcome


def add(queue, *uids: str, size: int = 1, orders=None, version: int = 0) -> None:
    """Groups of the orders 0, 1, ... or those given."""
    for order, uid in zip(orders or range(len(uids)), uids, strict=True):
        assert queue.add_group(uid, size, order, version, timeout=10)


def fill(queue, *uids: str, size: int = 1, field: str = "score") -> None:
    for uid in uids:
        queue.put_many([(uid, i, {field: float(i)}) for i in range(size)])


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def until(condition: Callable[[], Any], seconds: float = 10) -> Any:
    """The condition's first true value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("it did not come to pass")
