"""The training engine: a Hugging Face model under FSDP2, padding-free, in micro-batches that leave the loss unchanged."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.config.schema import CheckpointConfig, FSDPConfig, OptimConfig
from verl.core.checkpoint_engine.background import BackgroundWriter, on_host
from verl.core.checkpoint_engine.disk import (
    check_contents,
    damage_named,
    keep_whole,
    load_file,
    load_sharded,
    save_hf_side,
    save_sharded,
    save_whole,
)
from verl.core.checkpoint_engine.gather import Traffic, gather_weights
from verl.core.model_engine.api import MicroBatching, TokenLoss, TokenOutputs
from verl.core.model_engine.lora import (
    adapter_settings,
    freeze_base,
    is_adapter,
    merged,
    plain_name,
    save_adapter,
    scale_of,
)
from verl.core.model_engine.memory import (
    holds_whole_model,
    keep_freed_memory,
    needs_checkpointing,
    peak_flops,
    train_flops,
)
from verl.core.model_engine.metrics import Metric, merge_into, reduce
from verl.core.model_engine.models import PolicyModel, ValueModel
from verl.core.model_engine.offload import make_state_offload, resident_weights
from verl.core.model_engine.optim import clip_gradients, learning_rate, make_optimizer
from verl.core.model_engine.packing import PackedInputs, split_by_count, split_by_tokens, split_sharing_prompts
from verl.core.model_engine.parallel import compile_layers, make_mesh, reshard, shard, spread_weights, tensors_of
from verl.core.model_engine.sequence_parallel import SequenceGroup
from verl.data.batch import Ragged, SampleBatch


class FSDPEngine:
    """One model (`PolicyModel` or `ValueModel`) under FSDP2 with its optimizer; without `optim` it is frozen."""

    def __init__(
        self,
        model: PolicyModel | ValueModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fsdp: FSDPConfig,
        train_limit: MicroBatching,
        infer_limit: MicroBatching,
        optim: OptimConfig | None = None,
        total_updates: int = 0,
        checkpoint: CheckpointConfig | None = None,
        gradient_checkpointing: bool | None = False,
        compiled: bool = False,
        tokenizer=None,
    ):
        """Shard `model`, which must be on the CPU or on `device`; with several ranks the first one's weights count.

        Args:
            dtype: of the computation. train_limit, infer_limit: bounds of one forward with and without gradients.
            gradient_checkpointing: None: where memory asks for it. compiled: compile the decoder layers (on a GPU).
            total_updates: length of the learning-rate schedule. tokenizer: saved beside the weights.
        """
        self.device, self.fsdp, self.optim_config = device, fsdp, optim
        self.sequence_ranks = fsdp.ulysses_sequence_parallel_size
        self.train_limit, self.infer_limit = (m.on_ranks(self.sequence_ranks) for m in (train_limit, infer_limit))
        self.total_updates, self.updates, self.share_prompts = total_updates, 0, True
        self.checkpoint = checkpoint or CheckpointConfig()
        self.writer = BackgroundWriter() if self.checkpoint.async_save else None
        self.tokenizer = tokenizer
        self.hf_config, self.generation_config = model.hf.config, getattr(model.hf, "generation_config", None)
        self.adapter = adapter_settings(model.hf)
        if self.sequence_ranks > 1:
            model.sequence = SequenceGroup(device, self.sequence_ranks)
        model.requires_grad_(optim is not None)
        if self.adapter is not None and optim is not None:
            freeze_base(model)
        compiled = compiled and device.type == "cuda"
        if gradient_checkpointing is None:
            gradient_checkpointing = _memory_asks(model, train_limit.max_tokens, dtype, device, fsdp, compiled)
        if gradient_checkpointing and optim is not None:
            model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        model.train(optim is not None)
        if device.type == "cpu":
            keep_freed_memory()
        layer_classes = set(model.hf._no_split_modules or [])
        if compiled:
            compile_layers(model, layer_classes)
        alone = dist.get_world_size() == 1
        source = tensors_of(model) if not alone and dist.get_rank() == 0 else {}
        model = model.to(device) if alone else model  # sharding moves a layer at a time
        self.model = shard(model, layer_classes, make_mesh(device, fsdp.fsdp_size), fsdp, dtype)
        if not alone:
            spread_weights(self.model, source, device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        sizes = [sum(p.numel() for p in parameters) for parameters in (self.model.parameters(), self.parameters)]
        self.accumulates_whole = alone or holds_whole_model(*sizes, dtype, device)
        self.optimizer = make_optimizer(self.parameters, optim) if optim is not None else None
        self.state_offload = make_state_offload(self.optimizer, fsdp, device)
        self.resident = resident_weights(self.model, fsdp, device, frozen=optim is None)

    # ---- inference -------------------------------------------------------------------------------------------------

    def log_probs(
        self, batch: SampleBatch, temperature: float, *, with_entropy: bool = False
    ) -> tuple[Ragged, Ragged | None]:
        """Log-probs (and entropy) of the response tokens at `temperature`: float32, on the CPU."""
        out = self._infer(batch, lambda inputs: torch.stack(self.model(inputs, temperature, with_entropy), dim=1))
        lengths = batch["response_ids"].lengths
        return Ragged(out[:, 0].contiguous(), lengths), Ragged(
            out[:, 1].contiguous(), lengths
        ) if with_entropy else None

    def statistics(self, batch: SampleBatch, temperature: float) -> dict[str, Ragged]:
        """log_probs, entropy and sum_pi_squared of the response tokens from one forward: float32, on the CPU."""
        out = self._infer(batch, lambda inputs: torch.stack(self.model(inputs, temperature, True, True), dim=1))
        names, lengths = ("log_probs", "entropy", "sum_pi_squared"), batch["response_ids"].lengths
        return {name: Ragged(out[:, i].contiguous(), lengths) for i, name in enumerate(names)}

    def values(self, batch: SampleBatch) -> Ragged:
        """Value of the state before each response token: float32, on the CPU."""
        return Ragged(self._infer(batch, self.model), batch["response_ids"].lengths)

    @torch.no_grad()
    def _infer(self, batch: SampleBatch, forward) -> Tensor:
        batch = SampleBatch({k: batch[k] for k in ("prompt_ids", "response_ids")})
        groups = self._micro_batches(batch, self.infer_limit)
        with self.resident:
            parts = [self._infer_group(batch, g, forward) for g in groups]
            reshard(self.model)
        values = torch.cat(parts).cpu()
        order = torch.cat(groups)
        if torch.equal(order, torch.arange(len(batch))):
            return values
        shuffled = Ragged(values, batch["response_ids"].lengths[order])
        return shuffled.select(order.argsort()).values

    def _infer_group(self, batch: SampleBatch, group: Tensor, forward) -> Tensor:
        if len(group):
            return forward(self._pack(batch.select(group)))
        return forward(PackedInputs.blank(self.device))[:0]

    def _micro_batches(self, batch: SampleBatch, limit: MicroBatching) -> list[Tensor]:
        """Index groups, as many as the rank with the most has: empty ones at the end make up for it."""
        if limit.max_samples is not None:
            groups = split_by_count(len(batch), limit.max_samples) if len(batch) else []
        elif self.share_prompts:
            groups = split_sharing_prompts(batch, limit.max_tokens)
        else:
            groups = split_by_tokens(batch.token_counts, limit.max_tokens)
        return groups + [torch.empty(0, dtype=torch.int64)] * (self._most_over_ranks(len(groups)) - len(groups))

    def _pack(self, micro: SampleBatch) -> PackedInputs:
        return PackedInputs.make(micro, self.device, share_prompts=self.share_prompts)

    def _most_over_ranks(self, count: int) -> int:
        """Every rank must run as many forwards as the others, since each gathers parameters with them."""
        if dist.get_world_size() == 1:
            return count
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    # ---- training --------------------------------------------------------------------------------------------------

    def train_batch(self, batch: SampleBatch, loss: TokenLoss) -> dict[str, float]:
        """One optimizer update on all of `batch`.

        An update whose gradient is not finite is left out, and `skipped_updates` says so.

        Returns:
            the loss's metrics averaged over `batch`; `grad_norm` (before clipping), `lr`, `skipped_updates`; and `mfu`
            where the device's peak is known.
        """
        optimizer, config = self._training()
        started, flops = time.perf_counter(), 0.0
        totals: dict[str, Metric] = {}
        with self.resident:
            groups = self._micro_batches(batch, self.train_limit)
            for number, group in enumerate(groups, start=1):
                self._accumulate(last=number == len(groups))
                if len(group) == 0:
                    self._backward_of_nothing(loss)
                    continue
                micro = batch.select(group)
                inputs = self._pack(micro)
                value, metrics = loss(self._outputs(inputs, loss), micro.to(self.device))
                value.backward()
                work = train_flops(self.model, self.hf_config, inputs.layout.lengths, len(inputs.input_ids))
                flops += work / self.sequence_ranks
                merge_into(totals, metrics)
            norm = clip_gradients(self.parameters, config.clip_grad)
            rate = learning_rate(self.updates, config, self.total_updates)
            for param_group in optimizer.param_groups:
                param_group["lr"] = rate
            finite = bool(norm.isfinite())
            if finite:
                (self.state_offload or optimizer).step()
            self.updates += 1
            optimizer.zero_grad(set_to_none=True)
            reshard(self.model)
        numbers = reduce(totals, self.device, self.sequence_ranks)
        if (peak := peak_flops(self.device)) is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            numbers["mfu"] = flops / (time.perf_counter() - started) / peak
        return numbers | {"grad_norm": float(norm), "lr": rate, "skipped_updates": float(not finite)}

    def _accumulate(self, last: bool) -> None:
        """Keep gathered parameters and unreduced float32 gradients between micro-batches; reduce with the last one.

        Where a device has no room for those of the whole model, each micro-batch is reduced.
        """
        if self.accumulates_whole:
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)

    def _backward_of_nothing(self, loss: TokenLoss) -> None:
        """Take part in the other ranks' gathers and reductions, with gradients of zero."""
        outputs = self._outputs(PackedInputs.blank(self.device), loss)
        parts = [t.sum() for t in (outputs.log_probs, outputs.entropy, outputs.values) if t is not None]
        (torch.stack(parts).sum() * 0.0).backward()

    def _training(self) -> tuple[torch.optim.AdamW, OptimConfig]:
        if self.optimizer is None or self.optim_config is None:
            raise RuntimeError("this engine was built without an optimizer: it cannot train")
        return self.optimizer, self.optim_config

    def _outputs(self, inputs: PackedInputs, loss: TokenLoss) -> TokenOutputs:
        if isinstance(self.model, ValueModel):
            return TokenOutputs(values=self.model(inputs))
        log_probs, entropy = self.model(inputs, loss.temperature, loss.with_entropy)
        return TokenOutputs(log_probs=log_probs, entropy=entropy)

    # ---- weights and checkpoints -----------------------------------------------------------------------------------

    def export_weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 1 << 30,
        takers: Collection[int] | None = None,
        traffic: Traffic | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face checkpoint, whole tensor) of every parameter; tied weights once.

        On one rank the tensors are the parameters themselves, not copies, whatever dtype says. On several, all ranks go
        through this together; tensors are gathered in buckets, as `dtype` where it is given, on the ranks `takers` (None:
        all). Weights with an adapter are merged copies, in the precision of the master weights.
        """
        traffic = traffic or Traffic()
        named = ((name, p.detach()) for name, p in self._named_parameters())
        if dist.get_world_size() > 1:
            options = {"dtype": dtype if self.adapter is None else None, "bucket_bytes": bucket_bytes, "takers": takers}
            whole = gather_weights(named, self.device, traffic=traffic, **options)
        else:
            whole = ((name, _whole(p)) for name, p in named)
        yield from whole if self.adapter is None else merged(whole, scale_of(self.adapter), traffic)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix("hf."), parameter

    def save(self, folder: Path) -> None:
        """Write model/, optimizer/, extra.pt and huggingface/ (as checkpoint.save_contents says) into `folder`.

        With checkpoint.async_save the large parts are copied to host memory, and a thread writes them: see `saved`.
        """
        contents, first = self.checkpoint.save_contents, dist.get_rank() == 0
        folder.mkdir(parents=True, exist_ok=True)
        parts: dict[str, dict[str, Tensor]] = {}
        if "model" in contents:
            parts["model"] = self._trained_weights()
            self._save_adapter(folder)
        if "optimizer" in contents and self.optimizer is not None:
            parts["optimizer"] = self._optimizer_tensors()
        whole: dict[str, Tensor] = {}
        if "hf_model" in contents:
            whole = keep_whole(self.export_weights(takers=(0,)), self.hf_config.dtype)
        if first:
            if "extra" in contents:
                torch.save({"updates": self.updates}, folder / "extra.pt")
            save_hf_side(folder, self.hf_config, self.tokenizer, self.generation_config)
        further = functools.partial(save_whole, whole, folder) if whole else None
        if self.writer is not None:
            self.writer.start(folder, {name: on_host(state) for name, state in parts.items()}, further)
            return
        for name, state in parts.items():
            save_sharded(state, folder / name)
        if further is not None:
            further()

    def saved(self, wait: bool = False) -> bool:
        """Whether this rank's part of what `save` began is on the disk; with `wait`, when it is.

        Raises what went wrong in writing it.
        """
        return self.writer is None or self.writer.done(wait)

    def load(self, folder: Path) -> None:
        """Take over a checkpoint written by `save`, on any number of ranks.

        Raises:
            CheckpointError: a part that checkpoint.load_contents names is missing or does not fit this model.
        """
        contents = self.checkpoint.load_contents
        check_contents(folder, [part for part in contents if part != "optimizer" or self.optimizer is not None])
        with torch.no_grad():
            if "model" in contents:
                load_sharded(self._trained_weights(), folder / "model")
            if "optimizer" in contents and self.optimizer is not None:
                load_sharded(self._optimizer_tensors(), folder / "optimizer")
        if "extra" in contents:
            with damage_named(folder / "extra.pt"):
                self.updates = load_file(folder / "extra.pt")["updates"]

    def _trained_weights(self) -> dict[str, Tensor]:
        """All parameters by name; of a model with adapters, those alone."""
        return {n: p.detach() for n, p in self._named_parameters() if self.adapter is None or is_adapter(n)}

    def _save_adapter(self, folder: Path) -> None:
        if self.adapter is not None:
            weights = {plain_name(n): _whole(p) for n, p in self._trained_weights().items()}
            if dist.get_rank() == 0:
                save_adapter(folder, self.adapter, weights)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by parameter name; state of a parameter that has had no update yet is made, as zeros."""
        optimizer, _ = self._training()
        if self.state_offload is not None:
            self.state_offload.make_states()
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._named_parameters():
            if not parameter.requires_grad:
                continue
            state = optimizer.state[parameter]
            if not state:
                device = parameter.device if self.fsdp.offload_policy else self.device
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter, device=device)
                state["exp_avg_sq"] = torch.zeros_like(parameter, device=device)
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
        return tensors


def _memory_asks(
    model: PolicyModel | ValueModel,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    fsdp: FSDPConfig,
    compiled: bool,
) -> bool:
    """Whether activations of a micro-batch have to be checkpointed."""
    share = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
    state = {"parameters": share, "moments": not fsdp.optimizer_offload}
    return needs_checkpointing(model.hf.config, tokens, dtype, device, compiled=compiled, **state)


def _whole(parameter: Tensor) -> Tensor:
    """The whole tensor of a sharded parameter: on one rank the parameter itself, else a copy."""
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local() if dist.get_world_size() == 1 else parameter.full_tensor()
    return parameter.detach()
