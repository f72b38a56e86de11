"""What the policy says of its samples before an update: log-probs, entropy, and what an estimator reads besides."""

from __future__ import annotations

from verl.algorithms.correction import mismatch_metrics
from verl.data.batch import SampleBatch
from verl.trainer.run import Run
from verl.trainer.steplog import StepLog


def add_policy_statistics(run: Run, batch: SampleBatch, log: StepLog, *, compare: bool) -> SampleBatch:
    """Adds old_log_probs, and sum_pi_squared for an estimator that reads it, from one forward of the actor.

    compare: log how far the rollout's log-probs are from them.
    """
    temperature = run.config.actor_rollout_ref.rollout.temperature
    with log.time("old_log_prob"):
        if run.estimator.needs.sum_pi_squared:
            found = run.roles.actor.statistics(batch, temperature)
            batch = batch.with_columns(sum_pi_squared=found["sum_pi_squared"])
            old, entropy = found["log_probs"], found["entropy"]
        else:
            old, entropy = run.roles.actor.log_probs(batch, temperature, with_entropy=True)
    mask = batch["response_mask"].values
    if entropy is not None:
        log.add({"actor/entropy": float(entropy.values[mask].mean())})
    if compare:
        log.add(mismatch_metrics(old.values, batch["rollout_log_probs"].values, mask, old.lengths))
    return batch.with_columns(old_log_probs=old)
