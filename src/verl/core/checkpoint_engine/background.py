"""Checkpoints that a thread writes while training goes on, from copies in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from verl.core.checkpoint_engine.atomic import sync_tree
from verl.core.checkpoint_engine.disk import save_sharded


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory of tensors and of the local shards of DTensors."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


class Task:
    """Something that a thread does. The thread does not keep the process from ending."""

    def __init__(self, work: Callable[[], object]):
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self, wait: bool) -> bool:
        """Whether it is done; with `wait`, when it is. Raises what it raised."""
        self._thread.join(None if wait else 0)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


class BackgroundWriter:
    """Writes for one engine, one checkpoint at a time. Every rank of the default group makes one.

    The ranks' threads agree on who writes what through a process group of their own: collectives of the training threads may
    come in between at any time.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._task: Task | None = None

    def start(
        self, folder: Path, parts: dict[str, dict[str, Tensor]], further: Callable[[], object] | None = None
    ) -> None:
        """Begin to write: parts are sharded states by their folder's name. further: something else to do there.

        The tensors are not to change any more. What was begun before has to be `done`.
        """
        if self._task is not None:
            raise RuntimeError("a checkpoint is still being written")

        def write() -> None:
            for name, state in parts.items():
                save_sharded(state, folder / name, self._group)
            if further is not None:
                further()
            sync_tree(folder)

        self._task = Task(write)

    def done(self, wait: bool) -> bool:
        """Whether this rank's part of what was begun is on the disk; with `wait`, when it is.

        Raises what went wrong in writing it.
        """
        task, self._task = self._task, None
        if task is None or task.done(wait):
            return True
        self._task = task
        return False
