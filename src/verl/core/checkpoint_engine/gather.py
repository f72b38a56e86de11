"""From training shards to whole tensors, bucket by bucket: the way of the weights when trainer and rollout share devices.

Each rank casts its shards to the rollout's precision, lays a bucket of them end to end, and one all-gather brings the
other ranks' parts. While the rollout engine takes a bucket's tensors, the next bucket is on its way. So a rank receives
each weight once, in the precision in which it is used, and holds two buckets beside what it had before. Where some ranks
have no use for whole weights, they send their shards to those that have, and receive nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

# The older name, which the newer of the supported torch versions warn of.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Traffic:
    """What one update of the weights cost this rank.

    received: bytes from other ranks. peak_extra: most bytes at once of the memory that was held for it; what one operation
    takes and gives back, here or in a communication library, is not seen.
    """

    def __init__(self) -> None:
        self.received = self.peak_extra = 0
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def hold(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory counts from now until it is freed."""
        self._held.add(tensor.untyped_storage())
        self.peak_extra = max(self.peak_extra, sum(storage.nbytes() for storage in self._held))
        return tensor


@dataclass
class _Part:
    """One tensor of a bucket. shape: of the whole; chunk: its elements on one rank, the last rank's gap included."""

    name: str
    shape: torch.Size
    local: Tensor
    chunk: int


@dataclass
class _Bucket:
    """Tensors that travel together: of one group of ranks and one dtype."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    parts: list[_Part] = field(default_factory=list)

    @property
    def chunk(self) -> int:
        return sum(part.chunk for part in self.parts)

    @property
    def bytes(self) -> int:
        return self.chunk * self.group.size() * self.dtype.itemsize


@dataclass
class _Flight:
    """A bucket on its way. sent has to live until `works` are done; received: None on a rank that only sends."""

    bucket: _Bucket
    sent: Tensor
    received: Tensor | None
    works: list[dist.Work]


def gather_weights(
    named: Iterable[tuple[str, Tensor]],
    device: torch.device,
    *,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    takers: Collection[int] | None = None,
    traffic: Traffic | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on `device`) of every tensor, in order; nothing on a rank that does not take them.

    All ranks of the tensors' mesh iterate to the end, together.

    Args:
        named: DTensors sharded along their first dimension over one mesh dimension, and plain tensors, which pass as they
            are.
        dtype: what floating tensors are cast to before they travel; None leaves them.
        bucket_bytes: gathered size of a bucket; a larger tensor goes alone.
        takers: ranks that get the weights; None: all.
        traffic: takes note of what it costs.
    """
    traffic = traffic or Traffic()
    takes = takers is None or dist.get_rank() in takers
    ahead: _Flight | None = None
    for bucket in _buckets(named, dtype, bucket_bytes):
        if isinstance(bucket, tuple):
            if takes:
                yield bucket
            continue
        following = _send(bucket, device, takers, traffic)
        if ahead is not None:
            yield from _land(ahead, traffic)
        ahead = following
    if ahead is not None:
        yield from _land(ahead, traffic)


def _buckets(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[_Bucket | tuple[str, Tensor]]:
    """Full buckets, and tensors that need no gathering, in between."""
    bucket: _Bucket | None = None
    for name, tensor in named:
        mesh_dim = _shard_dim(name, tensor)
        if mesh_dim is None:
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor
            continue
        group = tensor.device_mesh.get_group(mesh_dim)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        row = tensor.numel() // max(tensor.shape[0], 1)
        part = _Part(name, tensor.shape, tensor.to_local(), -(-tensor.shape[0] // group.size()) * row)
        if bucket is not None and (
            (group, wanted) != (bucket.group, bucket.dtype)
            or bucket.bytes + part.chunk * group.size() * wanted.itemsize > bucket_bytes
        ):
            yield bucket
            bucket = None
        bucket = bucket or _Bucket(group, wanted)
        bucket.parts.append(part)
    if bucket is not None:
        yield bucket


def _shard_dim(name: str, tensor: Tensor) -> int | None:
    """The mesh dimension over which the tensor is sharded, or None where each rank has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    sharded = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    sharded = [i for i in sharded if tensor.device_mesh.size(i) > 1]
    if len(sharded) > 1 or any(tensor.placements[i] != Shard(0) for i in sharded):
        raise ValueError(f"{name} is sharded as {tensor.placements}: only shards of whole rows over one dimension move")
    return sharded[0] if sharded else None


def own_rows(name: str, tensor: DTensor, whole: Tensor) -> Tensor:
    """The rows of `whole` that this rank's shard of `tensor` holds."""
    mesh_dim = _shard_dim(name, tensor)
    if mesh_dim is None:
        return whole
    chunk = -(-tensor.shape[0] // tensor.device_mesh.size(mesh_dim))
    start = chunk * tensor.device_mesh.get_local_rank(mesh_dim)
    return whole[start : start + chunk]


def _send(bucket: _Bucket, device: torch.device, takers: Collection[int] | None, traffic: Traffic) -> _Flight | None:
    """Start a bucket on its way; None if no rank of its group takes it."""
    size, own = bucket.group.size(), bucket.group.rank()
    ranks = dist.get_process_group_ranks(bucket.group)
    taking = [i for i, rank in enumerate(ranks) if takers is None or rank in takers]
    if not taking:
        return None

    def make(count: int) -> Tensor:
        return traffic.hold(torch.empty(count, dtype=bucket.dtype, device=device))

    received = make(size * bucket.chunk) if own in taking else None
    if received is not None:
        traffic.received += received.nbytes // size * (size - 1)
    if len(taking) == size:
        sent = _filled(make(bucket.chunk), bucket)
        return _Flight(bucket, sent, received, [_all_gather(received, sent, group=bucket.group, async_op=True)])
    by_rank = received.view(size, bucket.chunk) if received is not None else None
    sent = _filled(make(bucket.chunk) if by_rank is None else by_rank[own], bucket)
    moves = [dist.P2POp(dist.isend, sent, group=bucket.group, group_peer=i) for i in taking if i != own]
    if by_rank is not None:
        others = [i for i in range(size) if i != own]
        moves += [dist.P2POp(dist.irecv, by_rank[i], group=bucket.group, group_peer=i) for i in others]
    return _Flight(bucket, sent, received, dist.batch_isend_irecv(moves))


def _filled(sent: Tensor, bucket: _Bucket) -> Tensor:
    """`sent`, with this rank's shards in it, end to end."""
    start = 0
    for part in bucket.parts:
        sent[start : start + part.local.numel()].copy_(part.local.reshape(-1), non_blocking=True)
        start += part.chunk
    return sent


def _land(flight: _Flight, traffic: Traffic) -> Iterator[tuple[str, Tensor]]:
    for work in flight.works:
        work.wait()
    if flight.received is None:
        return
    by_rank = flight.received.view(flight.bucket.group.size(), flight.bucket.chunk)
    start = 0
    for part in flight.bucket.parts:
        whole = traffic.hold(by_rank[:, start : start + part.chunk].reshape(-1))
        yield part.name, whole[: part.shape.numel()].view(part.shape)
        start += part.chunk
