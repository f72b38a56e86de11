"""What is in generation, one row a slot, on the device; and what finished slots drew, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SlotState:
    """One row a slot, on the device.

    token, position: the last token of the sequence so far, whose keys are not computed yet, and its position. start:
    position of the prompt's last token. limit: position whose step draws the last token allowed. done: bool. key: random
    stream. out_tokens, out_log_probs: [slots, capacity + 1]; what is drawn from position p goes to column p - start, and
    the last column takes what finished slots draw.
    """

    token: Tensor
    position: Tensor
    start: Tensor
    limit: Tensor
    key: Tensor
    done: Tensor
    out_tokens: Tensor
    out_log_probs: Tensor

    @classmethod
    def allocate(cls, slots: int, capacity: int, device: torch.device) -> SlotState:
        numbers = [torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(5)]
        return cls(
            *numbers,
            done=torch.ones(slots, dtype=torch.bool, device=device),
            out_tokens=torch.zeros(slots, capacity + 1, dtype=torch.int64, device=device),
            out_log_probs=torch.zeros(slots, capacity + 1, dtype=torch.float32, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.out_tokens.shape[1] - 1

    def move(self, source: Tensor, target: Tensor) -> None:
        for column in vars(self).values():
            column[target] = column[source]

    def record(self, tokens: Tensor, log_probs: Tensor, stop: Tensor) -> None:
        """Take what the step drew for slots 0..n-1. tokens: int64 [n]; log_probs: float32 [n]; stop: int64 [any]."""
        n = len(tokens)
        position, done = self.position[:n], self.done[:n]
        column = (position - self.start[:n]).masked_fill_(done, self.capacity)[:, None]
        self.out_tokens[:n].scatter_(1, column, tokens[:, None])
        self.out_log_probs[:n].scatter_(1, column, log_probs[:, None])
        ended = position >= self.limit[:n]
        if len(stop):
            ended |= torch.isin(tokens, stop)
        self.token[:n] = torch.where(done, self.token[:n], tokens)
        position += (~done).long()
        done |= ended


class Drawn:
    """What finished slots drew, on its way to the host."""

    def __init__(self, tokens: Tensor, log_probs: Tensor, counts: list[int]):
        self._counts = counts
        self._ready = None
        if tokens.is_cuda:
            self._tokens = tokens.to("cpu", non_blocking=True)
            self._log_probs = log_probs.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._tokens, self._log_probs = tokens, log_probs

    def rows(self) -> list[tuple[list[int], list[float]]]:
        if self._ready is not None:
            self._ready.synchronize()
        tokens, log_probs = self._tokens.numpy(), self._log_probs.numpy()
        return [(tokens[i, :c].tolist(), log_probs[i, :c].tolist()) for i, c in enumerate(self._counts)]
