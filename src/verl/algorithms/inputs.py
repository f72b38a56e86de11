"""What advantage estimators and policy losses take and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """One training step's samples, flat. All on one device but `lengths`, which is on the CPU.

    token_rewards: floating [N], reward of each token, any KL penalty included; the score is on the last token that the
    policy chose. Rewards at masked tokens are not read.
    mask: bool [N], True where the policy chose the token. lengths: int64 [B]. groups: int64 [B], equal for samples of
    one prompt; the numbers themselves mean nothing.
    values: [N], of the critic. baseline_scores: [B], score of the greedy response to the sample's prompt.
    old_log_probs, ref_log_probs, rollout_log_probs: [N], of the trainer's policy before the update, of the frozen
    reference, and of the rollout engine.
    sum_pi_squared: [N], sum over the vocabulary of squared probabilities. reward_components: name -> [B].
    """

    token_rewards: Tensor
    mask: Tensor
    lengths: Tensor
    groups: Tensor
    values: Tensor | None = None
    baseline_scores: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    reward_components: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class AdvantageOptions:
    """gamma: discount. lam: GAE's lambda. norm_by_std: divide a group's advantages by its standard deviation.

    epsilon: added to that deviation. extra: options of one estimator alone, by the names that it registered.
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    epsilon: float = 1e-6
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLossInputs:
    """One micro-batch, flat: whole samples only, on one device (lengths on the CPU).

    log_probs: [N], of the policy that learns, with gradient. old_log_probs: [N], of the policy before the step's
    updates. advantages, mask, lengths: as the estimators give and take them.
    weights: [N], from `aggregate.loss_weights` over the whole mini-batch.
    rollout_is_weights: [N], factors of `correction`. rollout_log_probs: [N], of the rollout engine.
    ref_log_probs: [N], of the frozen reference.
    selection: bool [N], this micro-batch's part of what the loss's `prepare` picked over the mini-batch.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor
    weights: Tensor
    rollout_is_weights: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    selection: Tensor | None = None
    ref_log_probs: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossOptions:
    """clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high] (some losses give them another meaning,
    which they state). clip_c: dual clip's bound. extra: options of one loss alone, by the names that it registered.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    extra: Mapping[str, Any] = field(default_factory=dict)


class MeanMetric(NamedTuple):
    """A mean kept as its two sums, 0-dimensional tensors: add both over micro-batches and ranks, then divide."""

    sum: Tensor
    count: Tensor

    def __add__(self, other: tuple) -> MeanMetric:
        return MeanMetric(self.sum + other[0], self.count + other[1])

    def mean(self) -> float:
        """0 when nothing was counted."""
        return float(self.sum) / max(float(self.count), 1.0)


def mean_over(values: Tensor, mask: Tensor) -> MeanMetric:
    """Mean of `values` [N] over the tokens in `mask` [N], without gradient."""
    return MeanMetric(values.detach().float().masked_fill(~mask, 0).sum(), mask.sum())


@dataclass(frozen=True)
class LossOutput:
    """token_loss: [N], 0 at masked tokens. loss: (weights * token_loss).sum(), to be summed over micro-batches."""

    token_loss: Tensor
    loss: Tensor
    metrics: dict[str, MeanMetric]
