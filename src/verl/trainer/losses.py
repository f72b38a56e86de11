"""What the actor and the critic minimise: the registry's losses in the form that a model engine takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from verl.algorithms.aggregate import loss_weights
from verl.algorithms.correction import importance_ratios
from verl.algorithms.inputs import PolicyLossInputs, PolicyLossOptions
from verl.algorithms.kl import kl_estimate
from verl.algorithms.registry import PolicyLoss
from verl.algorithms.value_loss import value_loss
from verl.core.model_engine.api import TokenOutputs
from verl.core.model_engine.metrics import Metric
from verl.data.batch import Ragged, SampleBatch

Metrics = dict[str, Metric]
MISMATCH = "rollout_probs_"


def with_loss_weights(batch: SampleBatch, mode: str, scale: float) -> SampleBatch:
    """`batch` (a whole mini-batch) with the column `loss_weights`, so that it may be split in any way after this."""
    mask = batch["response_mask"]
    weights = loss_weights(mask.values, mask.lengths, mode, scale=scale)
    return batch.with_columns(loss_weights=mask.with_values(weights))


def select_tokens(batch: SampleBatch, loss: PolicyLoss, options: PolicyLossOptions) -> SampleBatch:
    """`batch` (a whole mini-batch) with the column `selection`, for a loss that picks tokens over the mini-batch."""
    if loss.prepare is None:
        return batch
    old = batch["old_log_probs"]
    inputs = PolicyLossInputs(
        log_probs=old.values,
        old_log_probs=old.values,
        advantages=batch["advantages"].values,
        mask=batch["response_mask"].values,
        lengths=old.lengths,
        weights=batch["loss_weights"].values,
    )
    selection = loss.select(inputs, options)
    return batch if selection is None else batch.with_columns(selection=old.with_values(selection))


@dataclass
class ActorLoss:
    """Policy loss - entropy_coeff x entropy + kl_loss_coef x KL(policy, reference).

    A batch without `old_log_probs` is one that this very policy sampled and that gets a single update: the old log-probs
    are then the new ones without their gradient.

    measure_mismatch: also report how far these log-probs are from the rollout's (of the first update after a rollout).
    """

    policy_loss: PolicyLoss
    options: PolicyLossOptions
    temperature: float
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"
    measure_mismatch: bool = False
    with_entropy: bool = field(default=True, init=False)

    def __call__(self, outputs: TokenOutputs, micro: SampleBatch) -> tuple[Tensor, Metrics]:
        log_probs, entropy = outputs.log_probs, outputs.entropy
        if log_probs is None or entropy is None:
            raise ValueError("ActorLoss needs a policy's log-probs and entropy")
        mask, weights = micro["response_mask"].values, micro["loss_weights"].values
        old = micro["old_log_probs"].values if "old_log_probs" in micro else log_probs.detach()
        out = self.policy_loss(
            PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=old,
                advantages=micro["advantages"].values,
                mask=mask,
                lengths=micro["response_mask"].lengths,
                weights=weights,
                rollout_is_weights=_optional(micro, "rollout_is_weights"),
                rollout_log_probs=_optional(micro, "rollout_log_probs"),
                ref_log_probs=_optional(micro, "ref_log_probs"),
                selection=_optional(micro, "selection"),
            ),
            self.options,
        )
        loss = out.loss
        mean_entropy = (weights * entropy).sum()
        metrics: Metrics = {name: Metric.mean(*metric) for name, metric in out.metrics.items()}
        metrics |= {"pg_loss": Metric.sum(out.loss), "entropy_loss": Metric.sum(mean_entropy)}
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * mean_entropy
        if self.kl_coef:
            kl = (weights * kl_estimate(log_probs, micro["ref_log_probs"].values, self.kl_kind)).sum()
            loss = loss + self.kl_coef * kl
            metrics |= {"kl_loss": Metric.sum(kl)}
        if self.measure_mismatch:
            metrics |= _mismatch(
                log_probs.detach(), micro["rollout_log_probs"].values, mask, micro["response_mask"].lengths
            )
        return loss, metrics | {"loss": Metric.sum(loss)}


@dataclass
class CriticLoss:
    """Clipped value loss against the returns."""

    clip_range: float
    temperature: float = 1.0
    with_entropy: bool = False

    def __call__(self, outputs: TokenOutputs, micro: SampleBatch) -> tuple[Tensor, Metrics]:
        if outputs.values is None:
            raise ValueError("CriticLoss needs a value model's values")
        out = value_loss(
            outputs.values,
            micro["values"].values,
            micro["returns"].values,
            micro["response_mask"].values,
            micro["loss_weights"].values,
            self.clip_range,
        )
        metrics: Metrics = {name: Metric.mean(*metric) for name, metric in out.metrics.items()}
        return out.loss, metrics | {"vf_loss": Metric.sum(out.loss)}


def _optional(micro: SampleBatch, name: str) -> Tensor | None:
    column: Ragged | None = micro.columns.get(name)  # type: ignore[assignment]
    return None if column is None else column.values


def _mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor) -> Metrics:
    """Distance of trainer and rollout probabilities, where no forward before the update computes it.

    The moments add up over micro-batches; `mismatch_of_update` makes their correlation of them.
    """
    ours, theirs = (x.exp().double() * mask for x in (log_probs, rollout_log_probs))
    difference = (ours - theirs).abs()
    ratio = importance_ratios(log_probs, rollout_log_probs, mask, lengths).double()
    moments = {
        "x": ours,
        "y": theirs,
        "xx": ours * ours,
        "yy": theirs * theirs,
        "xy": ours * theirs,
        "n": mask.double(),
        "w": ratio,
        "ww": ratio * ratio,
    }
    return {
        **{f"{MISMATCH}moment_{name}": Metric.sum(values.sum()) for name, values in moments.items()},
        f"{MISMATCH}diff_mean": Metric.mean(difference.sum(), mask.sum()),
        f"{MISMATCH}diff_max": Metric.max(difference.max()),
    }


def mismatch_of_update(metrics: dict[str, float]) -> dict[str, float]:
    """Takes the mismatch out of an update's metrics: training/rollout_probs_diff_{mean,max}, the correlation, and the
    effective sample size of the ratios."""
    taken = {k.removeprefix(MISMATCH): metrics.pop(k) for k in list(metrics) if k.startswith(MISMATCH)}
    if not taken:
        return {}
    n = max(taken["moment_n"], 1.0)
    x, y, xx, yy, xy = (taken[f"moment_{name}"] / n for name in ("x", "y", "xx", "yy", "xy"))
    spread = math.sqrt(max(xx - x * x, 0.0) * max(yy - y * y, 0.0))
    return {
        "training/rollout_probs_diff_mean": taken["diff_mean"],
        "training/rollout_probs_diff_max": taken["diff_max"],
        "training/rollout_actor_probs_pearson_corr": (xy - x * y) / spread if spread > 0 else float(x == y),
        "rollout_corr/eff_sample_size": taken["moment_w"] ** 2 / (n * taken["moment_ww"])
        if taken["moment_ww"]
        else 0.0,
    }
