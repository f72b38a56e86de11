"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from verl.config.schema import OptimConfig


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(update: int, config: OptimConfig, total_updates: int) -> float:
    """Learning rate of update number `update` (from 0).

    Linear warm-up over `lr_warmup_steps` updates (or that share of all updates), whose first update already learns, then
    constant, or half a cosine down to `min_lr_ratio * lr` at the last update.

    >>> c = OptimConfig(lr=1.0, lr_warmup_steps=2)
    >>> [learning_rate(u, c, 10) for u in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    warmup = (
        config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_updates)
    )
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    share = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their global L2 norm is at most `max_norm` (0: leave them), and return the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
