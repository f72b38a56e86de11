"""Sums, means and scans over the samples of a flat batch.

All functions take `lengths` (int64 [B] on the CPU), work on any device, give the same bits on every call, and can be
differentiated twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SegmentSum(torch.autograd.Function):
    """[N] -> [B]. Its gradient is `_Expand`, and the other way round, so neither needs atomic additions."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.lengths = lengths
        if values.numel() == 0:
            return values.new_zeros(lengths.numel())
        on_device = lengths.to(values.device)
        return torch.segment_reduce(values.contiguous(), "sum", lengths=on_device, unsafe=True, initial=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Expand.apply(grads[0], ctx.lengths), None


class _Expand(torch.autograd.Function):
    """[B] -> [N]."""

    @staticmethod
    def forward(ctx: Any, per_sample: Tensor, lengths: Tensor) -> Tensor:
        ctx.lengths = lengths
        on_device = lengths.to(per_sample.device)
        return torch.repeat_interleave(per_sample, on_device, output_size=int(lengths.sum()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SegmentSum.apply(grads[0], ctx.lengths), None


def check_lengths(values: Tensor, lengths: Tensor, name: str = "values") -> None:
    """Raise ValueError unless `values` has one entry for each of the lengths.sum() tokens."""
    total = int(lengths.sum())
    if values.shape[0] != total:
        raise ValueError(
            f"{name} has {values.shape[0]} tokens, but lengths sum to {total} over {lengths.numel()} samples"
        )


def segment_sum(values: Tensor, lengths: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of each sample's tokens, of those in `mask` if it is given: floating [N] -> [B]. An empty sample gives 0.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1])).tolist()
    [3.0, 0.0, 4.0]
    """
    check_lengths(values, lengths)
    if mask is not None:
        values = values.masked_fill(~mask, 0)
    return _SegmentSum.apply(values, lengths)


def segment_count(mask: Tensor, lengths: Tensor) -> Tensor:
    """Number of True entries in each sample: bool [N] -> int64 [B], on the mask's device."""
    return segment_sum(mask.to(torch.float64), lengths).to(torch.int64)


def segment_mean(values: Tensor, lengths: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of each sample's tokens, of those in `mask` if it is given: floating [N] -> [B].

    A sample without such tokens gives 0.
    """
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    count = segment_count(mask, lengths).clamp(min=1)
    return segment_sum(values, lengths, mask) / count.to(values.dtype)


def expand(per_sample: Tensor, lengths: Tensor) -> Tensor:
    """Each sample's number at each of its tokens: [B] -> [N].

    >>> expand(torch.tensor([5, 6, 7]), torch.tensor([2, 0, 1])).tolist()
    [5, 5, 7]
    """
    if per_sample.shape[0] != lengths.numel():
        raise ValueError(f"{per_sample.shape[0]} numbers for {lengths.numel()} samples")
    return _Expand.apply(per_sample, lengths)


def positions(lengths: Tensor) -> Tensor:
    """Place of each token in its sample, from 0: int64 [N], on the CPU.

    >>> positions(torch.tensor([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)


def pad(values: Tensor, lengths: Tensor, fill: float = 0) -> Tensor:
    """Samples as rows: [N] -> [B, longest], with `fill` after the end of each row."""
    check_lengths(values, lengths)
    width = int(lengths.max()) if lengths.numel() else 0
    flat = expand(torch.arange(lengths.numel()), lengths) * width + positions(lengths)
    empty = values.new_full((lengths.numel() * width,), fill)
    return empty.index_put((flat.to(values.device),), values).view(lengths.numel(), width)


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """The inverse of `pad`: [B, T] -> [N], dropping whatever lies after each row's end."""
    rows = expand(torch.arange(lengths.numel()), lengths)
    return padded[rows.to(padded.device), positions(lengths).to(padded.device)]


def suffix_sum(values: Tensor, lengths: Tensor, factor: float = 1.0) -> Tensor:
    """Discounted sum from each token to the end of its sample, y_t = x_t + factor * y_{t+1}: [N] -> [N].

    Takes log2(longest) vector steps instead of one step a token: after k steps every entry holds the sum of its next
    2^k terms.

    >>> suffix_sum(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1]), factor=0.5).tolist()
    [3.0, 4.0, 4.0, 8.0]
    """
    check_lengths(values, lengths)
    longest = int(lengths.max()) if lengths.numel() else 0
    left = (torch.repeat_interleave(lengths, lengths) - positions(lengths)).to(values.device)
    total, shift, weight = values, 1, factor
    while shift < longest:
        ahead = torch.cat([total[shift:], total.new_zeros(shift)])
        total = total + weight * ahead.masked_fill(left <= shift, 0)
        shift, weight = 2 * shift, weight * weight
    return total


def prefix_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum from the start of its sample up to and with each token: [N] -> [N]."""
    return suffix_sum(values.flip(0), lengths.flip(0)).flip(0)


def place_scores(scores: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Each sample's score on the last token that its policy chose, 0 elsewhere: [B] -> [N].

    A sample without such a token has nowhere to put its score and gets none.

    >>> place_scores(torch.tensor([5.0]), torch.tensor([True, True, False]), torch.tensor([3])).tolist()
    [0.0, 5.0, 0.0]
    """
    check_lengths(mask, lengths, "mask")
    left = suffix_sum(mask.to(torch.float32), lengths)
    return expand(scores.to(mask.device), lengths).masked_fill(~mask | (left != 1), 0)
