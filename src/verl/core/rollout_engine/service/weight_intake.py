"""Weights that come over HTTP in parts, or lie in a folder, on their way into the engine."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from verl.core.rollout_engine.service.jobs import Refused, Weights
from verl.core.rollout_engine.service.loop import EngineLoop
from verl.core.rollout_engine.service.schemas import FolderBody, PartQuery

# A sender that is silent for so long has died; the engine then waits for a whole new update.
SILENCE_SECONDS = 120.0
PARTS_AHEAD = 1


class Update:
    """One update of the weights. The engine takes a part while the next one travels."""

    def __init__(self, loop: EngineLoop, first: PartQuery):
        self.name, self.next_part = first.update, 0
        self._parts: queue.Queue[bytes | Exception | None] = queue.Queue(PARTS_AHEAD)
        new = Weights(first.version, first.label)
        self.done: Future = loop.load(self._tensors(), new, abort=first.mode == "abort")

    async def put(self, part: bytes | None) -> None:
        """Hand a part over (None: there are no more); returns early when the update has failed."""
        while not self.done.done():
            try:
                self._parts.put_nowait(part)
                return
            except queue.Full:
                await asyncio.sleep(0.005)

    def give_up(self, why: str) -> None:
        """Let the engine fail this update."""
        while True:
            try:
                self._parts.put_nowait(RuntimeError(why))
                return
            except queue.Full:
                try:
                    self._parts.get_nowait()
                except queue.Empty:
                    continue

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors.torch import load

        while True:
            try:
                part = self._parts.get(timeout=SILENCE_SECONDS)
            except queue.Empty:
                raise RuntimeError(f"the sender of the weights was silent for {SILENCE_SECONDS:.0f} seconds") from None
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            yield from load(part).items()


class WeightIntake:
    """The server's one update at a time."""

    def __init__(self, loop: EngineLoop):
        self._loop, self._update = loop, None

    async def part(self, query: PartQuery, body: bytes) -> Weights | None:
        """Take one part; after the last one, the weights that are loaded.

        A first part takes the place of an update that has not ended: its sender has gone.
        """
        if query.part == 0:
            if self._update is not None:
                self._update.give_up("another update of the weights has begun")
            self._update = Update(self._loop, query)
        update = self._update
        if update is None or update.name != query.update or update.next_part != query.part:
            said = "none is in progress" if update is None else f"part {update.next_part} of {update.name} comes next"
            raise Refused(409, f"Part {query.part} of update {query.update} is out of order: {said}.", "out_of_order")
        update.next_part += 1
        await update.put(body)
        if update.done.done():
            self._update = None
            await self._loaded(update.done)
        if not query.last:
            return None
        await update.put(None)
        try:
            await self._loaded(update.done)
        finally:
            self._update = None
        return Weights(query.version, query.label)

    def close(self) -> None:
        """The server ends: the engine waits for no further part."""
        if self._update is not None:
            self._update.give_up("the server is going down")

    async def folder(self, body: FolderBody) -> Weights:
        """Load all safetensors files of a folder."""
        files = sorted(Path(body.path).expanduser().glob("*.safetensors"))
        if not files:
            raise Refused(400, f"{body.path} on this machine has no safetensors files.", "no_weights")
        new = Weights(body.version, body.label)
        await self._loaded(self._loop.load(_read(files), new, abort=body.mode == "abort"))
        return new

    @staticmethod
    async def _loaded(done: Future) -> None:
        try:
            await asyncio.wrap_future(done)
        except Refused:
            raise
        except Exception as error:  # of the sender's tensors: names, shapes, a body that is no safetensors file
            raise Refused(400, f"The weights were not loaded: {error}", "bad_weights") from error


def _read(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_tensor(name)
