"""What a training engine does, whatever shards it and wherever it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from verl.core.checkpoint_engine.gather import Traffic
from verl.core.model_engine.metrics import Metric
from verl.data.batch import Ragged, SampleBatch


@dataclass(frozen=True)
class MicroBatching:
    """Bound of one forward: a number of samples, or (max_samples None) a number of tokens."""

    max_tokens: int
    max_samples: int | None = None

    def on_ranks(self, count: int) -> MicroBatching:
        """Of a forward that `count` ranks share, where max_tokens is what one of them holds."""
        return MicroBatching(self.max_tokens * count, self.max_samples)


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of the N response tokens of a micro-batch: float32 [N] each, with gradients.

    A policy gives log_probs and entropy (entropy has no meaning unless the loss asked for it); a value model gives values.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


class TokenLoss(Protocol):
    """A loss that sums over micro-batches.

    The caller has put a column `loss_weights` into the mini-batch: what each token's loss counts for, already divided by
    global counts. A loss is the sum of weight x token loss, so neither micro-batches nor ranks change it.

    temperature: at which log-probs are taken. with_entropy: whether outputs.entropy is needed.
    """

    temperature: float
    with_entropy: bool

    def __call__(self, outputs: TokenOutputs, micro: SampleBatch) -> tuple[Tensor, dict[str, Metric]]:
        """(scalar loss, metrics)."""


class ModelEngine(Protocol):
    """A model in training, or a frozen one."""

    def log_probs(
        self, batch: SampleBatch, temperature: float, *, with_entropy: bool = False
    ) -> tuple[Ragged, Ragged | None]:
        """Log-probs (and entropy) of the response tokens, float32, on the CPU."""

    def statistics(self, batch: SampleBatch, temperature: float) -> dict[str, Ragged]:
        """log_probs, entropy and sum_pi_squared (sum over the vocabulary of squared probabilities), likewise."""

    def values(self, batch: SampleBatch) -> Ragged:
        """Value of the state before each response token, float32, on the CPU."""

    def train_batch(self, batch: SampleBatch, loss: TokenLoss) -> dict[str, float]:
        """One optimizer update on all of `batch`; returns the loss's metrics, `grad_norm` and `lr`."""

    def export_weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 1 << 30,
        takers: Collection[int] | None = None,
        traffic: Traffic | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face checkpoint, whole tensor) of every parameter; tied weights once.

        Sharded weights are gathered in buckets of bucket_bytes, floating ones as `dtype` where it is given, on the ranks
        `takers` (None: all). traffic: takes note of what that costs.
        """

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this model into `folder`, or begin to: then training may go on, and `saved` says when."""

    def saved(self, wait: bool = False) -> bool:
        """Whether what `save` began is on the disk; with `wait`, when it is. Raises what went wrong in writing it."""

    def load(self, folder: Path) -> None:
        """Take over a checkpoint written by `save`, on any number of ranks."""
