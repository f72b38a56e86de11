"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl.config.schema import FSDPConfig, OptimConfig


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


class StateOffload:
    """Moves an optimizer's moments between its device and page-locked memory of the host, which is kept for the next time.

    Page-locked memory is slow to get and several times faster to copy to and from.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._held: dict[tuple[int, str], Tensor] = {}

    def to_host(self) -> None:
        """Leave the moments on the host. The step counters stay where the fused kernel wants them."""
        for key, state, name in self._moments():
            value = state[name]
            if key not in self._held:
                self._held[key] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            state[name] = self._held[key].copy_(value, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def to_device(self, device: torch.device) -> None:
        """Bring the moments to the device."""
        for _, state, name in self._moments():
            state[name] = state[name].to(device, non_blocking=True)

    def _moments(self) -> Iterator[tuple[tuple[int, str], dict, str]]:
        for number, state in enumerate(self._optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":
                    yield (number, name), state, name


def make_state_offload(
    optimizer: torch.optim.Optimizer | None, fsdp: FSDPConfig, device: torch.device
) -> StateOffload | None:
    """Where the moments go between updates; None: they stay, or FSDP's own offload moves them."""
    moves = fsdp.optimizer_offload and device.type == "cuda" and not fsdp.offload_policy
    return StateOffload(optimizer) if moves and optimizer is not None else None
