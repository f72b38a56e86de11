"""Rewards of samples that finish one by one: submitted together where several have, and put into the queue as they come."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from verl.core.transfer_queue.api import QueueClosed, TransferQueue
from verl.rewards.types import Outcome
from verl.trainer.arrivals import prompts_of, scored
from verl.trainer.reward_stream import reward_inputs, texts_of
from verl.trainer.run import Run


class Scoring:
    """Its length is the number of samples whose reward has not come. A failure of the workers closes the queue."""

    def __init__(self, run: Run, queue: TransferQueue):
        self._run, self._queue = run, queue
        self._waiting: list[tuple[str, int, dict[str, Any]]] = []
        self._missing = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._missing

    def add(self, uid: str, rows: list[tuple[int, dict[str, Any]]]) -> None:
        """Samples (number, generated fields) of a group, to be scored with the next `submit`."""
        self._waiting += [(uid, index, row) for index, row in rows]
        with self._lock:
            self._missing += len(rows)

    def submit(self) -> None:
        """Start scoring what was added."""
        if not self._waiting:
            return
        samples, self._waiting = self._waiting, []
        uids = [uid for uid, _, _ in samples]
        prompts = prompts_of(self._run, uids, torch.tensor([row["prompt"] for *_, row in samples]))
        responses = [row["response_ids"].tolist() for *_, row in samples]
        texts = texts_of(self._run, responses)
        listener = _Listener(self, [(uid, index, text) for (uid, index, _), text in zip(samples, texts, strict=True)])
        self._run.rewards.submit(reward_inputs(prompts, texts, map(len, responses)), listener)

    def put(self, uid: str, index: int, text: str, outcome: Outcome | None) -> None:
        with contextlib.suppress(QueueClosed):
            self._queue.put(uid, index, scored(text, outcome))
        with self._lock:
            self._missing -= 1

    def stop(self, error: BaseException) -> None:
        self._queue.close(error)


class _Listener:
    def __init__(self, scoring: Scoring, samples: list[tuple[str, int, str]]):
        self._scoring, self._samples = scoring, samples

    def scored(self, index: int, outcome: Outcome | None) -> None:
        self._scoring.put(*self._samples[index], outcome)

    def stopped(self, error: BaseException) -> None:
        self._scoring.stop(error)
