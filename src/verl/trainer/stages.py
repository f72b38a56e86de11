"""The stages of a training step. Each takes a batch and gives it back with more columns; pipelines only order them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from verl.algorithms.inputs import AdvantageInputs
from verl.algorithms.kl import apply_kl_penalty, batch_kl
from verl.algorithms.segments import place_scores
from verl.config.derived import name_list
from verl.core.model_engine.loading import end_tokens
from verl.core.rollout_engine.api import Completion, Request, SamplingParams
from verl.core.rollout_engine.requests import assemble
from verl.data.batch import Ragged, SampleBatch
from verl.errors import RewardError
from verl.rewards.types import RewardResult
from verl.trainer.algorithm import advantage_options, aggregation, loss_options
from verl.trainer.correction import correct, read_correction
from verl.trainer.groups import group_numbers, reward_components
from verl.trainer.losses import ActorLoss, CriticLoss, mismatch_of_update, select_tokens, with_loss_weights
from verl.trainer.policy_statistics import add_policy_statistics
from verl.trainer.reward_stream import RewardStream
from verl.trainer.run import Run
from verl.trainer.steplog import StepLog


def draw_prompts(run: Run) -> SampleBatch:
    """The next `data.train_batch_size` prompts."""
    return run.prompts.batch(run.sampler.next_batch(), step=run.step + 1)


def training_sampling(run: Run) -> SamplingParams:
    """How training samples are drawn."""
    rollout = run.config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=run.config.data.max_response_length,
        n=rollout.n,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_token_ids=stop_token_ids(run),
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
    )


def stop_token_ids(run: Run) -> tuple[int, ...]:
    """Tokens that end a response."""
    return end_tokens(run.tokenizer, getattr(run.roles.actor, "generation_config", None))


def generate(
    run: Run, prompts: SampleBatch, sampling: SamplingParams, first_stream: int
) -> tuple[SampleBatch, RewardStream]:
    """`sampling.n` samples of each prompt: [P] prompts -> [P x n] samples, those of a prompt side by side; and their
    rewards, each under way since its sample finished.

    first_stream: number of the first prompt's random stream; the following prompts take the following numbers.

    Two prompts with n=2 give uid [a, a, b, b] and the columns response_ids, response_mask, rollout_log_probs,
    finish_reason, policy_version.
    """
    rows = prompts["prompt_ids"].rows()
    requests = [Request(ids.tolist(), sampling, first_stream + i) for i, ids in enumerate(rows)]
    rewards = RewardStream(run, prompts, sampling.n)
    groups = assemble(requests, rewards.through(run.roles.rollout.stream(requests)))
    repeated = prompts.select(torch.arange(len(prompts)).repeat_interleave(sampling.n))
    return repeated.with_columns(**completion_columns([c for group in groups for c in group])), rewards


def completion_columns(completions: list[Completion]) -> dict:
    """Columns of a SampleBatch from what the engine gave."""
    responses = Ragged.from_rows([c.token_ids for c in completions])
    return {
        "response_ids": responses,
        "response_mask": responses.with_values(torch.ones_like(responses.values, dtype=torch.bool)),
        "rollout_log_probs": Ragged.from_rows([c.log_probs for c in completions], torch.float32),
        "finish_reason": [c.finish_reason for c in completions],
        "policy_version": torch.tensor([c.version for c in completions], dtype=torch.int64),
    }


class Rewards(Protocol):
    """Rewards that are there, or that one can wait for."""

    def result(self) -> RewardResult: ...


def collect_rewards(run: Run, batch: SampleBatch, handle: Rewards, log: StepLog) -> SampleBatch:
    """Adds `score` [B] and a column reward/<name> for each further number that every sample's reward reported.

    Raises:
        RewardError: too many failed, or the estimator works on several rewards and the function reports only one.
    """
    result = handle.result()
    say_failures(run, result)
    log.add(result.metric_means(), "reward/")
    log.add({"reward/failures": result.failures})  # last: a function may report a number of this name
    complete = {f"reward/{k}": torch.tensor(v, dtype=torch.float32) for k, v in result.metrics.items() if None not in v}
    if run.estimator.needs.reward_components and not complete:
        raise RewardError(
            f"algorithm.adv_estimator={run.estimator.name} works on several rewards: the reward function must return a "
            'dict such as {"score": 1.0, "right": 1.0, "format": 0.0}, with the same names for every sample.'
        )
    return batch.with_columns(score=torch.tensor(result.scores, dtype=torch.float32), **complete)


def say_failures(run: Run, result: RewardResult) -> None:
    """Tell the user how many rewards failed, what those samples scored instead, and why the first one did."""
    if result.failures:
        run.tracker.notice(
            f"{result.failures} of {len(result.scores)} rewards failed and count as reward.failure_score="
            f"{run.config.reward.failure_score:g}. The first: {result.failure_messages[0]}"
        )


def add_baselines(run: Run, batch: SampleBatch, prompts: SampleBatch, log: StepLog) -> SampleBatch:
    """For estimators that compare with the greedy response (ReMax): adds `baseline_score`, the score of it, [B]."""
    if not run.estimator.needs.baseline_rollout:
        return batch
    greedy = SamplingParams(run.config.data.max_response_length, temperature=0.0, stop_token_ids=stop_token_ids(run))
    samples, rewards = generate(run, prompts, greedy, first_stream=0)
    result = rewards.result()
    say_failures(run, result)
    by_uid = dict(zip(samples["uid"], result.scores))
    baseline = torch.tensor([by_uid[uid] for uid in batch["uid"]], dtype=torch.float32)
    log.add({"critic/baseline_score/mean": float(baseline.mean())})
    return batch.with_columns(baseline_score=baseline)


def needs_old_log_probs(run: Run) -> bool:
    """Whether the policy's log-probs are needed before the update.

    With one update a step they are those of that update's own forward, so a forward of their own would only repeat it;
    unless something before the update looks at them.
    """
    early = run.kl_control is not None or _corrects(run) or run.estimator.needs.old_log_probs
    return early or run.plan.actor.updates_per_step > 1 or run.policy_loss.prepare is not None


def takes_rollout_log_probs(run: Run, batch: SampleBatch) -> bool:
    """Whether the rollout's log-probs stand for the old policy's: as set, or because they are of the very same policy.

    What dynamic sampling left over from the step before, or an asynchronous pipeline sampled from an older policy, is taken
    so too: the ratio is then to the policy that sampled it, which is exact, and the policy loss bounds it as any other.
    """
    bypass = run.config.algorithm.rollout_correction.bypass_mode
    if bypass is not None:
        return bypass
    if _corrects(run):
        return False
    if not _is_current(run, batch):
        return samples_ahead(run) or (run.roles.same_numerics and run.config.algorithm.filter_groups.enable)
    return run.roles.same_numerics


def samples_ahead(run: Run) -> bool:
    """Whether the pipeline trains on samples of older policies by intent."""
    return run.config.trainer.pipeline != "sync"


def _is_current(run: Run, batch: SampleBatch) -> bool:
    return bool((batch["policy_version"] == run.step).all())


def _corrects(run: Run) -> bool:
    return read_correction(run.config.algorithm.rollout_correction).active


def measures_mismatch(run: Run, batch: SampleBatch) -> bool:
    """Whether rollout and trainer log-probs are compared: as set, and where the engine's are of the whole distribution.

    Samples of an older policy differ from this one by the training between, which says nothing of the engines. In an
    asynchronous pipeline that is what one wants to know.
    """
    exact = getattr(run.roles.rollout, "log_probs_exact", True)
    return (
        run.config.actor_rollout_ref.rollout.calculate_log_probs
        and exact
        and (samples_ahead(run) or _is_current(run, batch))
    )


def add_log_probs(run: Run, batch: SampleBatch, log: StepLog) -> SampleBatch:
    """Adds old_log_probs, ref_log_probs and values, each where the algorithm needs it."""
    temperature = run.config.actor_rollout_ref.rollout.temperature
    needed = needs_old_log_probs(run) or not _is_current(run, batch)
    taken = needed and takes_rollout_log_probs(run, batch)
    if (needed and not taken) or run.estimator.needs.sum_pi_squared:
        batch = add_policy_statistics(run, batch, log, compare=measures_mismatch(run, batch))
    if taken:
        batch = batch.with_columns(old_log_probs=batch["rollout_log_probs"])
    if run.roles.ref is not None:
        with log.time("ref"):
            batch = batch.with_columns(ref_log_probs=run.roles.ref.log_probs(batch, temperature)[0])
    if run.roles.critic is not None:
        with log.time("values"):
            batch = batch.with_columns(values=run.roles.critic.values(batch))
    return batch


def token_rewards(run: Run, batch: SampleBatch, log: StepLog) -> SampleBatch:
    """Adds `token_rewards`: the score on each sample's last policy token, minus the KL penalty where there is one.

    A sample with mask [1, 1, 0] and score 1 gets [0, 1, 0].
    """
    mask = batch["response_mask"]
    rewards = place_scores(batch["score"], mask.values, mask.lengths)
    if run.kl_control is not None:
        rewards, kl = apply_kl_penalty(
            rewards,
            batch["old_log_probs"].values,
            batch["ref_log_probs"].values,
            mask.values,
            run.kl_control.coef,
            run.config.algorithm.kl_penalty,
        )
        mean_kl = batch_kl(kl, mask.values, mask.lengths).mean()
        log.add({"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": run.kl_control.coef})
        run.kl_control.update(mean_kl, len(batch))
    return batch.with_columns(token_rewards=mask.with_values(rewards))


def add_advantages(run: Run, batch: SampleBatch, log: StepLog) -> SampleBatch:
    """Adds token_rewards, advantages and returns, and the weights of the rollout correction."""
    batch = token_rewards(run, batch, log)
    mask, algorithm = batch["response_mask"], run.config.algorithm
    names = ("values", "old_log_probs", "ref_log_probs", "rollout_log_probs", "sum_pi_squared")
    inputs = AdvantageInputs(
        token_rewards=batch["token_rewards"].values,
        mask=mask.values,
        lengths=mask.lengths,
        groups=group_numbers(batch),
        baseline_scores=batch.columns.get("baseline_score"),
        reward_components=reward_components(batch, name_list(algorithm.gdpo_reward_keys), run.estimator),
        **{name: batch[name].values for name in names if name in batch},
    )
    advantages, returns = run.estimator(inputs, advantage_options(run.config, run.estimator))
    batch = batch.with_columns(advantages=mask.with_values(advantages), returns=mask.with_values(returns))
    correction = read_correction(algorithm.rollout_correction)
    if correction.active:
        batch, metrics = correct(batch, correction)
        log.add(metrics)
    return batch


def mini_batches(batch: SampleBatch, size: int, epochs: int, shuffle_seed: int | None = None) -> Iterator[SampleBatch]:
    """`epochs` passes over the samples in mini-batches of `size`, in order or in an order drawn anew for each pass."""
    generator = torch.Generator().manual_seed(shuffle_seed) if shuffle_seed is not None else None
    for _ in range(epochs):
        order = torch.arange(len(batch)) if generator is None else torch.randperm(len(batch), generator=generator)
        for index in order.split(size):
            yield batch.select(index)


TRAINED_ON = [
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "returns",
    "values",
    "rollout_is_weights",
    "loss_mask",
]


_OPTIM = {"actor": "actor_rollout_ref.actor.optim", "critic": "critic.optim"}


def _trained_columns(batch: SampleBatch) -> SampleBatch:
    """What the losses read; texts and metadata need not travel."""
    return SampleBatch({name: batch[name] for name in TRAINED_ON if name in batch})


def _kept_tokens(batch: SampleBatch) -> SampleBatch:
    """The samples without the tokens that the rollout correction rejects: they have no part in the policy's loss."""
    return batch.with_columns(response_mask=batch["loss_mask"]) if "loss_mask" in batch else batch


def update_actor(run: Run, batch: SampleBatch, log: StepLog) -> None:
    """All of the step's optimizer updates of the policy."""
    actor, plan = run.config.actor_rollout_ref.actor, run.plan.actor
    options, mode = loss_options(run.config, run.policy_loss), aggregation(run.config, run.policy_loss)
    temperature = run.config.actor_rollout_ref.rollout.temperature
    kl_coef = actor.kl_loss_coef if actor.use_kl_loss else 0.0
    loss = ActorLoss(run.policy_loss, options, temperature, actor.entropy_coeff, kl_coef, actor.kl_loss_type)
    scale = actor.loss_scale_factor or run.config.data.max_response_length
    seed = actor.data_loader_seed + run.step if actor.shuffle else None
    measures = measures_mismatch(run, batch)
    updates = []
    with log.time("update_actor"):
        for mini in mini_batches(_kept_tokens(_trained_columns(batch)), plan.mini_batch_samples, plan.passes, seed):
            mini = select_tokens(with_loss_weights(mini, mode, scale), run.policy_loss, options)
            # Only the first update's policy is the one that sampled.
            loss.measure_mismatch = not updates and measures and "training/rollout_probs_diff_mean" not in log.metrics
            updates.append(run.roles.actor.train_batch(mini, loss))
    log.add(mismatch_of_update(updates[0]))
    metrics = averages(updates)
    warn_of_skips(run, "actor", metrics, len(updates))
    if "mfu" in metrics:
        log.add({"perf/mfu/actor": metrics.pop("mfu")})
    log.add(metrics, "actor/")
    if "actor/entropy" not in log.metrics:
        log.add({"actor/entropy": metrics["entropy_loss"]})
    if actor.use_kl_loss:
        log.add({"actor/kl_coef": actor.kl_loss_coef})


def update_critic(run: Run, batch: SampleBatch, log: StepLog) -> None:
    """All of the step's optimizer updates of the value model, where there is one."""
    if run.roles.critic is None or run.plan.critic is None:
        return
    critic, plan = run.config.critic, run.plan.critic
    loss, mode = CriticLoss(critic.cliprange_value), critic.loss_agg_mode or "token-mean"
    scale = run.config.actor_rollout_ref.actor.loss_scale_factor or run.config.data.max_response_length
    updates = []
    with log.time("update_critic"):
        for mini in mini_batches(_trained_columns(batch), plan.mini_batch_samples, plan.passes):
            updates.append(run.roles.critic.train_batch(with_loss_weights(mini, mode, scale), loss))
    metrics = averages(updates)
    warn_of_skips(run, "critic", metrics, len(updates))
    if "mfu" in metrics:
        log.add({"perf/mfu/critic": metrics.pop("mfu")})
    log.add(metrics, "critic/")


def averages(updates: list[dict[str, float]]) -> dict[str, float]:
    """Mean over a step's updates; `lr` is the last one's, skipped updates add up, maxima stay maxima."""
    out = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        column = [u[name] for u in updates if name in u]
        if name == "lr":
            out[name] = column[-1]
        elif name == "skipped_updates":
            out[name] = sum(column)
        else:
            out[name] = max(column) if name.endswith("_max") else sum(column) / len(column)
    return out


def warn_of_skips(run: Run, role: str, metrics: dict[str, float], updates: int) -> None:
    """Say so, once a run, when a step changed nothing because none of its gradients was finite."""
    if metrics.get("skipped_updates", 0) == updates:
        run.tracker.notice(
            f"a step of the {role} changed nothing: the gradient of every update was infinite or NaN ({role}/skipped_updates "
            f"counts them). Look for very large rewards, and try a lower {_OPTIM[role]}.lr."
        )


def warn_of_mismatch(run: Run, log: StepLog) -> None:
    """Say so when rollout and trainer no longer compute the same probabilities: weights or settings differ somewhere."""
    alarm = run.config.actor_rollout_ref.rollout.mismatch_alarm
    difference = log.metrics.get("training/rollout_probs_diff_mean", 0.0)
    if log.metrics.get("training/staleness_max", 0) > 0:
        return  # the training between explains it
    if alarm is not None and difference > alarm:
        run.tracker.notice(
            f"rollout and trainer probabilities differ by {difference:.3f} on average (rollout.mismatch_alarm={alarm}): "
            "the rollout engine may hold other weights than the trainer. See training/rollout_probs_diff_*."
        )
