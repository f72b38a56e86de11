"""Checksums of weights, to hold what a rollout engine has against what the trainer sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24
_PERIOD = 65_521


def checksum(tensor: Tensor) -> int:
    """A number in [0, 2**64) that depends on every bit of the tensor and on its place, computed where the tensor is.

    Two sums modulo 2**64, of the bit patterns and of the patterns times their places (modulo 65,521), folded into one.
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        places = torch.arange(start, start + part.numel(), device=flat.device) % _PERIOD + 1
        sums += torch.stack([part.sum(), (part * places).sum()])
    plain, placed = sums.tolist()
    return (plain * 0x9E3779B97F4A7C15 + placed) % 2**64


class Sums:
    """Checksums of tensors that pass by, by name."""

    def __init__(self, dtype: torch.dtype | None):
        """dtype: what the receiver casts floating tensors to; None: it takes them as they are."""
        self.dtype, self.by_name = dtype, {}

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same pairs, each taken note of."""
        for name, tensor in weights:
            self.by_name[name] = checksum(
                tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor
            )
            yield name, tensor


def differing(sent: Mapping[str, int], held: Mapping[str, int]) -> list[str]:
    """Names that are not on both sides with the same sum."""
    return sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
