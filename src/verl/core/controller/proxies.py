"""Engines whose work is done by a group of workers: what pipelines call, as if it were in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from verl.core.controller.dispatch import balanced, in_order, pack, shares, unpack, unpack_completions
from verl.core.controller.fed_stream import FedStream, Group
from verl.core.model_engine.api import TokenLoss
from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutStats
from verl.data.batch import Ragged, SampleBatch


class WorkerGroup(Group, Protocol):
    """Workers by rank, wherever they run."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """The same arguments on every rank; results by rank."""

    def scatter(self, method: str, arguments: Sequence[tuple], ranks: Sequence[int] | None = None) -> list[Any]:
        """Arguments of its own for each of `ranks` (None: all); results in that order."""

    def stream(self, method: str, arguments: Sequence[tuple], ranks: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(position among `ranks`, item) of a generator method, as the items come."""

    def share(self, value: Any) -> Any:
        """Stands for the value as an argument of several workers, to whom it then goes once."""


class GroupModelEngine:
    """A model that is sharded over a group's ranks (`ModelEngine`); each works on its share of a batch.

    name: of the engine in each worker: actor, ref or critic. sequence_ranks: so many neighbours get the same samples, whose
    tokens they divide among themselves.
    """

    def __init__(self, group: WorkerGroup, name: str, sequence_ranks: int = 1, generation_config: Any = None):
        self.group, self.name, self.generation_config = group, name, generation_config
        self.sequence_ranks, self.shares = sequence_ranks, group.size // sequence_ranks

    def log_probs(
        self, batch: SampleBatch, temperature: float, *, with_entropy: bool = False
    ) -> tuple[Ragged, Ragged | None]:
        """Log-probs (and entropy) of the response tokens at `temperature`: float32, on the CPU."""
        out = self._infer("log_probs", batch, temperature, with_entropy)
        return out["log_probs"], out["entropy"] if with_entropy else None

    def statistics(self, batch: SampleBatch, temperature: float) -> dict[str, Ragged]:
        """log_probs, entropy and sum_pi_squared of the response tokens: float32, on the CPU."""
        out = self._infer("statistics", batch, temperature)
        return {name: out[name] for name in ("log_probs", "entropy", "sum_pi_squared")}

    def values(self, batch: SampleBatch) -> Ragged:
        """Value of the state before each response token: float32, on the CPU."""
        return self._infer("values", batch)["values"]

    def train_batch(self, batch: SampleBatch, loss: TokenLoss) -> dict[str, float]:
        """One optimizer update on all of `batch`, as `FSDPEngine.train_batch` makes it; `mfu` is the ranks' mean.

        Raises:
            ValueError: fewer samples than ranks that have samples of their own.
        """
        if len(batch) < self.shares:
            raise ValueError(f"{len(batch)} samples cannot be split over {self.shares} ranks")
        results = self._on_shares("train_batch", batch, shares(batch, self.shares), loss)
        metrics = results[0]
        if "mfu" in metrics:
            metrics["mfu"] = sum(r["mfu"] for r in results) / len(results)
        return metrics

    def save(self, folder: Path) -> None:
        """Write a checkpoint: each rank its own part of it."""
        self.group.call("save", self.name, str(Path(folder).absolute()))

    def saved(self, wait: bool = False) -> bool:
        """Whether all ranks have written what `save` began; with `wait`, when they have."""
        return all(self.group.call("saved", self.name, wait))

    def load(self, folder: Path) -> None:
        """Take over a checkpoint written by any number of ranks."""
        self.group.call("load", self.name, str(Path(folder).absolute()))

    def _infer(self, method: str, batch: SampleBatch, *args: Any) -> SampleBatch:
        batch = SampleBatch({k: batch[k] for k in ("prompt_ids", "response_ids")})
        groups = shares(batch, self.shares)
        parts = self._on_shares(method, batch, groups, *args)
        return in_order([unpack(part) for part in parts[:: self.sequence_ranks]], groups)

    def _on_shares(self, method: str, batch: SampleBatch, groups: Sequence[torch.Tensor], *args: Any) -> list[Any]:
        """`method` of every rank with its samples; results by rank."""
        packed = [self.group.share(pack(batch.select(g))) for g in groups]
        return self.group.scatter(
            method, [(self.name, packed[rank // self.sequence_ranks], *args) for rank in range(self.group.size)]
        )


class GroupRolloutEngine:
    """Generation by several engines at once (`RolloutEngine`), each on its share of the prompts.

    ranks: those that have an engine. shared: whether they train too, so that sleeping gives the trainer memory.
    """

    def __init__(self, group: WorkerGroup, ranks: Sequence[int], dtype: torch.dtype | None, shared: bool):
        self.group, self.ranks, self.dtype, self.shared = group, list(ranks), dtype, shared
        self.version, self.stats = 0, RolloutStats()
        self._fed: FedStream | None = None

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in order."""
        shares = self._shares(requests)
        parts = self.group.scatter("generate", [([requests[i] for i in share],) for share in shares], self.ranks)
        completions: list[list[Completion]] = [[] for _ in requests]
        for share, part in zip(shares, parts):
            drawn = iter(unpack_completions(part))
            for i in share:
                completions[i] = [next(drawn) for _ in range(requests[i].sampling.n)]
        self._count(requests, [c for group in completions for c in group])
        return completions

    def stream(self, requests: list[Request], feed: Feed | None = None) -> Iterator[tuple[int, int, Completion]]:
        """(request index, sample index, completion) as samples finish on any rank. feed: requests that come later."""
        if feed is not None:
            self._fed = FedStream(self.group, self.ranks, requests, feed)
            return self._fed.items()
        return self._stream(requests)

    def abort(self, requests: Iterable[int]) -> None:
        """Stop these requests (by index) of the stream in progress, if it is fed."""
        if self._fed is not None:
            self._fed.abort(requests)

    def _stream(self, requests: list[Request]) -> Iterator[tuple[int, int, Completion]]:
        shares = self._shares(requests)
        busy = [(rank, share) for rank, share in zip(self.ranks, shares) if share]
        arguments = [([requests[i] for i in share],) for _, share in busy]
        finished = []
        for position, items in self.group.stream("stream", arguments, [rank for rank, _ in busy]):
            for request, sample, completion in items:
                finished.append(completion)
                yield busy[position][1][request], sample, completion
        self._count(requests, finished)

    def sleep(self) -> None:
        """Give back the memory that only generation needs, where a trainer could use it."""
        if self.shared:
            self.group.call("sleep")

    def wake(self) -> None:
        """Undo sleep."""
        if self.shared:
            if len(self.ranks) < self.group.size:
                # An engine over several devices takes memory on those of other ranks too.
                self.group.call("give_back_unused")
            self.group.call("wake")

    def _shares(self, requests: list[Request]) -> list[list[int]]:
        """Requests of each rank with an engine, even in number and in prompt tokens."""
        tokens = torch.tensor([len(r.prompt_ids) for r in requests], dtype=torch.int64)
        return [group.tolist() for group in balanced(tokens, len(self.ranks))]

    def _count(self, requests: list[Request], completions: Sequence[Completion]) -> None:
        self.stats = RolloutStats(
            prompt_tokens=sum(len(r.prompt_ids) for r in requests),
            response_tokens=sum(len(c.token_ids) for c in completions),
        )
