"""Estimators whose baseline is the group: the samples of one prompt.

All take one score a sample (the sum of its policy tokens' rewards, KL penalty included) and give every policy token of
the sample the same advantage. `returns` is that score. A group of one, and a group whose scores are equal, get
exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import Groups, on_policy_tokens, scores
from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions
from verl.algorithms.registry import Needs, Paper, register_advantage, unknown_name
from verl.algorithms.segments import segment_count

DEEPSEEK_MATH = Paper(
    "Shao et al.",
    2024,
    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "2402.03300",
)
DR_GRPO = Paper("Liu et al.", 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", "2503.20783")
RLOO = Paper(
    "Ahmadian et al.",
    2024,
    "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    "2402.14740",
)
PASS_AT_K = Paper(
    "Tang et al.",
    2025,
    "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
    "2503.19595",
)
OPO = Paper("Hao et al.", 2025, "On-Policy RL with Optimal Reward Baseline", "2505.23585")
GPG = Paper(
    "Chu et al.", 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", "2504.02546"
)
GDPO = Paper(
    "Liu et al.",
    2026,
    "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    "2601.05242",
)


def _outcome(advantages: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    return on_policy_tokens(advantages, inputs), on_policy_tokens(scores(inputs), inputs)


@register_advantage(
    "grpo",
    needs=Needs(min_group_size=2),
    papers=(DEEPSEEK_MATH, DR_GRPO),
    settings=(
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=True",
        "actor_rollout_ref.rollout.n=64",
    ),
    reads=("norm_by_std", "epsilon"),
)
def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GRPO: score minus the group's mean, divided by the group's standard deviation.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), std with n - 1 (Shao et al. 2024). norm_by_std=False leaves out the
    division, as Dr. GRPO does (Liu et al. 2025), which together with the seq-mean-token-sum-norm aggregation takes
    away the bias to short right and long wrong answers.

    Example: scores 1, 0, 0, 1 have mean 0.5 and std 0.57735: A = 0.866, -0.866, -0.866, 0.866.
    """
    group, reward = Groups(inputs), scores(inputs)
    advantages = group.centred(reward)
    if options.norm_by_std:
        advantages = advantages / (group.std(reward) + options.epsilon)
    return _outcome(advantages, inputs)


@register_advantage(
    "rloo",
    needs=Needs(min_group_size=2),
    papers=(RLOO,),
    settings=("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4"),
)
def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """RLOO: score minus the mean score of the group's other samples.

    A_i = r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean(r)) * n / (n - 1) (Ahmadian et al. 2024).

    Example: scores 3, 0, 0: A = 3, -1.5, -1.5.
    """
    group = Groups(inputs)
    n = group.counts[group.index].to(torch.float64)
    return _outcome(group.centred(scores(inputs)) * n / (n - 1).clamp(min=1), inputs)


@register_advantage(
    "grpo_passk",
    needs=Needs(min_group_size=2),
    papers=(PASS_AT_K,),
    settings=("algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=False"),
    reads=("norm_by_std", "epsilon"),
)
def grpo_passk(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Pass@k: only the group's best sample learns, by how much it beats the second best.

    A_best = max(r) - second(r), divided by std(r) + epsilon if norm_by_std; all others 0. This is the leave-one-out
    gradient of the expected best of n (Tang et al. 2025). Two equal best samples give 0 for all.

    Example: scores 1, 5, 3 without the division: A = 0, 2, 0.
    """
    group, reward = Groups(inputs), scores(inputs)
    best = -group.smallest(-reward)[group.index]
    is_best = (reward == best) & group.valid
    # With several best samples the second best equals the best, and the advantage is 0 whichever is called best.
    alone = group.sum(is_best.double())[group.index] == 1
    others = torch.where(is_best, -torch.inf, reward)
    second = -group.smallest(-others)[group.index]
    wins = is_best & alone & (group.counts[group.index] > 1)
    advantages = torch.where(wins, best - second, 0.0)
    if options.norm_by_std:
        advantages = advantages / (group.std(reward) + options.epsilon)
    return _outcome(advantages, inputs)


@register_advantage(
    "opo",
    needs=Needs(min_group_size=2),
    papers=(OPO,),
    settings=(
        "algorithm.adv_estimator=opo",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.rollout.n=8",
    ),
)
def opo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """OPO: score minus the group's mean score weighted by length.

    A_i = r_i - sum_j l_j r_j / sum_j l_j with l_j the sample's policy tokens (Hao et al. 2025): the baseline of least
    variance if the squared gradient norm of a response grows with its length. Made for exact on-policy updates.

    Example: scores 1, 0 with 1 and 3 tokens: baseline 0.25, A = 0.75, -0.25.
    """
    group, reward = Groups(inputs), scores(inputs)
    above = group.spread(reward)
    length = segment_count(inputs.mask, inputs.lengths).to(torch.float64)
    baseline = group.sum(length * above) / group.sum(length).clamp(min=1)
    return _outcome((above - baseline[group.index]).masked_fill(~group.valid, 0), inputs)


@register_advantage(
    "gpg",
    needs=Needs(min_group_size=2),
    papers=(GPG,),
    settings=(
        "algorithm.adv_estimator=gpg",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
        "actor_rollout_ref.rollout.n=8",
    ),
)
def gpg(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GPG: score minus the group's mean, scaled up for the samples that teach nothing.

    A_i = B / (B - M) * (r_i - mean(r)), with B samples in the batch, M of them in groups of equal scores
    (Chu et al. 2025, with F_norm = 1): such samples give no gradient but do count in the loss's average.

    Example: groups (1, 0) and (1, 1): B = 4, M = 2, A = 1, -1, 0, 0.
    """
    group, reward = Groups(inputs), scores(inputs)
    teaches = (group.sum(group.spread(reward)) > 0)[group.index] & group.valid
    scale = group.valid.sum() / teaches.sum().clamp(min=1)
    return _outcome(scale * group.centred(reward), inputs)


@register_advantage(
    "gdpo",
    needs=Needs(min_group_size=2, reward_components=True),
    papers=(GDPO,),
    settings=("algorithm.adv_estimator=gdpo",),
    reads=("norm_by_std", "epsilon"),
    extra={"gdpo_reward_weights": {}},
)
def gdpo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GDPO: each of several rewards normalised in its group by itself, then summed, then normalised over the batch.

    A_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + epsilon), and then (A_i - mean(A)) / (std(A) + epsilon) over all
    samples of the batch (Liu et al. 2026). Reads reward_components alone: neither the total score nor a KL penalty in
    the reward reaches it. gdpo_reward_weights: name -> w_k; a reward that is not named has weight 1.

    Example: one group, rewards a = (0, 1) and b = (0, 2): both normalise to -0.7071, 0.7071; their sum to
    -1.4142, 1.4142; over the batch A = -0.7071, 0.7071.
    """
    components = dict(inputs.reward_components or {})
    weights = options.extra["gdpo_reward_weights"]
    for name in weights:
        if name not in components:
            raise ValueError(unknown_name("reward in gdpo_reward_weights", name, list(components)))
    group = Groups(inputs)
    total = torch.zeros_like(scores(inputs))
    for name in sorted(components):
        reward = components[name].to(total.device)
        one = group.centred(reward)
        if options.norm_by_std:
            one = one / (group.std(reward) + options.epsilon)
        total = total + weights.get(name, 1.0) * one
    valid = total[group.valid].sort().values
    if valid.numel() > 1:
        total = (total - valid.mean()) / (valid.std() + options.epsilon)
    return _outcome(total.masked_fill(~group.valid, 0), inputs)
