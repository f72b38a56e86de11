"""An update of the rollout engine's weights: in place, gathered on the devices that both share, or sent to others."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from verl.core.checkpoint_engine.broadcast import WeightChannel
from verl.core.checkpoint_engine.checksum import Sums, checksum, differing
from verl.core.checkpoint_engine.gather import Traffic
from verl.core.model_engine.api import ModelEngine
from verl.core.rollout_engine.api import RolloutEngine
from verl.core.rollout_engine.service.wire import weight_parts


@dataclass(frozen=True)
class SyncReport:
    """One rank's part in an update of the weights.

    received_bytes: from other ranks. peak_extra_bytes: most that buckets took at once, an engine's own included. sums:
    checksums by name, of what was sent or of what the engine holds, where verification is asked for. device_bytes: most that
    the rank's GPU has had allocated and reserved.
    """

    seconds: float
    received_bytes: int
    peak_extra_bytes: int
    sums: Mapping[str, int] = field(default_factory=dict)
    device_bytes: tuple[int, int] = (0, 0)


def update_shared(
    actor: ModelEngine,
    rollout: RolloutEngine,
    version: int,
    *,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    verify: bool,
    takers: Collection[int] | None = None,
) -> SyncReport:
    """Bring the actor's weights into a rollout engine of the same process, which is awake after this.

    With several ranks, all of them do this together; takers: those with an engine, None: all; the others `send`. dtype: in
    which the engine generates.

    Raises:
        RuntimeError: the engine holds other weights than were sent (with verify).
    """
    started, traffic = time.perf_counter(), Traffic()
    rollout.wake()
    weights = actor.export_weights(dtype=dtype, bucket_bytes=bucket_bytes, takers=takers, traffic=traffic)
    if verify:
        sums = Sums(dtype)
        rollout.load_weights(sums.watch(weights), version)
        check(sums.by_name, held_sums(rollout), "this rank's rollout engine")
    else:
        rollout.load_weights(weights, version)
    return _report(started, traffic, rollout=rollout)


def send(
    actor: ModelEngine,
    channel: WeightChannel | None,
    *,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    verify: bool,
    takers: Collection[int] | None = None,
) -> SyncReport:
    """A training rank's part: its shards to the `takers`, and, on the one that has the channel, all to the rollout workers."""
    started, traffic = time.perf_counter(), Traffic()
    weights = actor.export_weights(dtype=dtype, bucket_bytes=bucket_bytes, takers=takers, traffic=traffic)
    sums = Sums(dtype)
    if channel is None:
        for _ in weights:
            pass
    else:
        channel.send(sums.watch(weights) if verify else weights, dtype, traffic)
    return _report(started, traffic, sums.by_name)


def export_parts(
    actor: ModelEngine, *, dtype: torch.dtype | None, bucket_bytes: int, part_bytes: int
) -> Iterator[bytes | SyncReport]:
    """A training rank's part where servers generate: its shards to the first, which yields `weight_parts`.

    Ends with the rank's report.
    """
    started, traffic, largest = time.perf_counter(), Traffic(), 0
    weights = actor.export_weights(dtype=dtype, bucket_bytes=bucket_bytes, takers=(0,), traffic=traffic)
    for part in weight_parts(weights, part_bytes, dtype, traffic):
        largest = max(largest, len(part))
        yield part
    report = _report(started, traffic)
    yield replace(report, peak_extra_bytes=report.peak_extra_bytes + largest)


def receive(rollout: RolloutEngine, channel: WeightChannel, version: int, *, verify: bool) -> SyncReport:
    """A rollout worker's part."""
    started, traffic = time.perf_counter(), Traffic()
    rollout.wake()
    rollout.load_weights(channel.receive(traffic), version)
    return _report(started, traffic, held_sums(rollout) if verify else {}, rollout)


def held_sums(rollout: RolloutEngine) -> dict[str, int]:
    """Checksums of what the engine generates with."""
    return {name: checksum(tensor) for name, tensor in rollout.held_weights().items()}  # type: ignore[attr-defined]


def check(sent: Mapping[str, int], held: Mapping[str, int], where: str) -> None:
    """RuntimeError if the two sides differ."""
    if wrong := differing(sent, held):
        raise RuntimeError(
            f"{len(wrong)} of {len(sent)} weights differ between the trainer and {where}: {', '.join(wrong[:5])}"
        )


def _report(
    started: float, traffic: Traffic, sums: Mapping[str, int] | None = None, rollout: RolloutEngine | None = None
) -> SyncReport:
    device, own_bucket = (0, 0), getattr(rollout, "load_stats", {}).get("bucket_bytes", 0)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        device = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    peak = traffic.peak_extra + int(own_bucket)
    return SyncReport(time.perf_counter() - started, traffic.received, peak, sums or {}, device)
