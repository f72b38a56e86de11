"""How a batch is split over ranks and put together again, and in which form it travels between processes."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.core.model_engine.packing import prompt_owners
from verl.core.rollout_engine.api import Completion
from verl.data.batch import Ragged, SampleBatch

REASONS = ("stop", "length", "abort")


def balanced(costs: Tensor, parts: int) -> list[Tensor]:
    """Index groups for `parts` ranks: as many samples in each (up to one more), and costs as even as a greedy rule gets.

    Dearest sample first, each to the cheapest group that has room. Indices within a group ascend.

    >>> [g.tolist() for g in balanced(torch.tensor([9, 1, 1, 8]), 2)]
    [[0, 2], [1, 3]]
    """
    numbers = costs.tolist()
    size, larger = divmod(len(numbers), parts)
    groups: list[list[int]] = [[] for _ in range(parts)]
    heap: list[tuple[float, int]] = [(0, g) for g in range(parts)]
    for i in sorted(range(len(numbers)), key=lambda i: (-numbers[i], i)):
        while True:
            cost, g = heapq.heappop(heap)
            if len(groups[g]) < size:
                break
            if len(groups[g]) == size and larger:
                larger -= 1
                break
        groups[g].append(i)
        heapq.heappush(heap, (cost + numbers[i], g))
    return [torch.tensor(sorted(g), dtype=torch.int64) for g in groups]


def shares(batch: SampleBatch, ranks: int) -> list[Tensor]:
    """Indices of each rank's samples: even in number and in tokens.

    Samples of a prompt stay on one rank, where its tokens may be computed once, if that leaves all ranks as many samples.
    """
    costs = batch.token_counts
    _, unit, sizes = prompt_owners(batch["prompt_ids"]).unique(return_inverse=True, return_counts=True)
    if len(sizes) % ranks or (sizes != sizes[:1]).any():
        return balanced(costs, ranks)
    groups = balanced(torch.zeros_like(sizes).index_add_(0, unit, costs), ranks)
    return [torch.isin(unit, group).nonzero().squeeze(1) for group in groups]


def in_order(parts: Sequence[SampleBatch], groups: Sequence[Tensor]) -> SampleBatch:
    """The batch whose samples `groups[r]` are `parts[r]`; empty parts are left out."""
    filled = [(part, group) for part, group in zip(parts, groups) if len(group)]
    whole = SampleBatch.cat([part for part, _ in filled])
    return whole.select(torch.cat([group for _, group in filled]).argsort())


Packed = dict[str, tuple[str, Any, Any]]


def pack(batch: SampleBatch) -> Packed:
    """Columns as NumPy arrays, which Ray's object store shares with the workers of a machine without a copy."""
    packed: Packed = {}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            packed[name] = ("ragged", column.values.numpy(), column.lengths.numpy())
        elif isinstance(column, Tensor):
            packed[name] = ("tensor", column.numpy(), None)
        else:
            packed[name] = ("list", column, None)
    return packed


def unpack(packed: Packed) -> SampleBatch:
    """The batch again. Its tensors may lie in memory that is not to be written to."""
    columns: dict[str, Any] = {}
    for name, (kind, values, lengths) in packed.items():
        if kind == "list":
            columns[name] = values
        else:
            tensor = _tensor(values)
            columns[name] = Ragged(tensor, _tensor(lengths)) if kind == "ragged" else tensor
    return SampleBatch(columns)


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def pack_completions(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Completions as arrays."""
    return {
        "tokens": np.array([t for c in completions for t in c.token_ids], dtype=np.int64),
        "log_probs": np.array([p for c in completions for p in c.log_probs], dtype=np.float32),
        "lengths": np.array([len(c.token_ids) for c in completions], dtype=np.int64),
        "reasons": np.array([REASONS.index(c.finish_reason) for c in completions], dtype=np.int8),
        "versions": np.array([c.version for c in completions], dtype=np.int64),
    }


def unpack_completions(packed: dict[str, np.ndarray]) -> list[Completion]:
    """The completions again; log-probs have been rounded to float32."""
    ends = np.cumsum(packed["lengths"]).tolist()
    tokens, log_probs = packed["tokens"].tolist(), packed["log_probs"].tolist()
    starts = [0, *ends[:-1]]
    rows = zip(starts, ends, packed["reasons"].tolist(), packed["versions"].tolist())
    return [Completion(tokens[a:b], log_probs[a:b], REASONS[reason], version) for a, b, reason, version in rows]
