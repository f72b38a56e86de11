"""Statistics over the samples of one prompt, and over all policy tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import AdvantageInputs
from verl.algorithms.segments import expand, segment_count, segment_sum


class Groups:
    """The groups of a batch of B samples.

    A sample whose policy chose no token has no score and no gradient, so it takes part in no statistic. Sums run in
    float64 over values sorted within each group, so results have the same bits whatever the order of the samples.

    index: int64 [B], number of the sample's group. valid: bool [B]. counts: int64 [G], valid samples of each group.
    """

    def __init__(self, inputs: AdvantageInputs):
        device = inputs.mask.device
        self.valid = segment_count(inputs.mask, inputs.lengths) > 0
        ids, self.index = inputs.groups.to(device).unique(return_inverse=True)
        self._sizes = torch.bincount(self.index, minlength=ids.numel()).cpu()
        self.counts = self.sum(torch.ones_like(self.valid, dtype=torch.float64)).to(torch.int64)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each group's valid samples: [B] -> float64 [G]."""
        values = values.to(torch.float64).masked_fill(~self.valid, 0)
        by_value = values.argsort(stable=True)
        order = by_value[self.index[by_value].argsort(stable=True)]
        return segment_sum(values[order], self._sizes)

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest value among each group's valid samples: [B] -> float64 [G]; 0 for a group without any."""
        values = values.to(torch.float64).masked_fill(~self.valid, torch.inf)
        start = values.new_full(self.counts.shape, torch.inf)
        least = start.scatter_reduce(0, self.index, values, "amin")
        return least.masked_fill(self.counts == 0, 0)

    def spread(self, values: Tensor) -> Tensor:
        """Value minus the group's smallest: [B] -> float64 [B], exactly 0 where a group's values are all equal."""
        return (values.to(torch.float64) - self.smallest(values)[self.index]).masked_fill(~self.valid, 0)

    def centred(self, values: Tensor) -> Tensor:
        """Value minus the group's mean: [B] -> float64 [B], exactly 0 where a group's values are all equal."""
        above = self.spread(values)
        mean = self.sum(above) / self.counts.clamp(min=1)
        return (above - mean[self.index]).masked_fill(~self.valid, 0)

    def std(self, values: Tensor) -> Tensor:
        """Sample standard deviation (divided by n - 1) of each sample's group: [B] -> float64 [B]; 0 for one alone."""
        variance = self.sum(self.centred(values).square()) / (self.counts - 1).clamp(min=1)
        return variance.sqrt()[self.index]


def scores(inputs: AdvantageInputs) -> Tensor:
    """Total reward of each sample's policy tokens: float64 [B]."""
    return segment_sum(inputs.token_rewards.to(torch.float64), inputs.lengths, inputs.mask)


def on_policy_tokens(per_sample: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Each sample's number at each of its policy tokens, 0 at the others: [B] -> [N]."""
    return expand(per_sample, inputs.lengths).masked_fill(~inputs.mask, 0)


def whiten(values: Tensor) -> Tensor:
    """Values [M] with mean 0 and sample variance 1 (1e-8 is added to it); all 0 if they are equal or there is but one.

    >>> whiten(torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)).round(decimals=6).tolist()
    [-1.0, 0.0, 1.0]
    """
    if values.numel() == 0:
        return values
    above = values - values.min()
    ordered = above.sort().values
    centred = above - ordered.mean()
    variance = (ordered - ordered.mean()).square().sum() / max(values.numel() - 1, 1)
    return centred * torch.rsqrt(variance + 1e-8)
