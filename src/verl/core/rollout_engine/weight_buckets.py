"""Weights on their way to another process of the same machine, in buckets that both processes map.

One buffer is allocated, shared once, and filled again and again, so the extra memory is one bucket, whatever the model's
size. On CUDA the buffer is a tensor opened through a CUDA IPC handle, on a CPU a file in memory that both map.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Tensors start at multiples of this, so that any dtype can be viewed in place.
_ALIGNMENT = 256


class BucketWriter:
    """The sending side.

    Args:
        device: where the buffer lives; the readers must reach it.
        bucket_bytes: size of the buffer; a larger tensor gets a buffer of its own size.
        dtype: what floating tensors are cast to before they travel.
    """

    def __init__(self, device: torch.device, bucket_bytes: int, dtype: torch.dtype):
        self.device, self.bucket_bytes, self.dtype = device, bucket_bytes, dtype
        self.buffer: Tensor | None = None
        self.largest = 0  # bytes that the buffer has had
        self._file: Path | None = None
        self._handle: tuple[Any, ...] = ()

    def send(self, weights: Iterable[tuple[str, Tensor]], deliver: Callable[[bytes], None]) -> int:
        """Fill buckets with (name, tensor) pairs and hand each to `deliver`, which returns when the readers are done.

        Returns bytes sent.
        """
        entries: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
        used = total = 0
        for name, tensor in weights:
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            size = tensor.numel() * dtype.itemsize
            if entries and used + size > self._capacity():
                self._flush(entries, deliver)
                entries, used = [], 0
            if size > self._capacity():
                self._allocate(max(size, self.bucket_bytes))
            self.buffer[used : used + size].view(dtype).view(tensor.shape).copy_(tensor)
            entries.append((name, dtype, tuple(tensor.shape), used))
            used += -(-size // _ALIGNMENT) * _ALIGNMENT
            total += size
        if entries:
            self._flush(entries, deliver)
        return total

    def close(self) -> None:
        """Free the buffer; the readers have closed theirs."""
        self.buffer = None
        self._handle = ()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def _capacity(self) -> int:
        return 0 if self.buffer is None else self.buffer.numel()

    def _allocate(self, size: int) -> None:
        self.close()
        self.largest = max(self.largest, size)
        if self.device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._handle = reduce_tensor(self.buffer)
        else:
            descriptor, path = tempfile.mkstemp(prefix="verl-weights-", dir=_memory_folder())
            os.close(descriptor)
            self._file = Path(path)
            self.buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self._handle = (path, size)

    def _flush(self, entries: list, deliver: Callable[[bytes], None]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        deliver(pickle.dumps((self._handle, entries)))


class BucketReader:
    """The receiving side."""

    def __init__(self) -> None:
        self._key: bytes | None = None
        self._buffer: Tensor | None = None

    def tensors(self, bucket: bytes) -> Iterator[tuple[str, Tensor]]:
        """The bucket's (name, tensor) pairs, as views into the shared buffer: good until the next bucket."""
        handle, entries = pickle.loads(bucket)
        self._open(handle)
        for name, dtype, shape, start in entries:
            size = dtype.itemsize * torch.Size(shape).numel()
            yield name, self._buffer[start : start + size].view(dtype).view(shape)

    def close(self) -> None:
        """Unmap the buffer."""
        self._key = self._buffer = None

    def _open(self, handle: tuple[Any, ...]) -> None:
        key = pickle.dumps(handle)
        if key == self._key:
            return
        self.close()
        if callable(handle[0]):
            rebuild, arguments = handle
            self._buffer = rebuild(*arguments)
        else:
            path, size = handle
            self._buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self._key = key


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
