"""Losses with one ratio for a whole sequence. Every sample has to be whole within its micro-batch, as all of them are."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import PolicyLossInputs, PolicyLossOptions, mean_over
from verl.algorithms.policy_losses.ratios import log_ratio, pessimistic
from verl.algorithms.registry import Needs, Paper, register_policy_loss
from verl.algorithms.segments import expand, segment_mean

GSPO = Paper("Zheng et al.", 2025, "Group Sequence Policy Optimization", "2507.18071")
GMPO = Paper("Zhao et al.", 2025, "Geometric-Mean Policy Optimization", "2507.20673")

ACTOR = "actor_rollout_ref.actor"


@register_policy_loss(
    "gspo",
    needs=Needs(loss_agg_mode="seq-mean-token-mean"),
    papers=(GSPO,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.clip_ratio_low=3e-4",
        f"{ACTOR}.clip_ratio_high=4e-4",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ),
    reads=("clip_low", "clip_high"),
)
def gspo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> tuple[Tensor, dict]:
    """GSPO: PPO's clip on the sequence's ratio, the geometric mean of its tokens' ratios.

    s = exp(mean_t log r_t); each token has s_t = sg(s) pi / sg(pi), which is s in value and carries the token's own
    gradient; L_t = max(-A s_t, -A clip(s_t)) (Zheng et al. 2025, the token form). With advantages equal along the
    sequence and seq-mean-token-mean this is the paper's sequence loss and gradient.

    Example: log r = 0, 0.4: s = exp(0.2) = 1.2214. A = 1, clip 0.2: both tokens L = -1.2 and no gradient.
    """
    change = log_ratio(inputs)
    mean_change = expand(segment_mean(change, inputs.lengths, inputs.mask), inputs.lengths).detach()
    ratio = torch.exp(mean_change + change - change.detach())
    loss, clipped = pessimistic(ratio, inputs.advantages, options)
    return loss, {"pg_clipfrac": mean_over(clipped, inputs.mask)}


@register_policy_loss(
    "geo_mean",
    needs=Needs(loss_agg_mode="seq-mean-token-mean"),
    papers=(GMPO,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=geo_mean",
        f"{ACTOR}.clip_ratio_low=0.4",
        f"{ACTOR}.clip_ratio_high=0.4",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ),
    reads=("clip_low", "clip_high"),
)
def geo_mean(inputs: PolicyLossInputs, options: PolicyLossOptions) -> tuple[Tensor, dict]:
    """GMPO: the geometric mean of token ratios, each clipped in log space before the mean.

    L = -A exp(mean_t c_t) for the whole sequence and all its tokens, c_t = log r_t, at most clip_high where A >= 0 and
    at least -clip_low where A < 0 (Zhao et al. 2025: 0.4 both). A is the mean of the sequence's advantages.

    Example: log r = 0, 0.4, clip 0.2, A = 1: L = -exp(0.1) = -1.1052.
    """
    change = log_ratio(inputs)
    advantage = expand(segment_mean(inputs.advantages, inputs.lengths, inputs.mask), inputs.lengths)
    bounded = torch.where(advantage >= 0, change.clamp(max=options.clip_high), change.clamp(min=-options.clip_low))
    ratio = torch.exp(segment_mean(bounded, inputs.lengths, inputs.mask))
    high, low = change > options.clip_high, change < -options.clip_low
    metrics = {
        "pg_clipfrac": mean_over(high & (advantage > 0), inputs.mask),
        "pg_clipfrac_lower": mean_over(low & (advantage < 0), inputs.mask),
    }
    return -advantage * expand(ratio, inputs.lengths), metrics
