"""From the trainer to rollout workers on devices of their own: one broadcast for each bucket of weights.

The trainer's first rank is the root of a process group to which, besides it, every rollout worker belongs. The others of
the trainer only take part in gathering. A layout (names, shapes, places) goes ahead through the group's store.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from verl.core.checkpoint_engine.gather import Traffic

# Tensors start at multiples of this, so that any dtype can be viewed in place.
ALIGNMENT = 256


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


# What a bucket holds, and its bytes; an empty one ends the list.
_Layout = tuple[list[_Entry], int]


class WeightChannel:
    """One end of the way: `send` on rank 0, `receive` on all others, called at the same time.

    Args:
        store: shared by all ranks. rank 0 is the sender. device: where buckets lie.
        bucket_bytes: size of a bucket; a larger tensor goes alone.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, bucket_bytes: int, timeout_seconds: int
    ):
        self.device, self.bucket_bytes = device, bucket_bytes
        self._store = dist.PrefixStore("weights", store)
        self._layout: list[_Layout] = []
        self._complete = False
        timeout = timedelta(seconds=timeout_seconds)
        store = dist.PrefixStore("group", self._store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def send(
        self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None, traffic: Traffic | None = None
    ) -> int:
        """Send (name, tensor) pairs, floating ones as `dtype` where it is given; returns the bytes sent.

        Every call sends the same names and shapes in the same order.
        """
        traffic = traffic or Traffic()
        number = total = 0
        flight: tuple[Tensor, dist.Work] | None = None
        for entries, buffer in self._filled(weights, dtype, traffic):
            self._agree(number, (entries, buffer.numel()))
            work = self._broadcast(buffer)
            if flight is not None:
                flight[1].wait()  # so that two buckets live at most
                flight[0].untyped_storage().resize_(0)  # gloo's thread may still have it
            flight = buffer, work
            number += 1
            total += sum(entry.bytes for entry in entries)
        self._agree(number, ([], 0))
        self._complete = True
        if flight is not None:
            flight[1].wait()
        self._finish()
        return total

    def receive(self, traffic: Traffic | None = None) -> Iterator[tuple[str, Tensor]]:
        """The (name, tensor) pairs of one `send`, views of the bucket that they came in.

        One bucket is on its way while another is read, and no third lives unless the caller keeps tensors.
        """
        traffic = traffic or Traffic()
        number, ahead = 0, self._expect(0, traffic)
        while ahead is not None:
            entries, buffer, work = ahead
            work.wait()
            number += 1
            first, *others = entries
            yield first.name, first.of(buffer)
            ahead = self._expect(number, traffic)  # not before: the caller had a tensor of the bucket before until now
            for entry in others:
                yield entry.name, entry.of(buffer)
        self._finish()

    def _filled(
        self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, traffic: Traffic
    ) -> Iterator[tuple[list[_Entry], Tensor]]:
        """Buckets with what is in them."""
        entries: list[_Entry] = []
        buffer, used = self._empty(0), 0
        for name, tensor in weights:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            size = tensor.numel() * kind.itemsize
            if entries and used + size > buffer.numel():
                yield entries, buffer[:used]
                entries = []
            if not entries:
                buffer, used = traffic.hold(self._empty(max(size, self.bucket_bytes))), 0
            entries.append(_Entry(name, kind, tuple(tensor.shape), used))
            entries[-1].of(buffer).copy_(tensor, non_blocking=True)
            used = min(used + -(-size // ALIGNMENT) * ALIGNMENT, buffer.numel())
        if entries:
            yield entries, buffer[:used]

    def _agree(self, number: int, bucket: _Layout) -> None:
        """Tell the receivers what comes, the first time; after that it has to be the same."""
        if not self._complete:
            self._layout.append(bucket)
            self._store.set(str(number), pickle.dumps(bucket))
        elif number >= len(self._layout) or self._layout[number] != bucket:
            raise RuntimeError(f"weights of bucket {number} differ in name, shape or dtype from those sent at first")

    def _expect(self, number: int, traffic: Traffic) -> tuple[list[_Entry], Tensor, dist.Work] | None:
        if number == len(self._layout):
            self._layout.append(pickle.loads(self._store.get(str(number))))
        entries, size = self._layout[number]
        if not entries:
            return None
        buffer = traffic.hold(self._empty(size))
        traffic.received += size
        return entries, buffer, self._broadcast(buffer)

    def _broadcast(self, buffer: Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        return self._group.broadcast([buffer], options)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)
