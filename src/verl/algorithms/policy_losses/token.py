"""Losses that look at each token by itself. r = pi / pi_old of the token, A its advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import PolicyLossInputs, PolicyLossOptions, mean_over
from verl.algorithms.policy_losses.ratios import MAX_LOG_RATIO, clip_ratio, log_ratio, pessimistic
from verl.algorithms.registry import Needs, Paper, register_policy_loss

PPO = Paper("Schulman et al.", 2017, "Proximal Policy Optimization Algorithms", "1707.06347")
DUAL_CLIP = Paper(
    "Ye et al.", 2019, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", "1912.09729"
)
DAPO = Paper("Yu et al.", 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", "2503.14476")
CISPO = Paper(
    "MiniMax", 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", "2506.13585"
)
SAPO = Paper("Gao et al.", 2025, "Soft Adaptive Policy Optimization", "2511.20347")
GPG = Paper(
    "Chu et al.", 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", "2504.02546"
)
DPPO = Paper("Qi et al.", 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", "2602.04879")
DRO = Paper(
    "Richemond et al.",
    2024,
    "Offline Regularised Reinforcement Learning for Large Language Models Alignment",
    "2405.19107",
)

ACTOR = "actor_rollout_ref.actor"

LossAndMetrics = tuple[Tensor, dict]


@register_policy_loss(
    "vanilla",
    papers=(PPO, DUAL_CLIP, DAPO),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
        f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.loss_agg_mode=token-mean",
    ),
    reads=("clip_low", "clip_high", "clip_c"),
)
def vanilla(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """PPO's clipped loss, with separate bounds below and above and a dual clip.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017; the wider upper bound is DAPO's, Yu
    et al. 2025); where A < 0, L is at most -A clip_c (Ye et al. 2019), so that a ratio that has run away upwards does
    not blow up the loss.

    Example: clip 0.2, clip_c 3. A = 1, r = 1.5: L = -1.2. A = -1, r = 1.5: L = 1.5. A = -1, r = 4: L = 3.
    """
    advantages = inputs.advantages
    upper, clipped = pessimistic(log_ratio(inputs).exp(), advantages, options)
    bound = -advantages * options.clip_c
    lowered = (advantages < 0) & (upper > bound)
    metrics = {
        "pg_clipfrac": mean_over(clipped, inputs.mask),
        "pg_clipfrac_lower": mean_over(lowered, inputs.mask),
    }
    return torch.where(advantages < 0, torch.minimum(upper, bound), upper), metrics


@register_policy_loss(
    "cispo",
    papers=(CISPO,),
    settings=(f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10", f"{ACTOR}.clip_ratio_high=0.2"),
    reads=("clip_low", "clip_high"),
)
def cispo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """CISPO: REINFORCE whose importance weight is clipped, so that no token loses its gradient.

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, sg = without gradient (MiniMax 2025). A clip_low of 1 or
    more is no lower bound, which is the paper's setting.

    Example: clip_high 0.2, r = 1.5, A = 1, pi = 0.5: weight 1.2, L = 0.8318, dL/dlog pi = -1.2.
    """
    ratio = log_ratio(inputs).detach().exp()
    weight = clip_ratio(ratio, options)
    metrics = {"pg_clipfrac": mean_over(weight != ratio, inputs.mask)}
    return -weight * inputs.advantages * inputs.log_probs, metrics


@register_policy_loss(
    "sapo",
    papers=(SAPO,),
    settings=(f"{ACTOR}.policy_loss.loss_mode=sapo",),
    extra={"tau_pos": 1.0, "tau_neg": 1.05},
)
def sapo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """SAPO: a smooth gate in place of the clip, steeper for negative advantages.

    L = -f(r) A, f(r) = 4 / tau * sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg (Gao et al. 2025).
    At r = 1 the gradient is REINFORCE's; it falls off on both sides, faster for a larger tau.

    Example: tau_pos = 1, A = 1, r = 1: L = -2, dL/dlog pi = -1.
    """
    ratio = log_ratio(inputs).exp()
    tau = torch.full_like(ratio, options.extra["tau_neg"]).masked_fill(inputs.advantages > 0, options.extra["tau_pos"])
    return -inputs.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {}


@register_policy_loss(
    "gpg",
    papers=(GPG,),
    settings=(f"{ACTOR}.policy_loss.loss_mode=gpg", "algorithm.adv_estimator=gpg"),
)
def gpg(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """GPG: plain REINFORCE, L = -A log pi, no ratio and no clip (Chu et al. 2025). One update a batch is meant.

    Example: A = 2, pi = 0.5: L = 1.3863, dL/dlog pi = -2.
    """
    return -inputs.advantages * inputs.log_probs, {}


@register_policy_loss(
    "dppo",
    needs=Needs(rollout_log_probs=True),
    papers=(DPPO,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=dppo",
        f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.2",
    ),
    reads=("clip_low", "clip_high"),
)
@register_policy_loss(
    "dppo_tv",
    needs=Needs(rollout_log_probs=True),
    papers=(DPPO,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=dppo_tv",
        f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.2",
    ),
    reads=("clip_low", "clip_high"),
)
def dppo_tv(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """DPPO, binary total variation: tokens whose probability has moved too far the advantage's way are left out.

    The name dppo stands for this too.

    L = -A r with r = pi / mu, mu the rollout's probability; 0 where A > 0, pi > mu and |pi - mu| > clip_high, or
    A < 0, pi < mu and |pi - mu| > clip_low (Qi et al. 2026; their delta is clip_low = clip_high = 0.2).

    Example: clip 0.2, A = 1. mu = 0.01, pi = 0.05: r = 5 and L = -5, where PPO clips. mu = 0.5, pi = 0.75: L = 0.
    """
    ours, theirs = inputs.log_probs.detach().exp(), inputs.rollout_log_probs.exp()
    return _divergence_masked(inputs, options, (ours - theirs).abs())


@register_policy_loss(
    "dppo_kl",
    needs=Needs(rollout_log_probs=True),
    papers=(DPPO,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=dppo_kl",
        f"{ACTOR}.clip_ratio_low=0.05",
        f"{ACTOR}.clip_ratio_high=0.05",
    ),
    reads=("clip_low", "clip_high"),
)
def dppo_kl(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """DPPO, binary KL: as dppo_tv, with the KL divergence between "this token" and "any other" under mu and pi.

    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) (Qi et al. 2026; their delta is 0.05).

    Example: mu = 0.5, pi = 0.75: D = 0.1438; with clip 0.05 and A = 1: L = 0.
    """
    ours, theirs = inputs.log_probs.detach(), inputs.rollout_log_probs
    mu, rest_mu = theirs.exp(), (1 - theirs.exp()).clamp(min=1e-8)
    rest_pi = (1 - ours.exp()).clamp(min=1e-8)
    divergence = mu * (theirs - ours) + rest_mu * (rest_mu.log() - rest_pi.log())
    return _divergence_masked(inputs, options, divergence)


def _divergence_masked(inputs: PolicyLossInputs, options: PolicyLossOptions, divergence: Tensor) -> LossAndMetrics:
    """-A r, 0 where the divergence is over its bound and the update would push it further."""
    difference = (inputs.log_probs - inputs.rollout_log_probs).masked_fill(~inputs.mask, 0)
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = inputs.advantages
    above = (advantages > 0) & (ratio > 1) & (divergence > options.clip_high)
    below = (advantages < 0) & (ratio < 1) & (divergence > options.clip_low)
    metrics = {"pg_clipfrac": mean_over(above, inputs.mask), "pg_clipfrac_lower": mean_over(below, inputs.mask)}
    return (-advantages * ratio).masked_fill(above | below, 0), metrics


@register_policy_loss(
    "dro",
    papers=(DRO,),
    settings=(f"{ACTOR}.policy_loss.loss_mode=dro",),
    extra={"dro_beta": 0.05},
)
def dro(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossAndMetrics:
    """DRO: policy gradient with a quadratic pull to the old policy, sound on off-policy samples without a ratio.

    L = -A log pi + beta / 2 (log pi - log pi_old)^2, whose gradient is that of (A - beta log r)^2 / (2 beta): the
    regression of Richemond et al. 2024 with the old policy as the anchor, token by token.

    Example: beta = 0.05, A = 1, pi = 0.5, pi_old = 0.25: L = 0.6931 + 0.0120 = 0.7052, dL/dlog pi = -0.9653.
    """
    pull = 0.5 * options.extra["dro_beta"] * log_ratio(inputs).square()
    return -inputs.advantages * inputs.log_probs + pull, {}
