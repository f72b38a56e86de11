"""`Saver`: one checkpoint at a time, written at once or by the engines' own threads, and whole or not there at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from verl.core.checkpoint_engine.background import Task
from verl.core.checkpoint_engine.store import CheckpointStore, Unfinished
from verl.core.model_engine.api import ModelEngine
from verl.errors import CheckpointError

TORCH_WRITE = ("PytorchStreamWriter failed", "inline_container", "iostream error")  # torch.save's words for it


class Saver:
    """Checkpoints of a run's engines.

    With `checkpoint.async_save` an engine's `save` comes back when it has a copy, and a thread writes that. The checkpoint gets
    its name when everything is on the disk: at the end of a later step (`settle`), before the next checkpoint, or at the
    end of the run. A run that is killed before that goes on from the checkpoint before.
    """

    def __init__(self, store: CheckpointStore):
        self.store = store
        self._begun: Unfinished | None = None
        self._engines: list[ModelEngine] = []
        self._waited = False
        self._sealing: Task | None = None

    @contextmanager
    def writing(self, step: int, engines: Sequence[ModelEngine]) -> Iterator[Path]:
        """The folder to write the checkpoint of `step` into, by these engines' `save` among others."""
        self.settle(wait=True)
        with no_room_named(self.store):
            begun = self.store.begin(step)
            try:
                yield begun.folder
            except BaseException:
                begun.discard()
                raise
        self._begun, self._engines, self._waited = begun, list(engines), False

    def settle(self, wait: bool = False) -> Path | None:
        """Name the checkpoint that was begun if it has been written; with `wait`, when it has. Returns its path.

        Raises:
            CheckpointError: there is no room for it.
        """
        begun = self._begun
        if begun is None:
            return None
        with no_room_named(self.store):
            try:
                if not self._sealed(begun, wait):
                    self._waited = True
                    return None
            except BaseException:
                self._begun = self._sealing = None
                begun.discard()
                raise
            self._begun = self._sealing = None
            return begun.publish()

    def _sealed(self, begun: Unfinished, wait: bool) -> bool:
        """What engines wrote at once is sealed at once; what their threads wrote, by a thread."""
        if self._sealing is None:
            if not all(engine.saved(wait) for engine in self._engines):
                return False
            self._sealing = Task(begun.seal)
        return self._sealing.done(wait or not self._waited)


@contextmanager
def no_room_named(store: CheckpointStore) -> Iterator[None]:
    """Turn what a full disk, a quota or a lost permission raises within into words."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        reason = _failed_write(error)
        if reason is None:
            raise
        newest = store.newest()
        kept = f"the newest whole checkpoint is still {newest.path}" if newest else "there is no earlier checkpoint"
        raise CheckpointError(
            f"The checkpoint cannot be written to {store.folder} ({reason}; {free_bytes(store.folder) / 1e9:.2f} GB are "
            f"free there without it); {kept}. Make room, keep fewer with trainer.max_actor_ckpt_to_keep=1, or choose "
            "another trainer.default_local_dir."
        ) from error


def _failed_write(error: BaseException) -> str | None:
    """The system's reason, if the error is that of a write that failed; torch and safetensors hide it in their own."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, CheckpointException):
        return next(filter(None, (_failed_write(cause) for cause, _ in error.failures.values())), None)
    text = str(error)
    if isinstance(error, RuntimeError) and any(word in text for word in TORCH_WRITE):
        return "writing a file failed, as on a full disk"
    return "No space left on device" if "No space left" in text else None


def free_bytes(folder: Path) -> int:
    """Free space on the file system of this folder, or of the nearest one above that is there."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free
