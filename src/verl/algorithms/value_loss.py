"""The critic's loss and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import LossOutput, mean_over


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, clip_range: float
) -> LossOutput:
    """Clipped squared error, L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 at each token.

    Args:
        values: [N], with gradient. old_values: [N], from before the update. returns: [N], the target.
        mask: bool [N]. weights: [N], from `aggregate.loss_weights`. clip_range: c, in units of value.

    Metrics: vf_clipfrac (share of tokens where the clip counts), vpred_mean.
    (The clip is PPO's reference implementation's; Huang et al. 2022, "The 37 Implementation Details of PPO", item 9.)

    Example: V = 2, V_old = 1, R = 0, c = 0.5: max(4, 2.25) / 2 = 2. V = 2, V_old = 1, R = 3: max(1, 2.25) / 2 = 1.125,
    without gradient.
    """
    clipped = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    free_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    token_loss = (0.5 * torch.maximum(free_error, clipped_error)).masked_fill(~mask, 0)
    metrics = {"vf_clipfrac": mean_over(clipped_error > free_error, mask), "vpred_mean": mean_over(values, mask)}
    return LossOutput(token_loss, (weights * token_loss).sum(), metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the tokens in the mask: 1 is perfect, 0 no better than a constant, below 0 worse.

    Returns that are all equal have no variance to explain: 0.
    """
    target = returns[mask].to(torch.float64)
    if target.numel() < 2 or bool(target.max() == target.min()):
        return 0.0
    residual = target - values[mask].to(torch.float64)
    return float(1 - residual.var() / target.var())
