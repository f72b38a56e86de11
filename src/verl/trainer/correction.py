"""Correction of samples for the gap between the policy that sampled them and the one that trains on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl.algorithms.correction import (
    REJECTION_STATISTICS,
    icepop_weights,
    rejection_mask,
    truncated_weights,
    weight_metrics,
)
from verl.algorithms.registry import unknown_name
from verl.algorithms.segments import segment_count
from verl.config.schema import RolloutCorrectionConfig
from verl.data.batch import SampleBatch
from verl.errors import ConfigError

SECTION = "algorithm.rollout_correction"
# Names of before the statistics had names of their own.
OLD_STATISTICS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(frozen=True)
class Rejection:
    """What stays: statistic within [low, high], in units of the statistic (None is no bound)."""

    statistic: str
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Correction:
    """level: of the weights, None for none. low: IcePop's lower bound, None for truncation at `high`."""

    level: str | None
    low: float | None
    high: float
    normalize: bool
    rejections: tuple[Rejection, ...]

    @property
    def active(self) -> bool:
        return self.level is not None or bool(self.rejections)


def read_correction(config: RolloutCorrectionConfig) -> Correction:
    """The correction that the config describes.

    Raises:
        ConfigError: a threshold or a statistic cannot be read, or bypass_mode leaves nothing to correct.
    """
    low, high = _bounds("rollout_is_threshold", config.rollout_is_threshold)
    rejections = _rejections(config.rollout_rs, config.rollout_rs_threshold)
    correction = Correction(config.rollout_is, low, high, config.rollout_is_batch_normalize, rejections)
    if config.bypass_mode and correction.active:
        raise ConfigError(
            f"{SECTION}.bypass_mode=True takes the rollout's log-probs as the old policy's, so rollout_is and rollout_rs would "
            "compare them with themselves. Leave bypass_mode out, or the two."
        )
    return correction


def _rejections(statistics: str | None, thresholds: str | None) -> tuple[Rejection, ...]:
    if statistics is None:
        if thresholds is not None:
            raise ConfigError(f"{SECTION}.rollout_rs_threshold={thresholds} is only read with {SECTION}.rollout_rs.")
        return ()
    names = [OLD_STATISTICS.get(name.strip(), name.strip()) for name in statistics.split(",")]
    for name in names:
        if name not in REJECTION_STATISTICS:
            raise ConfigError(f"{SECTION}.rollout_rs: {unknown_name('statistic', name, list(REJECTION_STATISTICS))}.")
    if thresholds is None:
        raise ConfigError(
            f"{SECTION}.rollout_rs={statistics} needs {SECTION}.rollout_rs_threshold, such as 0.5_2.0 or 2.0."
        )
    texts = thresholds.split(",")
    if len(texts) not in (1, len(names)):
        raise ConfigError(
            f"{SECTION}.rollout_rs_threshold={thresholds}: {len(texts)} thresholds for the {len(names)} of rollout_rs. Give one, "
            "or as many."
        )
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(_rejection(name, *_bounds("rollout_rs_threshold", text)) for name, text in zip(names, texts))


def _rejection(statistic: str, low: float | None, high: float) -> Rejection:
    """Bounds of the ratio pi / mu as bounds of k1 = -log(pi / mu); of k2 and k3 as they are."""
    if not statistic.endswith("k1"):
        return Rejection(statistic, low, high)
    low = 1 / high if low is None else low
    if low >= high:
        raise ConfigError(
            f"{SECTION}.rollout_rs_threshold={high}: bounds the ratio of the two policies, which is about 1, from above; "
            "write a number above 1, or LOW_HIGH."
        )
    return Rejection(statistic, -math.log(high), -math.log(low) if low > 0 else None)


def _bounds(key: str, text: str) -> tuple[float | None, float]:
    """ "2.0" -> (None, 2.0); "0.5_5.0" -> (0.5, 5.0)."""
    parts = text.strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    good = len(numbers) in (1, 2) and all(math.isfinite(n) for n in numbers) and numbers[-1] > 0
    if not good or (len(numbers) == 2 and not 0 <= numbers[0] < numbers[1]):
        raise ConfigError(f"{SECTION}.{key}={text}: takes a number above 0, or two as LOW_HIGH, such as 0.5_2.0.")
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]


def correct(batch: SampleBatch, correction: Correction) -> tuple[SampleBatch, dict[str, float]]:
    """`batch` with `rollout_is_weights` and `loss_mask` (the policy tokens that stay), where asked for; and metrics.

    Advantages have been computed over all samples by then: leaving some out of the group's statistics would bend the
    baseline towards the tokens on which the two policies agree.

    A token with ratio pi / mu = 3 gets weight 2 at threshold 2.0, 0 at 0.5_2.0, and is not in loss_mask with
    rollout_rs=token_k1 at 2.0.
    """
    mask, metrics = batch["response_mask"], {}
    columns = (batch["old_log_probs"].values, batch["rollout_log_probs"].values, mask.values, mask.lengths)
    if correction.level is not None:
        if correction.low is None:
            weights = truncated_weights(*columns, correction.level, correction.high)
        else:
            weights = icepop_weights(*columns, correction.level, correction.low, correction.high)
        metrics |= weight_metrics(weights, mask.values)
        if correction.normalize:
            mean = weights[mask.values].double().mean() if bool(mask.values.any()) else weights.new_ones(())
            weights = (weights / mean.clamp(min=1e-8)).to(weights.dtype)
        batch = batch.with_columns(rollout_is_weights=mask.with_values(weights))
    if correction.rejections:
        kept = mask.values
        for rule in correction.rejections:
            kept = kept & rejection_mask(*columns, rule.statistic, low=rule.low, high=rule.high)
        metrics |= _rejection_metrics(kept, mask.values, mask.lengths)
        batch = batch.with_columns(loss_mask=mask.with_values(kept))
    return batch, metrics


def _rejection_metrics(kept: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> dict[str, float]:
    before, after = segment_count(mask, lengths), segment_count(kept, lengths)
    samples = (before > 0).sum().clamp(min=1)
    return {
        "rollout_corr/rollout_rs_masked_fraction": float(1 - kept.sum() / mask.sum().clamp(min=1)),
        "rollout_corr/rollout_rs_seq_masked_fraction": float(((before > 0) & (after == 0)).sum() / samples),
    }
