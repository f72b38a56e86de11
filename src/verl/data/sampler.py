"""Which prompts come next: a seeded order with a position that checkpoints save."""

from __future__ import annotations

from typing import Any

from numpy.random import RandomState

from verl.errors import DataError


class PromptSampler:
    """Batches of `batch_size` indices out of `size` prompts, epoch after epoch without end.

    With `shuffle` each epoch has an order of its own, a function of (seed, epoch) alone. What is left of an epoch after
    its last whole batch is not drawn. fingerprint: of the dataset, to notice on resume that it changed.
    """

    def __init__(self, size: int, batch_size: int, *, shuffle: bool = True, seed: int = 1, fingerprint: str = ""):
        if size < batch_size:
            raise DataError(
                f"The training data has {size} prompts, fewer than the {batch_size} of one batch (data.train_batch_size, or "
                f"data.gen_batch_size). Write {size} or less, or add prompts."
            )
        self.size, self.batch_size = size, batch_size
        self._wanted_order = (shuffle, seed)
        self._fingerprint = fingerprint
        self._begin(epoch=0)

    @property
    def batches_per_epoch(self) -> int:
        return self.size // self.batch_size

    @property
    def drawn(self) -> int:
        """Prompts drawn so far, over all epochs."""
        return self.epoch * self.batches_per_epoch * self.batch_size + self.position

    def next_batch(self) -> list[int]:
        """Indices of the next batch."""
        if self.position + self.batch_size > self.size:
            self._begin(self.epoch + 1)
        start = self.position
        self.position += self.batch_size
        return self._order[start : self.position]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, enough to go on with the next batch."""
        shuffle, seed = self._order_of_epoch
        return {
            "epoch": self.epoch,
            "position": self.position,
            "shuffle": shuffle,
            "seed": seed,
            "size": self.size,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Go on where `state` was saved. Returns notices: what differs from the run that saved it.

        A different batch size goes on at the same prompt. A different seed counts from the next epoch. Different data
        starts an epoch of its own, because positions in the old order mean nothing in it.
        """
        if (state["size"], state["fingerprint"]) != (self.size, self._fingerprint):
            self._begin(state["epoch"] + 1)
            what = (
                f"{state['size']} prompts then, {self.size} now"
                if state["size"] != self.size
                else "same number of prompts"
            )
            return [
                f"The training data differs from that of the checkpoint ({what}): its order starts anew. "
                "Give data.train_files as they were to draw the same prompts as the unbroken run."
            ]
        self._begin(state["epoch"], (state["shuffle"], state["seed"]))
        self.position = state["position"]
        if self._order_of_epoch != self._wanted_order:
            return ["data.shuffle or data.seed differs from the checkpoint's; it counts from the next epoch on."]
        return []

    def _begin(self, epoch: int, order: tuple[bool, int] | None = None) -> None:
        self.epoch, self.position = epoch, 0
        self._order_of_epoch = order or self._wanted_order
        shuffle, seed = self._order_of_epoch
        # RandomState's streams are frozen, so an order stays the same across versions of numpy.
        self._order = (
            RandomState([seed % 2**32, epoch]).permutation(self.size).tolist() if shuffle else list(range(self.size))
        )
