"""The trainer's newest weights, kept for servers that come later or lost theirs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

PART = "{:05d}.safetensors"


class KeptWeights:
    """Parts of one set of weights, in memory or in a folder that the servers see.

    Senders may begin before the last part is there. All methods but `add` run on the event loop.
    """

    def __init__(self, label: str, version: int, folder: Path | None):
        self.label, self.version = label, version
        self.folder = folder / label if folder is not None else None
        self.whole = False
        self._parts: list[bytes] = []
        self._count = 0
        self._changed = asyncio.Event()
        if self.folder is not None:
            self.folder.mkdir(parents=True)

    def add(self, part: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Take over the tensors of a safetensors file; in the thread that has them."""
        if self.folder is None:
            self._parts.append(part)
        else:
            (self.folder / PART.format(self._count)).write_bytes(part)
            self._count += 1
        loop.call_soon_threadsafe(self._changed.set)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """No part comes after this."""
        self.whole = True
        loop.call_soon_threadsafe(self._changed.set)

    async def part(self, number: int) -> bytes | None:
        """Part `number` as soon as it is there; None after the last one."""
        while number >= len(self._parts) and not self.whole:
            self._changed.clear()
            if number < len(self._parts) or self.whole:
                break
            await self._changed.wait()
        return self._parts[number] if number < len(self._parts) else None

    async def wait_whole(self) -> None:
        while not self.whole:
            self._changed.clear()
            if self.whole:
                break
            await self._changed.wait()

    def drop(self) -> None:
        """Newer ones have come."""
        self._parts = []
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
