"""Scores from a sequence-classification model: one number for a conversation, read in the model's own chat template."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from verl.core.model_engine import attention
from verl.core.model_engine.api import MicroBatching
from verl.core.model_engine.packing import PackedLayout, split_by_count, split_by_tokens
from verl.data.batch import ranges
from verl.rewards.outcome import failure
from verl.rewards.types import Outcome, RewardInput


class Classifier:
    """A Hugging Face model with a head `score` of one output, in packed micro-batches on one device."""

    def __init__(
        self, hf: nn.Module, tokenizer: Any, *, device: torch.device, limit: MicroBatching, max_length: int | None
    ):
        """hf: loaded with packed attention. limit: of one forward. max_length: tokens of the longest conversation."""
        if hf.config._attn_implementation != attention.NAME:
            raise ValueError(f"load the model with attn_implementation='{attention.NAME}'")
        self._hf = hf.eval().requires_grad_(False).to(device)
        self._tokenizer, self._device, self._limit, self._max_length = tokenizer, device, limit, max_length

    def score(self, samples: list[RewardInput]) -> list[Outcome]:
        """The head's output at the end of each conversation; too long a one, or a number that is not finite, has failed."""
        outcomes: list[Outcome | None] = [None] * len(samples)
        rows: dict[int, Tensor] = {}
        for number, sample in enumerate(samples):
            try:
                ids = self._tokens(sample)
            except Exception as error:  # whatever the model's own template raises
                outcomes[number] = failure(f"the reward model's chat template rejects the prompt: {error}", sample)
                continue
            if self._max_length is not None and len(ids) > self._max_length:
                outcomes[number] = failure(
                    f"{len(ids)} tokens of the reward model are more than its limit, {self._max_length} "
                    "(reward_model.max_length)",
                    sample,
                )
                continue
            rows[number] = torch.tensor(ids, dtype=torch.int64)
        for number, score in zip(rows, self._scores(list(rows.values())), strict=True):
            sample = samples[number]
            finite = math.isfinite(score)
            outcomes[number] = Outcome(score, {}) if finite else failure(f"the reward model gave {score}", sample)
        return outcomes

    def close(self) -> None:
        """Free the weights."""
        self._hf = None

    def _tokens(self, sample: RewardInput) -> list[int]:
        """Of the whole conversation, the response as the assistant's turn."""
        conversation = [*sample.messages, {"role": "assistant", "content": sample.solution_str}]
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def _scores(self, rows: list[Tensor]) -> list[float]:
        if not rows:
            return []
        lengths = torch.tensor([len(row) for row in rows])
        if self._limit.max_samples is not None:
            groups = split_by_count(len(rows), self._limit.max_samples)
        else:
            groups = split_by_tokens(lengths, self._limit.max_tokens)
        scores = torch.empty(len(rows))
        for group in groups:
            scores[group] = self._forward([rows[i] for i in group.tolist()]).cpu()
        return scores.tolist()

    def _forward(self, rows: list[Tensor]) -> Tensor:
        """Scores of the rows, laid end to end: float32 [B]."""
        lengths = torch.tensor([len(row) for row in rows])
        ends = lengths.cumsum(0) - lengths + torch.stack([self._last(row) for row in rows])
        hidden = self._hf.base_model(
            input_ids=torch.cat(rows).to(self._device)[None],
            position_ids=ranges(torch.zeros_like(lengths), lengths).to(self._device)[None],
            use_cache=False,
            packing=PackedLayout.make(lengths, self._device),
        ).last_hidden_state.squeeze(0)
        return self._hf.score(hidden[ends.to(self._device)]).float().squeeze(-1)

    def _last(self, row: Tensor) -> Tensor:
        """Where the score is read: the last token that is not padding, as in the training of such models.

        Many take the end token for padding, and so learned to be read at the token before it.
        """
        pad = self._hf.config.pad_token_id
        kept = (row != pad).nonzero() if pad is not None else row.new_empty(0)
        return kept.max() if kept.numel() else torch.tensor(len(row) - 1)
