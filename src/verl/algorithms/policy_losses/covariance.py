"""Losses that treat apart the few tokens whose log-prob and advantage vary together: they drive the entropy down.

Which tokens those are is decided once a mini-batch (`prepare` in the registry), from the log-probs before the update,
so that the loss does not depend on how the mini-batch is split. For the first update on a batch those are the policy's
own log-probs, as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import PolicyLossInputs, PolicyLossOptions, mean_over
from verl.algorithms.policy_losses.ratios import log_ratio, pessimistic
from verl.algorithms.registry import Paper, register_policy_loss
from verl.algorithms.segments import positions

ENTROPY_MECHANISM = Paper(
    "Cui et al.", 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", "2505.22617"
)

ACTOR = "actor_rollout_ref.actor"


def covariance(inputs: PolicyLossInputs) -> Tensor:
    """Each policy token's share of Cov(log pi_old, A): (log pi_old - mean) * (A - mean), 0 at masked tokens: [N].

    >>> from verl.algorithms.inputs import PolicyLossInputs
    >>> p, a, m = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0]), torch.tensor([True, True])
    >>> covariance(PolicyLossInputs(p, p, a, m, torch.tensor([2]), m)).tolist()
    [1.0, 1.0]
    """
    count = inputs.mask.sum().clamp(min=1)
    centred = [
        x - x.masked_fill(~inputs.mask, 0).sum() / count for x in (inputs.old_log_probs.detach(), inputs.advantages)
    ]
    return (centred[0] * centred[1]).masked_fill(~inputs.mask, 0)


def _share(inputs: PolicyLossInputs, share: float) -> int:
    """Tokens that a share of the policy tokens is: at least one if there is any."""
    total = int(inputs.mask.sum())
    return min(total, max(1, int(share * total)))


def _draw(inputs: PolicyLossInputs) -> Tensor:
    """A number a token, as good as random but a function of its own data: int64 [N].

    A random generator here would make the pick depend on the order of samples and break exact resumption.
    """
    place = positions(inputs.lengths).to(inputs.mask.device)
    state = torch.zeros_like(place)
    for column in (place, inputs.old_log_probs, inputs.advantages):
        bits = column if column is place else column.detach().float().contiguous().view(torch.int32).to(torch.int64)
        state = ((state ^ (bits & 0xFFFFFFFF)) * 0x9E3779B1) & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return state ^ (state >> 13)


def select_clip_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> Tensor:
    """A draw of clip_cov_ratio of all tokens among those with covariance in (clip_cov_lb, clip_cov_ub): bool [N]."""
    share = covariance(inputs)
    inside = inputs.mask & (share > options.extra["clip_cov_lb"]) & (share < options.extra["clip_cov_ub"])
    index = inside.nonzero().squeeze(1)
    picked = index[_draw(inputs)[index].argsort(stable=True)[: _share(inputs, options.extra["clip_cov_ratio"])]]
    return torch.zeros_like(inputs.mask).index_fill(0, picked, True)


def select_kl_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> Tensor:
    """The kl_cov_ratio of all tokens with the largest covariance: bool [N]."""
    ranked = covariance(inputs).masked_fill(~inputs.mask, -torch.inf)
    picked = ranked.argsort(descending=True, stable=True)[: _share(inputs, options.extra["kl_cov_ratio"])]
    return torch.zeros_like(inputs.mask).index_fill(0, picked, True)


@register_policy_loss(
    "clip_cov",
    papers=(ENTROPY_MECHANISM,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        f"{ACTOR}.policy_loss.clip_cov_ratio=0.0002",
        f"{ACTOR}.policy_loss.clip_cov_lb=1.0",
        f"{ACTOR}.policy_loss.clip_cov_ub=5.0",
    ),
    reads=("clip_low", "clip_high"),
    extra={"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    prepare=select_clip_cov,
)
def clip_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> tuple[Tensor, dict]:
    """Clip-Cov: PPO's clipped loss, without the picked high-covariance tokens.

    L = max(-A r, -A clip(r)), 0 for clip_cov_ratio of the tokens, drawn among those whose covariance is between
    clip_cov_lb and clip_cov_ub (Cui et al. 2025).

    Example: A = 1, r = 1: L = -1; the same token when picked: L = 0.
    """
    loss, clipped = pessimistic(log_ratio(inputs).exp(), inputs.advantages, options)
    metrics = {
        "pg_clipfrac": mean_over(clipped.bool() | inputs.selection, inputs.mask),
        "cov_selected": mean_over(inputs.selection, inputs.mask),
    }
    return loss.masked_fill(inputs.selection, 0), metrics


@register_policy_loss(
    "kl_cov",
    papers=(ENTROPY_MECHANISM,),
    settings=(
        f"{ACTOR}.policy_loss.loss_mode=kl_cov",
        f"{ACTOR}.policy_loss.kl_cov_ratio=0.0002",
        f"{ACTOR}.policy_loss.ppo_kl_coef=1.0",
    ),
    extra={"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
    prepare=select_kl_cov,
)
def kl_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> tuple[Tensor, dict]:
    """KL-Cov: unclipped policy gradient, with a KL pull to the old policy on the highest-covariance tokens.

    L = -A r, plus ppo_kl_coef |log r| for the kl_cov_ratio of tokens with the largest covariance (Cui et al. 2025).

    Example: A = 1, r = 1.5, ppo_kl_coef = 0.1: L = -1.5; when picked -1.5 + 0.1 * 0.4055 = -1.4595.
    """
    change = log_ratio(inputs)
    pull = options.extra["ppo_kl_coef"] * change.abs()
    loss = -inputs.advantages * change.exp() + torch.where(inputs.selection, pull, 0.0)
    return loss, {"cov_selected": mean_over(inputs.selection, inputs.mask)}
