"""Estimators built on rewards-to-go over the tokens that the policy chose.

Masked tokens are cut out before any recursion, so that a policy token's successor is the next policy token, however
many tool tokens lie between, and they are discounted by one step, not by the tool's length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import Groups, on_policy_tokens, scores, whiten
from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions
from verl.algorithms.registry import Needs, Paper, register_advantage
from verl.algorithms.segments import expand, positions, segment_count, suffix_sum

GAE = Paper(
    "Schulman et al.",
    2015,
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    "1506.02438",
)
PPO = Paper("Schulman et al.", 2017, "Proximal Policy Optimization Algorithms", "1707.06347")
REINFORCE_PP = Paper(
    "Hu et al.", 2025, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", "2501.03262"
)
REMAX = Paper(
    "Li et al.",
    2023,
    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    "2310.10505",
)


def policy_counts(inputs: AdvantageInputs) -> Tensor:
    """Policy tokens of each sample: int64 [B], on the CPU."""
    return segment_count(inputs.mask, inputs.lengths).cpu()


def at_policy_tokens(values: Tensor, inputs: AdvantageInputs) -> Tensor:
    """[M] numbers of the M policy tokens -> [N], 0 at the masked ones."""
    return torch.zeros(inputs.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(inputs.mask, values)


def rewards_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over policy tokens: float64 [M]."""
    return suffix_sum(inputs.token_rewards[inputs.mask].to(torch.float64), policy_counts(inputs), gamma)


@register_advantage(
    "gae",
    needs=Needs(critic=True),
    papers=(GAE, PPO),
    settings=("algorithm.adv_estimator=gae", "algorithm.gamma=1.0", "algorithm.lam=0.95"),
    reads=("gamma", "lam"),
)
def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GAE: exponentially weighted temporal differences of the critic's values, whitened over all policy tokens.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, V = 0 after the last policy token
    (Schulman et al. 2015). returns = A + V before whitening: the critic's target.

    Example: rewards 0, 1, values 0.5, 0.25, gamma = 1, lam = 0.5: delta = -0.25, 0.75; A = 0.125, 0.75 before
    whitening; returns = 0.625, 1.
    """
    counts = policy_counts(inputs)
    values = inputs.values[inputs.mask].to(torch.float64)
    rewards = inputs.token_rewards[inputs.mask].to(torch.float64)
    last = (positions(counts) + 1 == expand(counts, counts)).to(values.device)
    following = torch.cat([values[1:], values[:1]]).masked_fill(last, 0)
    advantages = suffix_sum(rewards + options.gamma * following - values, counts, options.gamma * options.lam)
    return at_policy_tokens(whiten(advantages), inputs), at_policy_tokens(advantages + values, inputs)


@register_advantage(
    "reinforce_plus_plus",
    papers=(REINFORCE_PP,),
    settings=(
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=kl",
    ),
    reads=("gamma",),
)
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted reward-to-go, whitened over all policy tokens of the batch.

    G_t = r_t + gamma G_{t+1}; A = (G - mean(G)) / std(G) over tokens (Hu et al. 2025). returns = G.

    Example: two samples of one token with rewards 1, 0: A = 0.7071, -0.7071.
    """
    returns = rewards_to_go(inputs, options.gamma)
    return at_policy_tokens(whiten(returns), inputs), at_policy_tokens(returns, inputs)


@register_advantage(
    "reinforce_plus_plus_baseline",
    needs=Needs(min_group_size=2),
    papers=(REINFORCE_PP,),
    settings=(
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=k2",
    ),
)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline: score minus the group's mean, whitened over all policy tokens of the batch.

    A_i = r_i - mean(r) at every policy token, then (A - mean(A)) / std(A) over tokens (Hu et al. 2025, section on
    REINFORCE++-baseline). returns is the score.

    Example: one group of two one-token samples with scores 3, 1: 1, -1, whitened 0.7071, -0.7071.
    """
    centred = on_policy_tokens(Groups(inputs).centred(scores(inputs)), inputs)
    advantages = at_policy_tokens(whiten(centred[inputs.mask]), inputs)
    return advantages, on_policy_tokens(scores(inputs), inputs)


@register_advantage(
    "remax",
    needs=Needs(baseline_rollout=True),
    papers=(REMAX,),
    settings=("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"),
    reads=("gamma",),
)
def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """ReMax: reward-to-go minus the score of the greedy response to the same prompt.

    A_t = G_t - r(greedy), G_t = r_t + gamma G_{t+1} (Li et al. 2023, gamma = 1). returns = G.

    Example: score 1, greedy response's score 0.25, two tokens: A = 0.75, 0.75.
    """
    returns = at_policy_tokens(rewards_to_go(inputs, options.gamma), inputs)
    baseline = inputs.baseline_scores.to(returns.device, torch.float64)
    return returns - on_policy_tokens(baseline, inputs), returns
