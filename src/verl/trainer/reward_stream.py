"""Rewards of samples that are scored as they finish, while the others of their batch are still in generation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from verl.core.rollout_engine.api import Completion
from verl.data.batch import SampleBatch
from verl.rewards.types import RewardInput, RewardResult

if TYPE_CHECKING:
    from verl.trainer.run import Run

SUBMIT_SECONDS = 0.05
"""What finishes within this time goes to the reward function together."""


def texts_of(run: Run, responses: list[list[int]]) -> list[str]:
    """What a reward function reads of these token ids."""
    return run.tokenizer.batch_decode(responses, skip_special_tokens=True)


def reward_inputs(prompts: SampleBatch, texts: list[str], lengths: Iterable[int]) -> list[RewardInput]:
    """What is scored of each sample: the response's text, and what the prompt's row says of it.

    prompts: [B] rows, one for each of the B responses. lengths: of these, in tokens.
    """
    names = ("data_source", "ground_truth", "extra_info", "raw_prompt")
    source, truth, extra, messages = (prompts[name] for name in names)
    return [RewardInput(*row) for row in zip(source, texts, truth, extra, lengths, messages, strict=True)]


class RewardStream:
    """Rewards of `n` samples of each prompt: `result` is as if all had been submitted at once, in the batch's order."""

    def __init__(self, run: Run, prompts: SampleBatch, n: int):
        self._run, self._prompts, self._n = run, prompts, n
        self._handle = run.rewards.expect(len(prompts) * n)
        self._finished: dict[int, list[int]] = {}  # since the last submission; by place in the batch
        self._submitted = time.monotonic()

    def through(self, stream: Iterable[tuple[int, int, Completion]]) -> Iterator[tuple[int, int, Completion]]:
        """The items of an engine's stream; each sample is scored once it has gone through."""
        for request, sample, completion in stream:
            yield request, sample, completion
            self._finished[request * self._n + sample] = completion.token_ids
            if time.monotonic() - self._submitted >= SUBMIT_SECONDS:
                self._submit()
        self._submit()

    def _submit(self) -> None:
        finished, self._finished = self._finished, {}
        if finished:
            prompts = self._prompts.select([place // self._n for place in finished])
            texts = texts_of(self._run, list(finished.values()))
            self._handle.add(list(finished), reward_inputs(prompts, texts, map(len, finished.values())))
        self._submitted = time.monotonic()

    def result(self) -> RewardResult:
        """Waits for what is still under way; see `RewardHandle.result`."""
        return self._handle.result()
