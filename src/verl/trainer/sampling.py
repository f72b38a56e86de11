"""Dynamic sampling: a step filled with prompts whose samples differ, drawn for as long as it takes (DAPO, Yu et al. 2025).

A group whose samples all got the same score gives a group-relative estimator no gradient. Such groups are left out and
others drawn in their place; groups over and above a step's number wait for the next step.
"""

from __future__ import annotations

import torch

from verl.algorithms.filtering import in_group_with_spread
from verl.data.batch import SampleBatch
from verl.errors import RewardError, UserError
from verl.trainer import stages
from verl.trainer.groups import group_numbers
from verl.trainer.run import Run
from verl.trainer.steplog import StepLog

# What a step reads of a sample once it is scored; texts and the prompt's row are not kept for later steps.
KEPT = (
    "uid",
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "finish_reason",
    "policy_version",
    "score",
)


class NoSpreadError(UserError):
    """A step could not be filled with groups that teach something."""


def fill_step(run: Run, log: StepLog) -> SampleBatch:
    """`data.train_batch_size` prompts with their scored samples, all of groups with spread.

    Takes first what the step before left over (`run.surplus`, which then holds what this one leaves over).

    Raises:
        NoSpreadError: algorithm.filter_groups.max_num_gen_batches is reached, or all prompts have been drawn.
        RewardError: the reward function does not return algorithm.filter_groups.metric.
    """
    wanted, n = run.plan.samples_per_step, run.plan.samples_per_prompt
    pool = [run.surplus] if run.surplus is not None else []
    found = sum(map(len, pool))
    draws: list[dict[str, float]] = []
    limit = run.config.algorithm.filter_groups.max_num_gen_batches or -(-len(run.prompts) // run.sampler.batch_size)
    while found < wanted:
        if len(draws) == limit:
            run.surplus = SampleBatch.cat(pool) if pool else None
            raise NoSpreadError(_why_not_full(run, found // n, len(draws)))
        batch = _draw(run, len(draws), log, draws)
        pool.append(batch)
        found += len(batch)
    batch = SampleBatch.cat(pool)
    run.surplus = batch.select(range(wanted, found)) if found > wanted else None
    log.add(_summary(draws, (found - wanted) // n))
    return batch.select(range(wanted))


def _draw(run: Run, number: int, log: StepLog, draws: list[dict[str, float]]) -> SampleBatch:
    """One generation batch, scored, without the groups that have no spread; its numbers go to the end of `draws`."""
    first = run.sampler.drawn
    prompts = run.prompts.batch(run.sampler.next_batch(), step=run.step + 1)
    # The step's number alone would not tell two draws of one prompt in one step apart.
    prompts = prompts.with_columns(uid=[f"{uid}-{number}" for uid in prompts["uid"]])
    with log.time("gen"):
        batch, rewards = stages.generate(run, prompts, stages.training_sampling(run), first_stream=first)
    numbers = StepLog()
    with log.time("reward"):
        batch = stages.collect_rewards(run, batch, rewards, numbers)
    keeps = in_group_with_spread(_metric(run, batch), group_numbers(batch))
    draws.append(
        {**numbers.metrics, "score": float(batch["score"].mean()), "filtered": float((~keeps).double().mean())}
    )
    columns = {name: batch[name] for name in batch.columns if name in KEPT or name.startswith("reward/")}
    return SampleBatch(columns).select(keeps.nonzero().squeeze(1))


def _metric(run: Run, batch: SampleBatch) -> torch.Tensor:
    name = run.config.algorithm.filter_groups.metric
    if name in (None, "score"):
        return batch["score"]
    if f"reward/{name}" not in batch:
        found = [column.removeprefix("reward/") for column in batch.columns if column.startswith("reward/")]
        raise RewardError(
            f"algorithm.filter_groups.metric={name}: the reward function did not return it for every sample. It returned "
            f"{', '.join(['score', *found])}."
        )
    return batch[f"reward/{name}"]


def _summary(draws: list[dict[str, float]], surplus: int) -> dict[str, float]:
    """Means over the step's draws, which are equally large; failures add up."""
    metrics: dict[str, float] = {
        "train/num_gen_batches": len(draws),
        "train/surplus_prompts": surplus,
        "reward/failures": 0,
    }
    for name in dict.fromkeys(name for draw in draws for name in draw):
        column = [draw[name] for draw in draws if name in draw]
        key = {"score": "reward/sampled_score", "filtered": "reward/filtered_groups"}.get(name, name)
        metrics[key] = sum(column) if name == "reward/failures" else sum(column) / len(column)
    return metrics


def _why_not_full(run: Run, found: int, draws: int) -> str:
    settings = run.config.algorithm.filter_groups
    size = run.sampler.batch_size
    tried = draws * size
    if settings.max_num_gen_batches:
        reached = f"algorithm.filter_groups.max_num_gen_batches={settings.max_num_gen_batches} is reached"
        mend = "Raise it (0: until all prompts have been drawn), or data.gen_batch_size"
    else:
        reached = "all training prompts have been drawn"
        mend = "Add prompts"
    return (
        f"step {run.step + 1} cannot be filled: of {tried} prompts in {draws} batches, and those left over before, {found} "
        f"have samples that differ in {settings.metric or 'score'}; data.train_batch_size={run.plan.prompts_per_step} are "
        f"needed and {reached}. The prompts may be too easy or too hard by now. {mend}, raise actor_rollout_ref.rollout.n, "
        "or end the training here."
    )
