"""The folder of a run: one run at a time writes into it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import IO

from verl.config.compose import print_notice
from verl.errors import ConfigError, UserError

try:
    import fcntl
except ImportError:  # Windows: a folder is not guarded there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


class FolderLock:
    """Makes `trainer.default_local_dir` and keeps other runs out of it until `release`, or until this process ends.

    The kernel holds the lock, so that a run that is killed leaves none behind; `.lock` itself stays, and names its last
    holder.

    Raises:
        ConfigError: the folder cannot be made or written.
        UserError: another run has it; the message names its process.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] | None = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held as long as the run)
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir={folder} cannot be made or written ({error}): name a folder that you may write to."
            ) from None
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.seek(0)
                holder = self._file.read().strip() or "unknown"
                raise UserError(
                    f"another run is writing into trainer.default_local_dir={self.folder}: process {holder}. Wait until it ends, or "
                    "give this one a folder of its own, for instance with another trainer.experiment_name."
                ) from None
            except OSError as error:  # some network file systems have no locks
                print_notice(f"{self.folder} cannot be locked ({error}): let no second run write into it.")
        try:
            self._file.truncate(0)
            self._file.write(f"{os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as error:  # the disk is full
            raise ConfigError(f"trainer.default_local_dir={self.folder} cannot be written: {error}.") from None

    def release(self) -> None:
        """Let others in. May be called again."""
        if self._file is not None:
            self._file.close()
            self._file = None
