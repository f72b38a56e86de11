"""Memory that torch's allocator keeps of a GPU."""

from __future__ import annotations

import torch


def give_back_unused() -> None:
    """Let others have the GPU memory that this process holds for later use: allocators of other processes, or vLLM's.

    Takes some 10 ms, and as much again when the memory is next needed.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
