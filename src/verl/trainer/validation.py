"""Validation: generate on the held-out prompts, score, report by data source."""

from __future__ import annotations

from collections import defaultdict

from verl.core.rollout_engine.api import SamplingParams
from verl.data.batch import SampleBatch
from verl.rewards.at_k import summary
from verl.trainer import stages
from verl.trainer.interrupt import Interrupt
from verl.trainer.run import Run
from verl.trainer.steplog import StepLog

SEED_OFFSET = 1_000_003
"""Validation draws from other random streams than training."""


def sampling(run: Run) -> SamplingParams:
    """How validation samples are drawn: greedy unless val_kwargs.do_sample."""
    val = run.config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        max_tokens=run.config.data.max_response_length,
        n=val.n,
        temperature=val.temperature if val.do_sample else 0.0,
        top_k=val.top_k if val.do_sample else -1,
        top_p=val.top_p if val.do_sample else 1.0,
        stop_token_ids=stages.stop_token_ids(run),
        seed=run.config.actor_rollout_ref.rollout.seed + SEED_OFFSET,
    )


def validate(run: Run) -> dict[str, float]:
    """Generate and score all validation prompts with the weights that the rollout engine holds.

    Returns:
        val/test_score/<data_source>: mean score. val-core/<data_source>/reward/mean@n: the same, by the name of newer
        scripts; acc in place of reward: where the reward reports it. With several samples a prompt, best@k/mean,
        worst@k/mean and maj@k/mean of both: of k = n under val-core, of smaller k and the worst under val-aux.
        val-aux/<data_source>/<metric>/mean@n: other numbers of the reward. val/response_length/mean.
    """
    if run.val_prompts is None:
        return {}
    how, size = sampling(run), run.config.data.val_batch_size or len(run.val_prompts)
    parts, handles = [], []
    for start in range(0, len(run.val_prompts), size):
        prompts = run.val_prompts.batch(range(start, min(start + size, len(run.val_prompts))), step=run.step)
        part, rewards = stages.generate(run, prompts, how, first_stream=start)
        parts.append(part)
        handles.append(rewards)
    batch = SampleBatch.cat(parts)
    results = [h.result() for h in handles]
    for result in results:
        stages.say_failures(run, result)
    scores = [s for r in results for s in r.scores]
    answers = [a for r in results for a in r.answers or [None] * len(r.scores)]
    sources, metrics = batch["data_source"], {}
    for source, mean in _means(sources, scores).items():
        metrics |= {f"val/test_score/{source}": mean, f"val-core/{source}/reward/mean@{how.n}": mean}
    metrics |= _at_k(sources, "reward", scores, answers, how.n)
    for name in sorted({n for r in results for n in r.metrics}):
        column = [v for r in results for v in r.metrics.get(name, [None] * len(r.scores))]
        kind = "val-core" if name == "acc" else "val-aux"
        metrics |= {f"{kind}/{source}/{name}/mean@{how.n}": mean for source, mean in _means(sources, column).items()}
        if name == "acc":
            metrics |= _at_k(sources, name, column, answers, how.n)
    metrics["val/response_length/mean"] = float(batch["response_ids"].lengths.double().mean())
    metrics["val/reward_failures"] = sum(r.failures for r in results)
    _log_samples(run, batch, scores)
    return metrics


def validate_first(run: Run, interrupt: Interrupt) -> bool:
    """The validation before the first step, where one is asked for or the run goes on where one was left.

    Returns:
        False if a signal has ended it.
    """
    trainer = run.config.trainer
    if not (trainer.val_only or run.owes_validation or (trainer.val_before_train and run.step == 0)):
        return True
    metrics = interrupt.attempt(lambda: validate(run))
    if metrics:
        run.tracker.log(metrics, step=run.step)
    run.owes_validation = metrics is None
    return metrics is not None


def validate_step(run: Run, interrupt: Interrupt, log: StepLog) -> bool:
    """The validation of a step that is done; False if a signal has ended it, which the step's checkpoint then tells."""
    if run.val_prompts is None:
        return True
    with log.time("testing"):
        metrics = interrupt.attempt(lambda: validate(run))
    log.add(metrics or {})
    run.owes_validation = metrics is None
    return metrics is not None


def _means(sources: list[str], values: list[float | None]) -> dict[str, float]:
    """Mean of the values of each data source, over those that are there."""
    columns: dict[str, list[float]] = defaultdict(list)
    for source, value in zip(sources, values):
        if value is not None:
            columns[source].append(value)
    return {source: sum(column) / len(column) for source, column in columns.items()}


def _at_k(
    sources: list[str], name: str, values: list[float | None], answers: list[str | None], n: int
) -> dict[str, float]:
    """Best, worst and majority of k of the n samples of a prompt, which lie side by side, by data source."""
    if n == 1:
        return {}
    by_source: dict[str, list[int]] = defaultdict(list)
    for start in range(0, len(values), n):
        if None not in values[start : start + n]:
            by_source[sources[start]].append(start)
    metrics = {}
    for source, starts in by_source.items():
        groups = [[v for v in values[start : start + n] if v is not None] for start in starts]
        votes = [answers[start : start + n] for start in starts]
        voted = votes if any(answer is not None for group in votes for answer in group) else None
        for kind, value in summary(groups, voted).items():
            core = kind in (f"best@{n}/mean", f"maj@{n}/mean")
            metrics[f"val-{'core' if core else 'aux'}/{source}/{name}/{kind}"] = value
    return metrics


def _log_samples(run: Run, batch: SampleBatch, scores: list[float]) -> None:
    """Hand a spread of samples to the tracker: evenly spaced over the validation set, the same ones each time."""
    wanted = max(8, run.config.trainer.log_val_generations)
    chosen = list(range(0, len(batch), max(1, len(batch) // wanted)))[:wanted]
    some = batch.select(chosen)
    decode = run.tokenizer.batch_decode
    prompts = decode([p.tolist() for p in some["prompt_ids"].rows()], skip_special_tokens=True)
    responses = decode([r.tolist() for r in some["response_ids"].rows()], skip_special_tokens=True)
    rows = zip(prompts, responses, (scores[i] for i in chosen), some["ground_truth"])
    run.tracker.log_generations(
        [{"prompt": p, "response": r, "score": s, "ground_truth": str(g)} for p, r, s, g in rows], run.step
    )
