"""`CheckpointStore`: checkpoint folders on disk that are either whole or not there.

Layout, under the run's folder:

    global_step_20/{actor,critic,...}      the contents, written by whoever owns them
    global_step_20/manifest.json           every file with its size and checksum, and a serial number; its presence means "whole"
    latest_checkpointed_iteration.txt      "20"

A checkpoint is written into a hidden folder on the same file system, flushed, listed in its manifest, and only then
renamed to its final name. A process killed at any point therefore leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.core.checkpoint_engine.atomic import sync_folder, sync_tree, write_atomically
from verl.core.checkpoint_engine.file_sums import differing_file, file_sums
from verl.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
EARLIER = "Go on from an earlier one with trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N."
_NAME = re.compile(r"global_step_(\d+)")
_WRITING, _REPLACED, _DELETING = ".writing_", ".replaced_", ".deleting_"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. serial: rises with each write into one run's folder, whatever the step numbers do."""

    path: Path
    step: int
    serial: int


def step_of(path: Path | str) -> int:
    """The step in the name of a checkpoint folder.

    >>> step_of("checkpoints/demo/global_step_20/")
    20
    """
    match = _NAME.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint folder: its name should be global_step_N")
    return int(match.group(1))


def defect(path: Path) -> str | None:
    """What keeps the folder from being a whole checkpoint, in words; None if it is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {name: int(size) for name, size in manifest["files"].items()}
        int(manifest["serial"])
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not written to the end"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def verify(path: Path, below: str = "") -> None:
    """Read every file of a whole checkpoint (or those below one of its folders) against its checksum.

    Raises:
        CheckpointError: a file holds something else than was written. (Checkpoints of earlier versions have no checksums.)
    """
    sums = {name: value for name, value in _manifest(path).get("crc32", {}).items() if name.startswith(below)}
    if (name := differing_file(path, sums)) is not None:
        raise CheckpointError(
            f"{path / name} is damaged: its contents are not what was written (its checksum differs). {EARLIER}"
        )


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written, into `folder`."""

    store: CheckpointStore
    step: int
    folder: Path

    def seal(self) -> None:
        """Flush everything to the disk and list it with checksums, about a second a GB. A seal that fails discards it."""
        try:
            self.store._seal(self.folder, self.step)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> Path:
        """Give it its name, when it is sealed; returns its path."""
        return self.store._name(self)

    def discard(self) -> None:
        """Delete what was written; the earlier checkpoints stay as they are."""
        shutil.rmtree(self.folder, ignore_errors=True)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: the run's folder; made when the first checkpoint is written.
        keep: how many of the newest checkpoints stay; None keeps all.
        notify: takes one line of text when something happened that the user should know.

    "Newest" means written last. After a resume from an earlier step, the checkpoints of the new branch are newer than
    those of the old one although their step numbers may be smaller.

    One process writes into a folder at a time: the controller, which hands the path to its workers.
    """

    def __init__(self, folder: Path | str, keep: int | None = None, notify: Callable[[str], None] = _log.warning):
        if keep is not None and keep < 1:
            raise ConfigError(f"trainer.max_actor_ckpt_to_keep is {keep}: write 1 or more, or null to keep all")
        self.folder = Path(folder)
        self.keep = keep
        self._notify = notify

    # --- writing -------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write the checkpoint of `step` into; on leaving the block it becomes `global_step_<step>`.

        If the block raises, what it wrote is deleted and the earlier checkpoints stay as they are.
        """
        begun = self.begin(step)
        try:
            yield begun.folder
        except BaseException:
            begun.discard()
            raise
        begun.seal()
        begun.publish()

    def begin(self, step: int) -> Unfinished:
        """A folder to write the checkpoint of `step` into, to be sealed and published, or discarded, before the next one is begun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean_up()
        temporary = self.folder / f"{_WRITING}global_step_{step}"
        temporary.mkdir()
        return Unfinished(self, step, temporary)

    def _name(self, begun: Unfinished) -> Path:
        final = self.folder / f"global_step_{begun.step}"
        self._publish(begun.folder, final)
        write_atomically(self.folder / TRACKER, str(begun.step))
        self._retire()
        return final

    def _seal(self, temporary: Path, step: int) -> None:
        """Flush everything to the disk first: a manifest must never list what a power cut can still take away."""
        sync_tree(temporary)
        files = {
            p.relative_to(temporary).as_posix(): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()
        }
        sums = file_sums(temporary, files)
        serial = 1 + max((c.serial for c in self._whole()), default=0)
        manifest = {"step": step, "serial": serial, "files": files, "crc32": sums}
        write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))

    def _publish(self, temporary: Path, final: Path) -> None:
        # A folder cannot be renamed over a full one, so an older checkpoint of the same step steps aside first;
        # a kill between the two renames is undone by `_clean_up`.
        aside = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(aside)
        temporary.rename(final)
        sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _retire(self) -> None:
        if self.keep is None:
            return
        for checkpoint in self._whole()[: -self.keep]:
            # Renamed first: a deletion that is cut short must not leave something with a checkpoint's name.
            doomed = self.folder / f"{_DELETING}{checkpoint.path.name}"
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove what a killed process left behind, and put back a checkpoint caught in the middle of a replacement."""
        for aside in self.folder.glob(f"{_REPLACED}global_step_*"):
            final = self.folder / aside.name.removeprefix(_REPLACED)
            if not final.exists():
                aside.rename(final)
        for prefix in (_WRITING, _REPLACED, _DELETING):
            for stale in self.folder.glob(f"{prefix}global_step_*"):
                if prefix == _WRITING:
                    self._notify(f"removed {stale}: a checkpoint that was not written to the end")
                shutil.rmtree(stale, ignore_errors=True)
        for stale in self.folder.glob(f".{TRACKER}.*.tmp"):
            stale.unlink(missing_ok=True)

    # --- finding -------------------------------------------------------------------------------------------------

    def find(self, resume_mode: str, resume_from_path: str | None = None) -> Path | None:
        """The checkpoint to resume from, or None to start from scratch.

        auto: the newest whole checkpoint; None only if the folder has never held one. disable: None. resume_path: that
        folder. Raises CheckpointError where a checkpoint is asked for and none is whole, ConfigError for a wrong mode.
        """
        if resume_mode == "resume_path":
            return self._named(resume_from_path)
        if resume_mode == "auto":
            return self._newest()
        if resume_mode == "disable":
            return None
        raise ConfigError(f"trainer.resume_mode is '{resume_mode}': write auto, disable or resume_path")

    def _newest(self) -> Path | None:
        if not self.folder.is_dir():
            return None
        self._clean_up()
        whole, tracked = self._whole(), self._tracked_step()
        if not whole:
            self._complain_if_there_was_one(tracked)
            return None
        newest = whole[-1]
        if tracked != newest.step:
            named = self.folder / f"global_step_{tracked}"
            wrong = "nothing readable" if tracked is None else f"step {tracked}"
            if tracked is not None and named in [c.path for c in whole]:
                why = f"step {newest.step} was written after it (for step {tracked}: trainer.resume_mode=resume_path)"
            elif tracked is not None:
                why = defect(named) if named.is_dir() else "that folder does not exist"
            else:
                why = "a kill just before it is written does that"
            self._notify(f"{TRACKER} names {wrong}, {why}; resuming from {newest.path}")
        return newest.path

    def _complain_if_there_was_one(self, tracked: int | None) -> None:
        broken = [f"{path}: {defect(path)}" for path in self._folders()]
        if not broken and not (self.folder / TRACKER).exists():
            return
        said = (
            f"{TRACKER} names step {tracked}" if tracked is not None else f"{len(broken)} checkpoint folders are there"
        )
        listing = "".join(f"\n  {line}" for line in broken) or " There is no global_step_N folder."
        raise CheckpointError(
            f"{self.folder} has no whole checkpoint to resume from, although {said}.{listing}\n"
            f"Put the checkpoint back, or start from scratch with trainer.resume_mode=disable, "
            f"or choose another trainer.default_local_dir."
        )

    def _named(self, given: str | None) -> Path:
        if not given:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N")
        path = Path(given).expanduser().absolute()
        shown = f"trainer.resume_from_path={given}"
        if not path.is_dir():
            where = "" if Path(given).is_absolute() else f" (looked for {path})"
            raise CheckpointError(f"{shown}: there is no such folder{where}")
        if _NAME.fullmatch(path.name) is None:
            raise CheckpointError(f"{shown}: the folder's name should be global_step_N.{_better(path)}")
        if problem := defect(path):
            raise CheckpointError(f"{shown}: not a whole checkpoint: {problem}. Choose another checkpoint.")
        return path

    def newest(self) -> Checkpoint | None:
        """The whole checkpoint that was written last; nothing is changed on disk."""
        return whole[-1] if (whole := self._whole()) else None

    def _folders(self) -> list[Path]:
        found = [p for p in self.folder.glob("global_step_*") if p.is_dir() and _NAME.fullmatch(p.name)]
        return sorted(found, key=step_of)

    def _whole(self) -> list[Checkpoint]:
        """Whole checkpoints, the newest last."""
        whole = [Checkpoint(p, step_of(p), _manifest(p)["serial"]) for p in self._folders() if defect(p) is None]
        return sorted(whole, key=lambda c: (c.serial, c.step))

    def _tracked_step(self) -> int | None:
        try:
            return int((self.folder / TRACKER).read_text())
        except (OSError, ValueError):
            return None


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())


def _better(path: Path) -> str:
    """A suggestion for a folder one level too low or too high."""
    if _NAME.fullmatch(path.parent.name):
        return f" Did you mean {path.parent}?"
    inside = sorted((p for p in path.glob("global_step_*") if _NAME.fullmatch(p.name)), key=step_of)
    return f" Did you mean {inside[-1]}?" if inside else ""
