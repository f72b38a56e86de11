"""From samples as a transfer queue holds them to a batch as the stages take it, and how old its samples are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.data.batch import Ragged, SampleBatch
from verl.rewards.manager import RewardManager
from verl.rewards.types import Outcome, RewardInput, RewardResult
from verl.trainer.reward_stream import reward_inputs
from verl.trainer.run import Run

# What a sample has when it can be trained on. prompt: its prompt's place in the training data. text: that was scored.
GENERATED = ("prompt", "response_ids", "rollout_log_probs", "policy_versions", "finish_reason")
SCORED = (*GENERATED, "text", "outcome")


def generated(
    prompt: int, token_ids: list[int], log_probs: list[float], versions: list[int], reason: str
) -> dict[str, Any]:
    """Fields of a sample whose generation is over. versions: of the policy that drew each token."""
    values = (
        prompt,
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(log_probs, dtype=torch.float32),
        torch.tensor(versions, dtype=torch.int32),
        reason,
    )
    return dict(zip(GENERATED, values, strict=True))


def scored(text: str, outcome: Outcome | None) -> dict[str, Any]:
    """Fields of a sample whose reward has come, as data that a checkpoint holds. None: a reward model is yet to score it."""
    if outcome is None:
        return {"text": text, "outcome": None}
    return {"text": text, "outcome": [outcome.score, dict(outcome.metrics), outcome.error, outcome.answer]}


@dataclass(frozen=True)
class Arrived:
    """Rewards that came with the samples; a reward model adds its own when the result is asked for."""

    rewards: RewardManager
    samples: list[RewardInput]
    outcomes: list[Outcome | None]

    def result(self) -> RewardResult:
        return self.rewards.finish(self.samples, self.outcomes)


def prompts_of(run: Run, uids: list[str], rows: torch.Tensor) -> SampleBatch:
    """The prompts' columns for samples of these uids; rows: places in the training data, int64 [B]."""
    first = {uid: i for i, uid in reversed(list(enumerate(uids)))}
    names = list(dict.fromkeys(uids))
    prompts = run.prompts.batch([int(rows[first[uid]]) for uid in names], uids=names)
    places = {uid: i for i, uid in enumerate(names)}
    return prompts.select([places[uid] for uid in uids])


def unpack(run: Run, taken: SampleBatch) -> tuple[SampleBatch, Arrived]:
    """The batch that `stages.generate` would have given for these samples, and their rewards.

    Besides: policy_versions (Ragged: of the policy that drew each token); policy_version is the oldest of them.
    """
    responses, versions = taken["response_ids"], taken["policy_versions"]
    batch = prompts_of(run, taken["uid"], taken["prompt"]).with_columns(
        response_ids=responses,
        response_mask=responses.with_values(torch.ones_like(responses.values, dtype=torch.bool)),
        rollout_log_probs=taken["rollout_log_probs"],
        finish_reason=taken["finish_reason"],
        policy_version=torch.tensor([int(row.min()) for row in versions.rows()], dtype=torch.int64),
        policy_versions=versions,
    )
    outcomes = [None if values is None else Outcome(*values) for values in taken["outcome"]]
    samples = reward_inputs(batch, taken["text"], responses.lengths.tolist())
    return batch, Arrived(run.rewards, samples, outcomes)


def staleness_metrics(versions: Ragged, step: int) -> Mapping[str, float]:
    """How many updates of the policy lie between a token and the training on it.

    versions: of the policy that drew each token; step: the policy's own, which is trained.

    Two samples drawn by versions [3, 3] and [2, 3], trained at step 4: mean 1.25, max 2, half of them by two policies.
    """
    age = step - versions.values
    mixed = [bool((row != row[0]).any()) for row in versions.rows()]
    return {
        "training/staleness_mean": float(age.double().mean()),
        "training/staleness_max": int(age.max()),
        "training/partial_samples": sum(mixed) / len(mixed),
    }
