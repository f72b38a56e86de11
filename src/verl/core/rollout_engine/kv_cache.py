"""Keys and values of the sequences in generation: one slot a sequence, one block of memory."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.errors import ConfigError

# On a CPU the cache shares its memory with the trainer, whose size the engine cannot know.
CPU_MEMORY_SHARE = 0.5
GIB = 2**30
COPY_BYTES = 2**28  # of cache that is copied at once


@dataclass
class KVCache:
    """data: [2, layers, slots, kv_heads, length, head_dim]; keys first, then values. Slot s holds position p of its sequence
    at [:, :, s, :, p]."""

    data: Tensor

    @classmethod
    def allocate(
        cls, spec: ModelSpec, slots: int, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> KVCache:
        shape = (2, spec.num_layers, slots, spec.num_kv_heads, length, spec.head_dim)
        # Zeros, because what is masked still enters sums: garbage could be NaN.
        return cls(torch.zeros(shape, device=device, dtype=dtype))

    @property
    def keys(self) -> Tensor:
        return self.data[0]

    @property
    def values(self) -> Tensor:
        return self.data[1]

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def length(self) -> int:
        return self.data.shape[4]

    def copy_slots(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy positions 0..length-1 of slots `source` (int64 [m]) over slots `target` (int64 [m]).

        No slot may be both a source and a target. Some slots at a time, so that the gathered copy in between stays small.
        """
        part = self.data[:, :, :, :, :length]
        row_bytes = part[:, :, 0].numel() * part.itemsize
        at_once = max(1, COPY_BYTES // max(1, row_bytes))
        for some_source, some_target in zip(source.split(at_once), target.split(at_once)):
            part.index_copy_(2, some_target, part.index_select(2, some_source))


def slots_that_fit(
    spec: ModelSpec, wanted: int, length: int, dtype: torch.dtype, budget_bytes: int, budget_words: str
) -> int:
    """How many of the `wanted` slots of `length` tokens fit the budget.

    ConfigError with all numbers when not even one does. budget_words says where the budget comes from.
    """
    per_slot = spec.kv_elements_per_token * length * dtype.itemsize
    fitting = min(wanted, budget_bytes // per_slot)
    if fitting < 1:
        raise ConfigError(
            f"The KV cache of one sequence of {length} tokens needs {per_slot / GIB:.2f} GiB, and {budget_words} leaves "
            f"{max(budget_bytes, 0) / GIB:.2f} GiB. Raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower "
            "data.max_prompt_length or data.max_response_length."
        )
    return int(fitting)


def cpu_budget() -> tuple[int, str]:
    """(bytes, where they come from) that the cache may take on a CPU now."""
    available = psutil.virtual_memory().available
    words = f"{CPU_MEMORY_SHARE:.0%} of the {available / GIB:.1f} GiB of free memory"
    return int(available * CPU_MEMORY_SHARE), words


def cuda_budget(utilization: float, device: torch.device, weight_bytes: int, reserve_bytes: int) -> tuple[int, str]:
    """(bytes, where they come from) that the cache may take on a GPU now.

    Engine weights, activations (`reserve_bytes`) and cache together stay within `utilization` of the whole memory, and
    within what is free now.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = min(int(total * utilization) - weight_bytes, free) - reserve_bytes
    words = (
        f"gpu_memory_utilization={utilization} of {total / GIB:.1f} GiB ({free / GIB:.1f} GiB free), less "
        f"{weight_bytes / GIB:.1f} GiB of weights and {reserve_bytes / GIB:.1f} GiB for activations,"
    )
    return budget, words
