"""`SampleBatch`: the one format in which samples travel from data to loss.

Variable-length columns are stored flat with their lengths (`Ragged`), never padded to the longest. Per-sample numbers
are tensors of shape [B]; everything else (uid, finish reason, extra_info) is a list of B objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """B rows of different lengths, laid end to end.

    values: [N, ...] with N = lengths.sum(). lengths: int64 [B], on the CPU.

    >>> r = Ragged.from_rows([[1, 2], [], [3]])
    >>> r.values.tolist(), r.lengths.tolist(), [row.tolist() for row in r.rows()]
    ([1, 2, 3], [2, 0, 1], [[1, 2], [], [3]])
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if self.values.shape[0] != total:
            raise ValueError(f"Ragged: {self.values.shape[0]} values for lengths that sum to {total}")

    def __len__(self) -> int:
        return self.lengths.numel()

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: torch.dtype = torch.int64) -> Ragged:
        lengths = torch.tensor([len(r) for r in rows], dtype=torch.int64)
        tensors = [torch.as_tensor(r, dtype=dtype) for r in rows]
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), lengths)

    def rows(self) -> tuple[Tensor, ...]:
        return self.values.split(self.lengths.tolist())

    def with_values(self, values: Tensor) -> Ragged:
        """The same row lengths around other values [N, ...]."""
        return Ragged(values, self.lengths)

    def select(self, index: Tensor) -> Ragged:
        """Rows `index` (int64), in that order, repeats allowed."""
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[index]
        return Ragged(self.values[ranges(starts[index], lengths).to(self.values.device)], lengths)

    def sums(self) -> Tensor:
        """Sum of each row: [B, ...]; an empty row sums to 0."""
        rows = torch.repeat_interleave(torch.arange(len(self)), self.lengths).to(self.values.device)
        out = torch.zeros((len(self), *self.values.shape[1:]), dtype=self.values.dtype, device=self.values.device)
        return out.index_add_(0, rows, self.values)

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(copy_to(self.values, device), self.lengths)

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        return cls(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))


def copy_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`. A copy to a GPU neither waits for it nor makes it wait: it starts from page-locked memory."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenation of `arange(starts[i], starts[i] + lengths[i])`: int64 [lengths.sum()].

    >>> ranges(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = lengths.cumsum(0)
    offset = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return torch.arange(int(lengths.sum()), dtype=torch.int64) + offset


Column = Ragged | Tensor | list


class SampleBatch:
    """B samples as named columns: `Ragged`, a tensor whose first dimension is B, or a list of B objects.

    Columns by stage (all response columns share the response's lengths):

    - prompts: uid (list of str, one a prompt: samples of one uid are a group), prompt_ids (Ragged int64),
      data_source, ground_truth, extra_info (lists)
    - generation: response_ids (Ragged int64), response_mask (Ragged bool: True where the policy chose the token),
      rollout_log_probs (Ragged float32), finish_reason (list: "stop", "length", "abort"), policy_version (int64 [B])
    - reward: score (float32 [B])
    - training: old_log_probs, ref_log_probs, values, token_rewards, advantages, returns (Ragged float32)
    """

    def __init__(self, columns: dict[str, Column]):
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"SampleBatch: columns of different sizes: {sizes}")
        self.columns = dict(columns)
        self._size = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Any:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"SampleBatch has no column '{name}'; it has {sorted(self.columns)}") from None

    def with_columns(self, **columns: Column) -> SampleBatch:
        """A batch with these columns added or replaced; the others are shared, not copied."""
        return SampleBatch({**self.columns, **columns})

    def without(self, *names: str) -> SampleBatch:
        return SampleBatch({k: v for k, v in self.columns.items() if k not in names})

    def select(self, index: Iterable[int] | Tensor) -> SampleBatch:
        """Samples `index`, in that order, repeats allowed."""
        index = torch.as_tensor(index if isinstance(index, Tensor) else list(index), dtype=torch.int64)
        picked = index.tolist()
        return SampleBatch(
            {
                k: [v[i] for i in picked]
                if isinstance(v, list)
                else v.select(index)
                if isinstance(v, Ragged)
                else v[index.to(v.device)]
                for k, v in self.columns.items()
            }
        )

    def split(self, size: int) -> list[SampleBatch]:
        """Consecutive batches of `size` samples; the last may be smaller."""
        return [self.select(range(start, min(start + size, len(self)))) for start in range(0, len(self), size)]

    @classmethod
    def cat(cls, parts: Sequence[SampleBatch]) -> SampleBatch:
        """Samples of all parts, in order; the parts have the same columns."""
        names = set(parts[0].columns)
        for part in parts[1:]:
            if set(part.columns) != names:
                raise ValueError(f"SampleBatch.cat: columns differ: {sorted(names ^ set(part.columns))}")
        merged: dict[str, Column] = {}
        for name, first in parts[0].columns.items():
            columns = [p.columns[name] for p in parts]
            if isinstance(first, Ragged):
                merged[name] = Ragged.cat(columns)
            elif isinstance(first, list):
                merged[name] = [x for c in columns for x in c]
            else:
                merged[name] = torch.cat(columns)
        return cls(merged)

    def to(self, device: torch.device | str) -> SampleBatch:
        """Tensor columns on `device`; row lengths stay on the CPU."""
        return SampleBatch({k: _moved(v, device) for k, v in self.columns.items()})

    @property
    def token_counts(self) -> Tensor:
        """Prompt plus response tokens of each sample: int64 [B]."""
        return self["prompt_ids"].lengths + self["response_ids"].lengths


def _moved(column: Column, device: torch.device | str) -> Column:
    if isinstance(column, list):
        return column
    return column.to(device) if isinstance(column, Ragged) else copy_to(column, device)
