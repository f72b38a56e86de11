"""The optimal token baseline: a group baseline that differs by token."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import Groups
from verl.algorithms.advantages.returns import at_policy_tokens, policy_counts, rewards_to_go
from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions
from verl.algorithms.registry import Needs, Paper, register_advantage
from verl.algorithms.segments import expand, positions, prefix_sum, segment_sum

OTB = Paper("Li et al.", 2026, "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL", "2602.07078")


@register_advantage(
    "optimal_token_baseline",
    needs=Needs(min_group_size=2, old_log_probs=True, sum_pi_squared=True),
    papers=(OTB,),
    settings=("algorithm.adv_estimator=optimal_token_baseline", "actor_rollout_ref.rollout.n=4"),
)
def optimal_token_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """OTB: reward-to-go minus a baseline for each token place, weighted by the gradient energy spent so far.

    W_t = sum_{j <= t} w_j with w = 1 - 2 pi + sum_v pi_v^2, the squared norm of the log-prob's gradient by the logits;
    b_t = sum_i W_t^i G_t^i / sum_i W_t^i over the group's samples that reach place t; A_t = G_t - b_t
    (Li et al. 2026). Places count policy tokens.

    Where one sample alone is left, b_t would be its own return and its tail would learn nothing: there the baseline
    of the last place that two samples reach is used. A group of one gets 0. returns = G.

    Example: two one-token samples with returns 1, 0 and weights 1, 3: b = 0.25, A = 0.75, -0.25.
    """
    counts = policy_counts(inputs)
    returns = rewards_to_go(inputs, 1.0)
    energy = prefix_sum(_gradient_energy(inputs), counts)
    group = Groups(inputs)
    token_group = expand(group.index.cpu(), counts)
    place = positions(counts)
    shared = _shared_places(counts, group.index.cpu())[token_group]

    # Returns above the group's smallest give exactly 0 where all are equal.
    least = torch.full((group.counts.numel(),), torch.inf, dtype=torch.float64, device=returns.device)
    token_group_on = token_group.to(returns.device)
    above = returns - least.scatter_reduce(0, token_group_on, returns, "amin")[token_group_on]

    width = int(counts.max()) if counts.numel() else 0
    baseline = _weighted_mean_by_key(above, energy, token_group * width + place, place < shared)
    looked_up = baseline[(token_group * width + place.minimum((shared - 1).clamp(min=0))).to(above.device)]
    advantages = (above - looked_up).masked_fill((shared == 0).to(above.device), 0)
    return at_policy_tokens(advantages, inputs), at_policy_tokens(returns, inputs)


def _gradient_energy(inputs: AdvantageInputs) -> Tensor:
    """Squared norm of each policy token's log-prob gradient by its logits: float64 [M]."""
    prob = inputs.old_log_probs[inputs.mask].to(torch.float64).exp()
    squared = inputs.sum_pi_squared[inputs.mask].to(torch.float64)
    return (1 - 2 * prob + squared).clamp(min=0)


def _shared_places(counts: Tensor, group: Tensor) -> Tensor:
    """Places that at least two samples of a group reach, the second largest count: int64 [B], [B] -> [G]."""
    order = counts.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    sizes = torch.bincount(group)
    second = (sizes.cumsum(0) - sizes + 1).clamp(max=max(group.numel() - 1, 0))
    return counts[order][second].masked_fill(sizes < 2, 0) if group.numel() else sizes


def _weighted_mean_by_key(values: Tensor, weights: Tensor, keys: Tensor, used: Tensor) -> Tensor:
    """Mean of the used values of each key, weighted (evenly where all weights are 0): float64 [largest key + 1]."""
    total_keys = int(keys.max()) + 1 if keys.numel() else 0
    index = used.nonzero().squeeze(1)
    index = index[keys[index].argsort(stable=True)]
    sizes = torch.bincount(keys[index], minlength=total_keys)
    index = index.to(values.device)
    values, weights = values[index], weights[index]
    weights = torch.where(expand(segment_sum(weights, sizes) > 0, sizes), weights, torch.ones_like(weights))
    return segment_sum(values * weights, sizes) / segment_sum(weights, sizes).clamp(min=1e-300)
