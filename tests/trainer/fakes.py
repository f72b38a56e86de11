"""Stand-ins for the engines of a run, which do what they are told and write down what was asked of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl.config.compose import compose
from verl.core.rollout_engine.api import Completion
from verl.data.batch import Ragged, SampleBatch
from verl.rewards.types import RewardResult

EOS = 1000
STEP = 3
"""Steps that a stand-in run has done, and the policy version of its samples."""


class FakeTokenizer:
    """Token 7 reads as "7"; the end token reads as nothing."""

    eos_token_id = EOS

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(str(i) for i in row if i != EOS or not skip_special_tokens) for row in rows]


@dataclass
class FakeRollout:
    """Answers the k-th sample of a request with stream s by the tokens [s + 10 k, EOS] (greedy: [99, EOS])."""

    version: int = 0
    requests: list = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def stream(self, requests):
        """The last sample first."""
        self.requests += requests
        samples = [(i, k) for i, r in enumerate(requests) for k in range(r.sampling.n)]
        for i, k in reversed(samples):
            request = requests[i]
            yield i, k, self._completion(request.stream + 10 * k if request.sampling.temperature else 99)

    def _completion(self, first: int) -> Completion:
        return Completion([first, EOS], [-0.5, -0.25], "stop" if first % 2 else "length", self.version)

    def sleep(self):
        self.calls.append("sleep")


class FakeTracker:
    """Keeps what the user is told."""

    def __init__(self):
        self.notices: list[str] = []
        self.restored: list = []

    def notice(self, text):
        self.notices.append(text)

    def restore(self, metrics, step):
        self.restored.append((metrics, step))


class FakeRewards:
    """Scores a text by `scores[text]`, with the metrics and answers given."""

    def __init__(self, scores: dict[str, float], metrics: dict | None = None, failed: tuple = (), answers: list = ()):
        self.scores, self.metrics, self.failed, self.answers = scores, metrics or {}, list(failed), list(answers)
        self.seen: list = []

    def expect(self, count):
        return FakeHandle(self, [None] * count)

    def score(self, samples):
        self.seen += samples
        scores = [self.scores[s.solution_str] for s in samples]
        return RewardResult(scores, self.metrics, self.failed, ["oh no"], self.answers)


@dataclass
class FakeHandle:
    rewards: FakeRewards
    samples: list

    def add(self, indices, samples):
        for index, sample in zip(indices, samples, strict=True):
            self.samples[index] = sample

    def result(self):
        return self.rewards.score(self.samples)


class FakeEngine:
    """A model engine with fixed log-probs and values; remembers the batches that it was given."""

    def __init__(self, log_prob: float = -1.0, value: float = 0.5):
        self.log_prob, self.value = log_prob, value
        self.asked: list[str] = []
        self.trained: list[tuple[SampleBatch, Any]] = []

    def log_probs(self, batch, temperature, *, with_entropy=False):
        self.asked.append(f"log_probs at {temperature}")
        like = batch["response_ids"]
        filled = like.with_values(torch.full(like.values.shape, self.log_prob))
        return filled, like.with_values(torch.full(like.values.shape, 2.0)) if with_entropy else None

    def statistics(self, batch, temperature):
        self.asked.append(f"statistics at {temperature}")
        like = batch["response_ids"]
        values = {"log_probs": self.log_prob, "entropy": 2.0, "sum_pi_squared": 0.25}
        return {name: like.with_values(torch.full(like.values.shape, value)) for name, value in values.items()}

    def values(self, batch):
        self.asked.append("values")
        like = batch["response_ids"]
        return like.with_values(torch.full(like.values.shape, self.value))

    def train_batch(self, batch, loss):
        self.trained.append((batch, loss))
        number = len(self.trained)
        return {"pg_loss": float(number), "entropy_loss": 1.5, "grad_norm": 2.0 * number, "lr": 0.1 * number}

    def save(self, folder: Path):
        folder.mkdir()
        (folder / "weights").write_text(str(self.value))

    def saved(self, wait=False):
        return True

    def load(self, folder: Path):
        self.value = float((folder / "weights").read_text())


def config(*overrides: str):
    return compose(list(overrides), notify=lambda text: None)


def batch_of(mask: list[list[int]], uids: str = "", **columns) -> SampleBatch:
    """Samples with these response masks. columns: a list of rows (lists or tensors), or a list of numbers, each."""
    rows = Ragged.from_rows(mask, torch.bool)
    full = {
        "uid": list(uids) or [str(i) for i in range(len(mask))],
        "prompt_ids": Ragged.from_rows([[5, 6]] * len(mask)),
        "response_ids": Ragged.from_rows([list(range(1, 1 + len(m))) for m in mask]),
        "response_mask": rows,
        "policy_version": torch.full((len(mask),), STEP),
    }
    for name, values in columns.items():
        nested = isinstance(values[0], (list, torch.Tensor))
        full[name] = Ragged.from_rows(values, torch.float32) if nested else torch.tensor(values)
    return SampleBatch(full)
