"""Writes that survive a kill or a power cut: flush, then rename."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush the names in one folder to the disk."""
    _sync(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def sync_tree(folder: Path) -> None:
    """Flush every file below the folder, and every folder's list of names, to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if path.is_file():
                _sync(path, os.O_RDONLY)
        sync_folder(Path(root))


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's contents: a reader, or a kill at any moment, sees all of the old text or all of the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
