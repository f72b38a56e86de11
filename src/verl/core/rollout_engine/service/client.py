"""`ServerRolloutEngine`: generation by servers (`verl serve`), as if it were an engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from verl.config.compose import print_notice
from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutStats
from verl.core.rollout_engine.requests import assemble, check_requests, take_from
from verl.core.rollout_engine.service.check import Servers, token_of
from verl.core.rollout_engine.service.fleet import Fleet
from verl.core.rollout_engine.service.group import Group
from verl.core.rollout_engine.service.kept_weights import KeptWeights
from verl.core.rollout_engine.service.wire import weight_parts

T = TypeVar("T")

POLL_SECONDS = 0.02
# Of weights over HTTP: one part travels while the engine takes the one before, and large ones leave either side waiting.
PART_BYTES = 16 << 20
FILE_BYTES = 128 << 20  # of weights in a folder
KEEP_SECONDS = 20.0  # an idle connection: less than servers keep it, or one would close what the other is about to use


class ServerRolloutEngine:
    """Generation by several servers (`RolloutEngine`).

    A request goes to the server that is least busy, and all its samples come from there. What a server had when it died
    goes to others; a sample's random stream does not depend on where it is drawn, so it is the same sample. A server that
    comes (back) gets the newest weights before it gets requests, and an answer drawn with other weights is refused.

    Args:
        config: actor_rollout_ref.rollout.
        servers: what `check_servers` found.
        notify: takes lines for the user.
    """

    def __init__(self, config: RolloutConfig, servers: Servers, notify: Callable[[str], None] = print_notice):
        self.config, self.version, self.stats = config, 0, RolloutStats()
        self.dtype: torch.dtype | None = servers.dtype
        self.native, self._cuts = servers.engines == {"native"}, "vllm" in servers.engines
        self.log_probs_exact = True
        self._run, self._updates = uuid.uuid4().hex[:8], itertools.count()
        self._groups: dict[int, Group] = {}
        self._streaming = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._fleet: Fleet = self._call(self._open(notify))
        self._watching = asyncio.run_coroutine_threadsafe(self._fleet.watch(), self._loop)

    async def _open(self, notify: Callable[[str], None]) -> Fleet:
        settings = self.config.server
        options = {
            "headers": {"Authorization": f"Bearer {token_of(settings)}"},
            "timeout": httpx.Timeout(5.0, read=settings.silence_seconds, write=settings.silence_seconds, pool=None),
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEP_SECONDS),
            "verify": httpx.create_ssl_context(),  # made once for all clients: it reads the system's certificates
            "trust_env": False,
        }
        fleet = Fleet(settings.urls, lambda: httpx.AsyncClient(**options), settings.wait_seconds, notify)
        await asyncio.gather(*(fleet.look(remote) for remote in fleet.remotes))
        return fleet

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in order."""
        return assemble(requests, self.stream(requests))

    def stream(self, requests: list[Request], feed: Feed | None = None) -> Iterator[tuple[int, int, Completion]]:
        """(request index, sample index, completion) as samples finish on any server. feed: requests that come later.

        Leaving the loop early drops the rest.

        Raises:
            WorkerDied: no server was ready for `wait_seconds`, or a request was lost again and again.
            UserError: a server refuses a request, or its engine fails.
        """
        if self._streaming:
            raise RuntimeError(
                "ServerRolloutEngine has one stream at a time: finish or close the one in progress first"
            )
        check_requests(requests)
        self.log_probs_exact = True
        self.stats = RolloutStats()
        return self._stream(requests, feed)

    def _stream(self, requests: list[Request], feed: Feed | None) -> Iterator[tuple[int, int, Completion]]:
        self._streaming = True
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        began, waited, taken = time.perf_counter(), 0.0, 0
        try:
            taken = self._start(requests, taken, inbox)
            while True:
                if feed is not None:
                    more = take_from(feed, not self._groups)
                    feed = feed if more is not None else None
                    taken = self._start(more or [], taken, inbox)
                if not self._groups and feed is None:
                    return
                try:
                    item = inbox.get(timeout=1.0 if feed is None else POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(item, BaseException):
                    raise item
                number, _, completion = item
                self._groups[number].left -= 1
                if self._groups[number].left == 0:
                    del self._groups[number]
                self.stats.response_tokens += len(completion.token_ids)
                handed_over = time.perf_counter()
                yield item
                waited += time.perf_counter() - handed_over
        finally:
            for group in self._groups.values():
                self._loop.call_soon_threadsafe(group.task.cancel)
            self._groups, self._streaming = {}, False
            self.stats.decode_seconds = time.perf_counter() - began - waited

    def _start(self, requests: list[Request], taken: int, inbox: queue.SimpleQueue) -> int:
        for request in requests:
            sampling = request.sampling
            cut = sampling.temperature != 1 and (sampling.top_k > 0 or sampling.top_p < 1)
            self.log_probs_exact &= not (cut and self._cuts)
            self.stats.prompt_tokens += len(request.prompt_ids)
            group = Group(taken, request, self._fleet, inbox.put)
            group.task = asyncio.run_coroutine_threadsafe(group.run(), self._loop)
            self._groups[taken] = group
            taken += 1
        return taken

    def abort(self, requests: Iterable[int]) -> None:
        """Stop these requests (by index) of the stream in progress, which yields what their samples have so far."""
        for number in requests:
            group = self._groups.get(number)
            if group is not None:
                asyncio.run_coroutine_threadsafe(group.abort(), self._loop)

    @property
    def part_bytes(self) -> int:
        """Bytes of weights that travel together, at most; a larger tensor goes alone."""
        most = FILE_BYTES if self.config.server.weights_folder else PART_BYTES
        return min(self.config.checkpoint_engine.update_weights_bucket_megabytes << 20, most)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send weights to all servers while they come from the trainer, and keep a copy for servers that come later.

        Raises:
            CheckpointError: they do not fit a server's model.
            WorkerDied: no server took them.
        """
        self.load_parts(weight_parts(weights, self.part_bytes, self.dtype), version)

    def load_parts(self, parts: Iterable[bytes], version: int) -> None:
        """`load_weights` of what `weight_parts` made elsewhere. Takes all of them, even if the servers fail meanwhile."""
        where = self.config.server.weights_folder
        folder = Path(where).expanduser().absolute() if where else None
        label = f"{self._run}-{version}-{next(self._updates)}"
        kept, before = self._call(self._replace(KeptWeights, label, version, folder))
        if before is not None:
            before.drop()
        publishing = asyncio.run_coroutine_threadsafe(self._fleet.publish(kept), self._loop)
        try:
            for part in parts:
                if not publishing.done():
                    kept.add(part, self._loop)
            if not publishing.done():
                kept.end(self._loop)
            publishing.result()
        except BaseException:
            publishing.cancel()
            raise
        self.version = version

    async def _replace(self, make: type[KeptWeights], *about: Any) -> tuple[KeptWeights, KeptWeights | None]:
        before, self._fleet.kept = self._fleet.kept, make(*about)
        return self._fleet.kept, before

    def sleep(self) -> None:
        """Give back the servers' memory, where the trainer could use it."""
        if self.config.server.shares_devices:
            self._call(self._fleet.sleep())

    def wake(self) -> None:
        """Undo sleep."""
        if self.config.server.shares_devices:
            torch.cuda.empty_cache()  # of this process, if it trains
            self._call(self._fleet.rouse())

    def close(self) -> None:
        """Leave the servers, which go on."""
        if not self._thread.is_alive():
            return
        self._watching.cancel()
        self._call(self._fleet.close())
        if self._fleet.kept is not None:
            self._fleet.kept.drop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
