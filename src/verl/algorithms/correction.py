"""Correction for samples that came from another policy than the one that trains.

The rollout engine computes log-probs in its own precision and kernels, and in an asynchronous run with older weights.
Here pi is the trainer's policy before the update (old_log_probs) and mu the rollout's; rho = pi / mu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.segments import expand, segment_count, segment_mean, segment_sum

LEVELS = ("token", "sequence")
MAX_LOG_RATIO = 20.0

REJECTION_STATISTICS = (
    *(f"token_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_{how}_{kind}" for how in ("sum", "mean") for kind in ("k1", "k2", "k3")),
    *(f"seq_max_{kind}" for kind in ("k2", "k3")),
)


def _log_rho(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    return (log_probs - rollout_log_probs).detach().float().masked_fill(~mask, 0)


def importance_ratios(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor, level: str = "token"
) -> Tensor:
    """rho of each token, or of the whole sample at each of its tokens: float32 [N], 0 at masked tokens.

    level: token: exp(log pi - log mu). sequence: exp of that difference's sum over the sample's policy tokens. The
    exponent is held within +-20.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown importance sampling level '{level}'. Allowed: {', '.join(LEVELS)}")
    exponent = _log_rho(log_probs, rollout_log_probs, mask)
    if level == "sequence":
        exponent = expand(segment_sum(exponent, lengths), lengths)
    return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(~mask, 0)


def truncated_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    level: str = "token",
    threshold: float = 2.0,
) -> Tensor:
    """Truncated importance sampling, w = min(rho, threshold): float32 [N], 0 at masked tokens.

    Multiplies token losses (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"; truncation: Ionides 2008). The ratio never carries a gradient.

    Example: log pi = -1, -1, log mu = -1, -3: rho = 1, 7.39; token weights 1, 2; sequence weights 2, 2.
    """
    return importance_ratios(log_probs, rollout_log_probs, mask, lengths, level).clamp(max=threshold)


def icepop_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    level: str = "token",
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """IcePop, w = rho within [low, high] and 0 outside: float32 [N], 0 at masked tokens.

    A token on which the two policies disagree that much is left out, not truncated (Ling team 2025, Ring-1T, arXiv
    2510.18855).
    """
    ratios = importance_ratios(log_probs, rollout_log_probs, mask, lengths, level)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0)


def rejection_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    statistic: str,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """The policy tokens to keep, where a statistic of the mismatch is within [low, high]: bool [N].

    With d = log mu - log pi, an estimate of KL(mu, pi) at each token: k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d.
    statistic: token_<k>: each token by itself. seq_sum_<k>, seq_mean_<k>, seq_max_<k>: over a sample's policy tokens;
    the whole sample is kept or dropped. seq_mean_k1 bounds the geometric mean of the ratios.
    low, high: None is no bound.

    Example: d = 0, 1 with seq_mean_k2: (0 + 0.5) / 2 = 0.25; high = 0.3 keeps both tokens, high = 0.2 none.
    """
    if statistic not in REJECTION_STATISTICS:
        raise ValueError(f"unknown rejection statistic '{statistic}'. Allowed: {', '.join(REJECTION_STATISTICS)}")
    level, _, rest = statistic.partition("_")
    d = (-_log_rho(log_probs, rollout_log_probs, mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = {"k1": lambda: d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(-d) + d}[statistic[-2:]]()
    if level == "seq":
        value = expand(_over_sample(value, mask, lengths, rest.partition("_")[0]), lengths)
    keep = mask.clone()
    if low is not None:
        keep &= value >= low
    if high is not None:
        keep &= value <= high
    return keep


def _over_sample(values: Tensor, mask: Tensor, lengths: Tensor, how: str) -> Tensor:
    if how == "sum":
        return segment_sum(values, lengths, mask)
    if how == "mean":
        return segment_mean(values, lengths, mask)
    rows = expand(torch.arange(lengths.numel()), lengths).to(values.device)
    # k2 and k3 are never negative and masked tokens have 0, so 0 is where the maximum may start.
    return values.new_zeros(lengths.numel()).scatter_reduce(0, rows, values, "amax")


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) over the n tokens in the mask: 1 if all weigh the same, 1 / n if one has it all.

    0 without tokens or if all weights are 0.

    >>> round(effective_sample_size(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, True])), 4)
    0.6667
    """
    kept = weights[mask].to(torch.float64)
    square_sum = float(kept.square().sum())
    return float(kept.sum()) ** 2 / (kept.numel() * square_sum) if square_sum > 0 else 0.0


def weight_metrics(weights: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, smallest, largest and effective sample size of correction weights, over the tokens in the mask."""
    kept = weights[mask].to(torch.float64)
    if kept.numel() == 0:
        return {}
    return {
        "rollout_corr/rollout_is_mean": float(kept.mean()),
        "rollout_corr/rollout_is_min": float(kept.min()),
        "rollout_corr/rollout_is_max": float(kept.max()),
        "rollout_corr/rollout_is_zero_fraction": float((kept == 0).double().mean()),
        "rollout_corr/rollout_is_eff_sample_size": effective_sample_size(weights, mask),
    }


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, float]:
    """How far rollout and trainer are apart on the tokens in the mask; {} without any.

    training/rollout_probs_diff_{mean,max,std}: of |pi - mu|. training/rollout_actor_probs_pearson_corr: of pi and mu
    (1 where both are constant and equal, 0 where only one varies). rollout_corr/kl: mean of log mu - log pi, k1 of
    KL(mu, pi); k3_kl: its k3. training_ppl, rollout_ppl: mean over samples of exp(-mean log-prob); ppl_ratio: mean of
    the samples' training over rollout perplexity. eff_sample_size: of the tokens' ratios pi / mu.
    """
    ours, theirs = log_probs[mask].detach().double(), rollout_log_probs[mask].detach().double()
    if ours.numel() == 0:
        return {}
    difference = (ours.exp() - theirs.exp()).abs()
    d = theirs - ours
    has_tokens = (segment_count(mask, lengths) > 0).cpu()
    training, rollout = (
        -segment_mean(x.detach().double(), lengths, mask).cpu()[has_tokens] for x in (log_probs, rollout_log_probs)
    )
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std(correction=0)),
        "training/rollout_actor_probs_pearson_corr": _pearson(ours.exp(), theirs.exp()),
        "rollout_corr/kl": float(d.mean()),
        "rollout_corr/k3_kl": float((torch.expm1((-d).clamp(max=MAX_LOG_RATIO)) + d).mean()),
        "rollout_corr/training_ppl": float(training.exp().mean()),
        "rollout_corr/rollout_ppl": float(rollout.exp().mean()),
        "rollout_corr/ppl_ratio": float((training - rollout).exp().mean()),
        "rollout_corr/eff_sample_size": effective_sample_size(
            importance_ratios(log_probs, rollout_log_probs, mask, lengths), mask
        ),
    }


def _pearson(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    if scale > 0:
        return float((x * y).sum()) / scale
    return 1.0 if bool(torch.equal(x, y)) else 0.0
