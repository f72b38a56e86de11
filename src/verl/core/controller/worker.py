"""`Worker`: the engines of one rank. It knows nothing of who calls it: Ray, or anything else that starts processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config.batch_plan import BatchPlan
from verl.config.schema import PPOConfig
from verl.core.checkpoint_engine import sync
from verl.core.checkpoint_engine.broadcast import ALIGNMENT, WeightChannel
from verl.core.checkpoint_engine.sync import SyncReport
from verl.core.controller.desk import Desk, FeedSettings
from verl.core.controller.dispatch import Packed, pack, pack_completions, unpack
from verl.core.controller.roles import build_rollout, build_trainers, same_numerics, weight_options
from verl.core.model_engine.api import TokenLoss
from verl.core.model_engine.loading import load_tokenizer
from verl.core.model_engine.parallel import join_process_group, join_store, open_store
from verl.core.rollout_engine.api import Completion, Request, RolloutEngine
from verl.data.batch import SampleBatch

# Finished samples that travel together in a stream.
STREAMED_TOGETHER = 16


@dataclass(frozen=True)
class Seat:
    """A worker's place in its group.

    own_address: of its machine, where the others reach it. visible_gpus: those that it may use, its own first; none: CPU.
    """

    rank: int
    world_size: int
    own_address: str
    visible_gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """What a worker is to build.

    engines: which models it holds, of actor, ref and critic. generates: whether there is a rollout engine.
    """

    config: PPOConfig
    plan: BatchPlan
    model_path: str
    engines: tuple[str, ...]
    generates: bool


@dataclass(frozen=True)
class Facts:
    """What the controller has to know of a worker's engines. rollout_dtype: None where it does not generate."""

    generates: bool
    rollout_dtype: torch.dtype | None
    same_numerics: bool
    generation_config: Any
    notice: str | None


class Worker:
    """One rank. Methods that name an engine (actor, ref or critic) are called on all ranks together."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.rollout: RolloutEngine | None = None
        self._store: dist.TCPStore | None = None
        self._channel: WeightChannel | None = None
        self._desk = Desk()

    # ---- start -----------------------------------------------------------------------------------------------------

    def open_store(self, address: str, timeout_seconds: int) -> int:
        """Open the store at which the group meets, on this machine; returns its port."""
        self._store = open_store(address, timeout_seconds)
        return self._store.port

    def join(self, seat: Seat, address: str, port: int, timeout_seconds: int) -> None:
        """Take the seat: choose devices and become a rank of the process group whose store is at address:port."""
        self.seat = seat
        if seat.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.visible_gpus)
        self.device = torch.device("cuda", 0) if seat.visible_gpus else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # else a device mesh would take the one with the rank's number
        if self._store is None:
            self._store = join_store(address, port, timeout_seconds)
        join_process_group(self.device, self._store, seat.rank, seat.world_size, timeout_seconds, seat.own_address)

    def build(self, job: Job) -> Facts:
        """Load the models and make the engines."""
        config, model = job.config, job.config.actor_rollout_ref.model
        torch.manual_seed(config.trainer.seed)
        self.bucket_bytes, self.verify = weight_options(config)
        tokenizer = load_tokenizer(model.tokenizer_path or job.model_path, trust_remote_code=model.trust_remote_code)
        self.engines = build_trainers(config, job.plan, self.device, job.model_path, tokenizer, job.engines)
        notice = None
        # With tensor parallelism the first of each group of ranks drives an engine that spans the devices of all. Where
        # others generate, the first rank sends them the weights.
        span = config.actor_rollout_ref.rollout.tensor_model_parallel_size if job.generates else self.seat.world_size
        self.weight_takers = range(0, self.seat.world_size, span)
        if job.generates and self.seat.rank in self.weight_takers:
            self.rollout, notice = build_rollout(config, self.device, job.model_path, tokenizer, None)
        actor = self.engines.get("actor")
        return Facts(
            generates=self.rollout is not None,
            rollout_dtype=getattr(self.rollout, "dtype", None),
            same_numerics=self.rollout is not None and same_numerics(config, self.rollout, self.device),
            generation_config=actor.generation_config if actor is not None else None,
            notice=notice,
        )

    # ---- training --------------------------------------------------------------------------------------------------

    def log_probs(self, engine: str, packed: Packed, temperature: float, with_entropy: bool) -> Packed:
        """Columns log_probs and, if asked for, entropy of this rank's samples."""
        batch = unpack(packed)
        log_probs, entropy = self.engines[engine].log_probs(batch, temperature, with_entropy=with_entropy)
        columns = {"log_probs": log_probs} | ({} if entropy is None else {"entropy": entropy})
        return pack(SampleBatch(columns))

    def statistics(self, engine: str, packed: Packed, temperature: float) -> Packed:
        """Columns log_probs, entropy and sum_pi_squared of this rank's samples."""
        return pack(SampleBatch(self.engines[engine].statistics(unpack(packed), temperature)))

    def values(self, engine: str, packed: Packed) -> Packed:
        """Column values of this rank's samples."""
        return pack(SampleBatch({"values": self.engines[engine].values(unpack(packed))}))

    def train_batch(self, engine: str, packed: Packed, loss: TokenLoss) -> dict[str, float]:
        """This rank's part of one optimizer update; the numbers are those of all ranks, but for mfu."""
        return self.engines[engine].train_batch(unpack(packed), loss)

    def save(self, engine: str, folder: str) -> None:
        self.engines[engine].save(Path(folder))

    def saved(self, engine: str, wait: bool) -> bool:
        return self.engines[engine].saved(wait)

    def load(self, engine: str, folder: str) -> None:
        self.engines[engine].load(Path(folder))

    # ---- generation ------------------------------------------------------------------------------------------------

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        """Completions of these requests, those of a request side by side."""
        groups = self._generator().generate(requests) if requests else []
        return pack_completions([c for group in groups for c in group])

    def stream(self, requests: list[Request]) -> Iterator[list[tuple[int, int, Completion]]]:
        """(request index, sample index, completion) as samples finish, some at a time."""
        finished = []
        for item in self._generator().stream(requests):
            finished.append(item)
            if len(finished) == STREAMED_TOGETHER:
                yield finished
                finished = []
        if finished:
            yield finished

    def generate_fed(self, settings: FeedSettings) -> None:
        """Generate what `exchange` brings, until it says that no more will come."""
        self._desk.run(self._generator(), settings)

    def exchange(
        self, requests: list[Request], aborted: list[int], ended: bool, seconds: float
    ) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        """See `Desk`; runs beside `generate_fed`. Returns (request, sample) of each that has finished, and the completions."""
        finished = self._desk.exchange(requests, aborted, ended, seconds)
        return [(r, i) for r, i, _ in finished], pack_completions([c for *_, c in finished])

    def sleep(self) -> None:
        if self.rollout is not None:
            self.rollout.sleep()

    def give_back_unused(self) -> None:
        """GPU memory that this process holds for later, to whatever generates on the same devices."""
        torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.rollout is not None:
            self.rollout.wake()

    def _generator(self) -> RolloutEngine:
        if self.rollout is None:
            raise RuntimeError(f"rank {self.seat.rank} has no rollout engine")
        return self.rollout

    # ---- weights ---------------------------------------------------------------------------------------------------

    def open_channel(self, rank: int, size: int, address: str, port: int, timeout_seconds: int) -> None:
        """Become an end of the way of the weights to other devices; rank 0 sends."""
        store = self._store if rank == 0 and self._store is not None else join_store(address, port, timeout_seconds)
        whole = sum(p.numel() * p.element_size() + ALIGNMENT for p in self._parameters())
        size_of_bucket = min(self.bucket_bytes, whole) if rank == 0 else self.bucket_bytes
        self._channel = WeightChannel(store, rank, size, self.device, size_of_bucket, timeout_seconds)

    def _parameters(self) -> Iterable[torch.Tensor]:
        return self.engines["actor"].model.parameters() if "actor" in self.engines else ()

    def update_shared(self, version: int, dtype: torch.dtype | None) -> SyncReport:
        """Weights, as `dtype`, into the rollout engine of this very process; a rank without one sends its shards."""
        actor = self.engines["actor"]
        options = self._weight_options(dtype)
        if self.rollout is None:
            return sync.send(actor, None, **options)
        return sync.update_shared(actor, self.rollout, version, **options)

    def send_weights(self, dtype: torch.dtype | None) -> SyncReport:
        """Weights to the rollout workers, at their end of the channel."""
        return sync.send(self.engines["actor"], self._channel, **self._weight_options(dtype))

    def _weight_options(self, dtype: torch.dtype | None) -> dict[str, Any]:
        options = {"dtype": dtype, "bucket_bytes": self.bucket_bytes, "verify": self.verify}
        return options | {"takers": self.weight_takers}

    def export_parts(self, dtype: torch.dtype | None, part_bytes: int) -> Iterator[bytes | SyncReport]:
        """Weights for rollout servers, from the first rank, and then each rank's report."""
        options = {"dtype": dtype, "bucket_bytes": self.bucket_bytes, "part_bytes": part_bytes}
        yield from sync.export_parts(self.engines["actor"], **options)

    def receive_weights(self, version: int) -> SyncReport:
        """Weights from the trainer."""
        if self._channel is None:
            raise RuntimeError("receive_weights before open_channel")
        return sync.receive(self._generator(), self._channel, version, verify=self.verify)

    def close(self) -> None:
        """Stop what the rollout engine has started."""
        if self.rollout is not None:
            self.rollout.close()
