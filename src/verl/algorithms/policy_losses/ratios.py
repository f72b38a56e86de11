"""Probability ratios that cannot overflow, and the PPO clip."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import PolicyLossInputs, PolicyLossOptions

# exp(20) = 4.9e8 is finite in float32 and bfloat16 with room for an advantage and a sum; a ratio this far out is clipped
# by every loss anyway. Its gradient is 0 beyond.
MAX_LOG_RATIO = 20.0


def log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """log pi - log pi_old, within +-20, and 0 without gradient at masked tokens: [N]."""
    return (inputs.log_probs - inputs.old_log_probs).masked_fill(~inputs.mask, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_ratio(ratio: Tensor, options: PolicyLossOptions) -> Tensor:
    """The ratio within [1 - clip_low, 1 + clip_high]."""
    return ratio.clamp(1 - options.clip_low, 1 + options.clip_high)


def pessimistic(ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss max(-A r, -A clip(r)), and where the clip is what counts (float 0 or 1): [N], [N]."""
    free, clipped = -advantages * ratio, -advantages * clip_ratio(ratio, options)
    return torch.maximum(free, clipped), (clipped > free).to(free.dtype)
