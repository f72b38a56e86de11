"""Which samples to train on: groups with a spread, soft punishment of overlong responses, reweighting by rank."""

from __future__ import annotations

import torch
from torch import Tensor


def _extremes(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's group number, and its group's largest and smallest score: [B] each."""
    ids, index = groups.to(scores.device).unique(return_inverse=True)
    start = scores.new_zeros(ids.numel())
    top = start.scatter_reduce(0, index, scores, "amax", include_self=False)
    bottom = start.scatter_reduce(0, index, scores, "amin", include_self=False)
    return index, top[index], bottom[index]


def in_group_with_spread(scores: Tensor, groups: Tensor) -> Tensor:
    """Whether the sample's group has scores that differ: floating [B], int64 [B] -> bool [B].

    DAPO's dynamic sampling keeps these and refills the rest (Yu et al. 2025, arXiv 2503.14476): a group of equal
    scores gives no gradient. A group of one is not kept.

    >>> in_group_with_spread(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 8, 8])).tolist()
    [True, True, False, False]
    """
    _, top, bottom = _extremes(scores, groups)
    return top > bottom


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What to add to the score of long responses: int64 [B], in tokens -> float32 [B], from 0 down to -factor.

    0 up to max_length - buffer tokens, then falling in a line to -factor at max_length, and -factor beyond (DAPO, Yu
    et al. 2025, arXiv 2503.14476, soft overlong punishment).

    >>> overlong_penalty(torch.tensor([70, 80, 90, 100, 120]), max_length=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer has to be between 1 and max_length={max_length} tokens, not {buffer}")
    room = (max_length - buffer - response_lengths).to(torch.float32)
    return factor * (room / buffer).clamp(-1, 0)


PF_PPO_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(scores: Tensor, groups: Tensor, method: str, power: float = 2.0) -> Tensor:
    """Chance, up to a factor, of each sample to be drawn for training: floating [B] -> float64 [B].

    Rewards are most reliable at the ends of a group's ranking, so those are drawn more often (Shen et al. 2024, Policy
    Filtration, arXiv 2409.06957). pow: |score| ** power. max_min: 1 for the group's best and worst, else 0.
    max_random: 0.4 for the group's best, else 0.1.

    >>> pf_ppo_weights(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 0]), "max_min").tolist()
    [1.0, 0.0, 1.0]
    """
    if method not in PF_PPO_METHODS:
        raise ValueError(f"unknown PF-PPO method '{method}'. Allowed: {', '.join(PF_PPO_METHODS)}")
    scores = scores.to(torch.float64)
    if method == "pow":
        return scores.abs() ** power
    _, top, bottom = _extremes(scores, groups)
    if method == "max_min":
        return ((scores == top) | (scores == bottom)).to(torch.float64)
    return torch.where(scores == top, 0.4, 0.1).to(torch.float64)


def pf_ppo_resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw B of B samples with replacement, by weight: floating [B] -> int64 [B], indices.

    All weights 0 (as pow gives where every score is 0) draw evenly.
    """
    if weights.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    weights = weights.cpu() if bool((weights > 0).any()) else torch.ones(weights.numel())
    return torch.multinomial(weights, weights.numel(), replacement=True, generator=generator)
