"""Samples of one prompt: their numbers, the parts of their rewards, and drawing them anew by reward."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.filtering import pf_ppo_resample, pf_ppo_weights
from verl.algorithms.registry import AdvantageEstimator
from verl.data.batch import SampleBatch
from verl.errors import RewardError
from verl.trainer.run import Run


def group_numbers(batch: SampleBatch) -> Tensor:
    """int64 [B], equal for samples of one prompt."""
    numbers = {uid: i for i, uid in enumerate(dict.fromkeys(batch["uid"]))}
    return torch.tensor([numbers[uid] for uid in batch["uid"]])


def reward_components(batch: SampleBatch, wanted: list[str], estimator: AdvantageEstimator) -> dict[str, Tensor] | None:
    """What the reward function returned besides `score`, by name, of every sample; None where the estimator reads none.

    wanted: names to take; [] takes all.

    Raises:
        RewardError: one that is wanted was not returned for every sample.
    """
    if not estimator.needs.reward_components:
        return None
    found = {k.removeprefix("reward/"): v for k, v in batch.columns.items() if k.startswith("reward/")}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise RewardError(
            f"algorithm.gdpo_reward_keys: the reward function did not return {', '.join(missing)} for every sample. It "
            f"returned {', '.join(found)}."
        )
    return {name: found[name] for name in wanted or found}


def draw_by_reward(run: Run, batch: SampleBatch) -> SampleBatch:
    """For PF-PPO: as many samples, drawn anew with replacement, those of clear reward more often; else `batch` itself."""
    if not run.config.algorithm.use_pf_ppo:
        return batch
    options = run.config.algorithm.pf_ppo
    weights = pf_ppo_weights(batch["score"], group_numbers(batch), options.reweight_method, options.weight_pow)
    generator = torch.Generator().manual_seed(run.config.trainer.seed * 1_000_003 + run.step)
    return batch.select(pf_ppo_resample(weights, generator))
