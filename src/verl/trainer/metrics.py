"""What is logged of a batch: rewards, lengths, throughput, memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import torch
from torch import Tensor

from verl.algorithms.value_loss import explained_variance
from verl.core.transfer_queue.api import TransferQueue
from verl.data.batch import SampleBatch
from verl.trainer.busy import Busy
from verl.trainer.steplog import PEAK, StepLog


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def batch_metrics(batch: SampleBatch, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """Scores, advantages and lengths of a step's samples.

    Lengths count the tokens that the policy chose. clip_ratio is the share of samples at the configured limit, not at the
    longest of this batch.
    """
    mask = batch["response_mask"]
    chosen = mask.values
    own = mask.with_values(chosen.long()).sums()
    prompt_lengths = batch["prompt_ids"].lengths
    values = {
        **_spread("critic/score", batch["score"]),
        **_spread("critic/rewards", batch["token_rewards"].sums()),
        **_spread("critic/advantages", batch["advantages"].values[chosen]),
        **_spread("critic/returns", batch["returns"].values[chosen]),
        **_spread("response_length", own),
        "response_length/clip_ratio": sum(r == "length" for r in batch["finish_reason"]) / len(batch),
        **_spread("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": float((prompt_lengths >= max_prompt_length).double().mean()),
        "response/aborted_ratio": sum(r == "abort" for r in batch["finish_reason"]) / len(batch),
    }
    if "values" in batch:
        predicted = batch["values"].values
        values |= _spread("critic/values", predicted[chosen])
        values["critic/vf_explained_var"] = explained_variance(predicted, batch["returns"].values, chosen)
    return values | group_metrics(batch)


def group_metrics(batch: SampleBatch) -> dict[str, float]:
    """Share of prompts whose samples all got the same score: they teach a group-relative estimator nothing."""
    scores: dict[str, set[float]] = {}
    for uid, score in zip(batch["uid"], batch["score"].tolist()):
        scores.setdefault(uid, set()).add(score)
    return {"reward/groups_without_spread": sum(len(s) == 1 for s in scores.values()) / len(scores)}


def performance_metrics(batch: SampleBatch, log: StepLog, devices: int) -> dict[str, float]:
    """Throughput counts real tokens, prompt and response, never padding."""
    tokens = int(batch.token_counts.sum())
    responses = int(batch["response_ids"].lengths.sum())
    seconds, generating = log.seconds("step"), log.seconds("gen")
    out = {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / devices,
        "perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
    }
    if generating > 0:  # not in a step whose samples were all there before it
        out["perf/gen_throughput"] = responses / generating / devices
        out["timing_per_token_ms/gen"] = 1000 * generating / max(responses, 1)
    if torch.cuda.is_initialized():
        peaks = [v for k, v in log.metrics.items() if k.startswith(PEAK)]
        out["perf/max_memory_allocated_gb"] = max(peaks, default=0.0)
        out["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return out


def idle_shares(step: float, generating: float, training: float) -> dict[str, float]:
    """Of the seconds of a step, the shares in which nothing was generated, and in which the trainer waited for samples."""
    step = max(step, 1e-9)
    return {
        "perf/idle_share_generator": max(0.0, 1 - generating / step),
        "perf/idle_share_trainer": max(0.0, 1 - training / step),
    }


@contextlib.contextmanager
def idle_metrics(log: StepLog, generation: Busy) -> Iterator[None]:
    """Around a step beside which generation goes on: what of it was generation (timing/gen), and the idle shares.

    The trainer waits within `log.time("wait")`, for samples, and `log.time("pause")`, for generation to stop.
    """
    began, before = time.perf_counter(), generation.seconds
    yield
    seconds, generating = time.perf_counter() - began, generation.seconds - before
    waited = log.seconds("wait") + log.seconds("pause")
    log.add({"timing/gen": generating, **idle_shares(seconds, generating, seconds - waited)})


def queue_metrics(queue: TransferQueue) -> dict[str, float]:
    """What the queue holds after a step."""
    stats = queue.stats()
    return {
        "queue/groups_held": stats["groups_held"],
        "queue/groups_complete": stats["groups_complete"],
        "queue/tokens_held": stats["tokens_held"],
    }
