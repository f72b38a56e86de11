"""Numbers that a loss reports, in a form that adds up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """0-dimensional tensors. kind: "mean" (of value over count), "sum", or "max"."""

    kind: str
    value: Tensor
    count: Tensor | None = None

    @classmethod
    def mean(cls, total: Tensor, count: Tensor) -> Metric:
        return cls("mean", total.detach(), count.detach())

    @classmethod
    def sum(cls, value: Tensor) -> Metric:
        return cls("sum", value.detach())

    @classmethod
    def max(cls, value: Tensor) -> Metric:
        return cls("max", value.detach())

    def merge(self, other: Metric) -> Metric:
        """This metric over the samples of both."""
        if self.kind == "max":
            return Metric("max", torch.maximum(self.value, other.value))
        count = None if self.count is None or other.count is None else self.count + other.count
        return Metric(self.kind, self.value + other.value, count)


def merge_into(totals: dict[str, Metric], new: Mapping[str, Metric]) -> None:
    """Merge the metrics of one more micro-batch."""
    for name, metric in new.items():
        totals[name] = totals[name].merge(metric) if name in totals else metric


def reduce(metrics: Mapping[str, Metric], device: torch.device, copies: int = 1) -> dict[str, float]:
    """Over all ranks, as Python numbers, with one transfer from the device. A mean over nothing is 0.

    copies: so many ranks have the same samples.
    """
    names = sorted(metrics)
    if not names:
        return {}
    one = torch.ones((), dtype=torch.float64, device=device)
    rows = [
        torch.stack([metrics[n].value.double(), one if (c := metrics[n].count) is None else c.double()]) for n in names
    ]
    table = torch.stack(rows)
    if dist.get_world_size() > 1:
        largest = table.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(table)
        table /= copies
        is_max = torch.tensor([metrics[n].kind == "max" for n in names], device=device)
        table = torch.where(is_max[:, None], largest, table)
    numbers = {}
    for name, (value, count) in zip(names, table.tolist()):
        numbers[name] = value / max(count, 1.0) if metrics[name].kind == "mean" else value
    return numbers
