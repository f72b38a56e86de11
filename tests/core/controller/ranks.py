"""Work for one rank of a gloo group: what several ranks compute is held to what one computes."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load
from tests.core.model_engine import test_fsdp_engine
from tests.core.model_engine.conftest import make_batch, make_config, make_pair
from tests.core.model_engine.test_fsdp_engine import actor_loss
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl.config.schema import CheckpointConfig, FSDPConfig, ModelConfig
from verl.core.checkpoint_engine.broadcast import WeightChannel
from verl.core.checkpoint_engine.gather import Traffic
from verl.core.checkpoint_engine.sync import export_parts
from verl.core.controller.dispatch import balanced
from verl.core.model_engine import attention
from verl.core.model_engine.api import MicroBatching
from verl.core.model_engine.lora import BaseReference, add_adapters
from verl.trainer.losses import CriticLoss, with_loss_weights

CPU = torch.device("cpu")
# Small enough that ranks come to unlike numbers of micro-batches.
HEADS = ((4, 2), (4, 1))
LIMITS = {"tokens": MicroBatching(9), "samples": MicroBatching(0, max_samples=1), "whole": MicroBatching(10_000)}


def whole_batch(samples: int = 7):
    """Samples of unlike length, with everything that the losses read."""
    prompts, responses = (3, 5, 1, 4, 2, 2, 6)[:samples], (2, 6, 3, 1, 4, 5, 7)[:samples]
    batch = make_batch(prompts, responses)
    response = batch["response_ids"]
    generator = torch.Generator().manual_seed(3)
    column = lambda: response.with_values(torch.randn(response.values.shape, generator=generator))  # noqa: E731
    mask = torch.rand(response.values.shape, generator=generator) > 0.2
    batch = batch.with_columns(
        response_mask=response.with_values(mask),
        old_log_probs=response.with_values(column().values * 0.1 - 3.6),
        advantages=column(),
        ref_log_probs=column(),
        values=column(),
        returns=column(),
        rollout_log_probs=response.with_values(torch.full(response.values.shape, -3.0)),
    )
    return with_loss_weights(batch, "token-mean", 16.0)


def make_engine(limit=LIMITS["whole"], **options):
    """An engine around random weights of the rank's own, in place of which the first rank's have to come."""
    return test_fsdp_engine.make_engine(limit, make_pair(seed=dist.get_rank())[0], **options)


def share(batch):
    """This rank's samples."""
    group = balanced(batch.token_counts, dist.get_world_size())[dist.get_rank()]
    return batch.select(group), group


def work(folder: Path) -> dict:
    """Everything that is compared, on this rank."""
    out: dict = {"log_probs": log_probs(), "updates": {}}
    for name, limit in LIMITS.items():
        out["updates"][name] = two_updates(limit)
    out["updates"]["reduced each time"] = two_updates(LIMITS["tokens"], accumulates_whole=False)
    out["sequences"] = {heads: sequences(heads) for heads in HEADS}
    if dist.get_world_size() == 4:
        out["sequences of all"] = sequences((4, 2), ranks=4)
        out["updates"]["hybrid"] = two_updates(LIMITS["tokens"], fsdp=FSDPConfig(fsdp_size=2))
        out["updates"]["copies"] = two_updates(LIMITS["tokens"], fsdp=FSDPConfig(fsdp_size=1))
    out["few samples"] = two_updates(LIMITS["tokens"], samples=dist.get_world_size())
    out["critic"] = critic_update()
    out["adapters"] = adapters()
    out["exported"] = exported()
    out["parts"] = parts()
    if dist.get_world_size() > 1:
        out["sent"] = sent(folder)
    out["resumed"] = save_and_resume(folder)
    return out


def log_probs():
    batch, group = share(whole_batch())
    values, entropy = make_engine(LIMITS["tokens"]).log_probs(batch, 0.7, with_entropy=True)
    return group, values, entropy


def two_updates(limit, *, accumulates_whole=None, samples=7, **options):
    engine = make_engine(limit, **options)
    if accumulates_whole is not None:
        engine.accumulates_whole = accumulates_whole
    batch, _ = share(whole_batch(samples))
    metrics = [engine.train_batch(batch, actor_loss()) for _ in range(2)]
    return metrics, weights_of(engine)


def critic_update():
    torch.manual_seed(5 + dist.get_rank())
    config = make_config()
    config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    model = AutoModelForTokenClassification.from_config(config, attn_implementation=attention.NAME)
    engine = test_fsdp_engine.make_engine(LIMITS["tokens"], model)
    batch, _ = share(whole_batch())
    metrics = engine.train_batch(batch, CriticLoss(0.5))
    return metrics, weights_of(engine), engine.values(batch)


def adapters():
    """Two updates of LoRA adapters, the merged weights, the log-probs without adapters, and the weights for one rank alone."""
    model = make_pair(seed=dist.get_rank())[0]
    add_adapters(model, ModelConfig(lora_rank=2, lora_alpha=4, target_modules="all-linear"), "base")
    engine = test_fsdp_engine.make_engine(LIMITS["tokens"], model)
    batch, group = share(whole_batch())
    metrics = [engine.train_batch(batch, actor_loss()) for _ in range(2)]
    taken = {name: tensor.clone() for name, tensor in engine.export_weights(bucket_bytes=8192, takers=(0,))}
    return metrics, weights_of(engine), group, BaseReference(engine).log_probs(batch, 1.0)[0], taken


def sequences(heads, ranks=2):
    """What a policy and a value model of these (query, key) heads make of samples that `ranks` neighbours share.

    Without a group of ranks this is the same model on one.
    """
    torch.manual_seed(11)
    config = make_config()
    config.num_attention_heads, config.num_key_value_heads = heads
    config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    policy = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    value = AutoModelForTokenClassification.from_config(config, attn_implementation=attention.NAME)
    size = min(ranks, dist.get_world_size())
    options = {"fsdp": FSDPConfig(ulysses_sequence_parallel_size=size)}
    batch = whole_batch()
    group = balanced(batch.token_counts, dist.get_world_size() // size)[dist.get_rank() // size]
    batch = batch.select(group)
    out = {"group": group}
    # With five tokens on each rank, the blank micro-batch and those of one token leave ranks without a target.
    for name, limit in {"tokens": MicroBatching(5), "samples": MicroBatching(0, max_samples=1)}.items():
        engine = test_fsdp_engine.make_engine(limit, copy.deepcopy(policy), gradient_checkpointing=True, **options)
        out[f"inferred: {name}"] = engine.log_probs(batch, 0.7, with_entropy=True)
        out[name] = [engine.train_batch(batch, actor_loss()) for _ in range(2)], weights_of(engine)
    engine = test_fsdp_engine.make_engine(MicroBatching(9), value, **options)
    metrics = engine.train_batch(batch, CriticLoss(0.5))
    out["critic"] = metrics, weights_of(engine), engine.values(batch)
    return out


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def exported():
    """Weights through buckets of a few tensors, and in bfloat16; and what the former cost."""
    engine = make_engine()
    traffic = Traffic()
    plain = {n: t.clone() for n, t in engine.export_weights(bucket_bytes=8192, traffic=traffic)}
    half = {n: t.clone() for n, t in engine.export_weights(dtype=torch.bfloat16, bucket_bytes=8192)}
    whole = {n: p.full_tensor() for n, p in engine._named_parameters()}
    return plain, half, whole, (traffic.received, traffic.peak_extra)


def parts():
    """What leaves this rank for rollout servers, in parts of 2 KiB, and its report."""
    *sent, report = export_parts(make_engine(), dtype=torch.bfloat16, bucket_bytes=4096, part_bytes=2048)
    return [load(part) for part in sent], report


def sent(folder: Path):
    """The first rank's weights at every rank, twice, in buckets smaller than some tensors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    channel = WeightChannel(dist.FileStore(str(folder / "channel"), world), rank, world, CPU, 4096, 60)
    received = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        tensors = {
            "a": torch.randn(7, 3),
            "b": torch.randn(50, 40),
            "c": torch.randn(5).bfloat16(),
            "d": torch.randn(2),
        }
        if rank == 0:
            traffic = Traffic()
            total = channel.send(tensors.items(), torch.bfloat16, traffic)
            received.append(({n: t.bfloat16() for n, t in tensors.items()}, total, traffic.peak_extra))
        else:
            traffic = Traffic()
            received.append(({n: t.clone() for n, t in channel.receive(traffic)}, traffic.received, None))
    if rank == 0:
        try:
            channel.send([("a", torch.zeros(7, 4))])
        except RuntimeError as error:
            received.append(str(error))
    return received


def save_and_resume(folder: Path):
    """Save after one update; the update after that, here and in every group that saved before."""
    batch, _ = share(whole_batch())
    engine = make_engine(LIMITS["tokens"], checkpoint=CheckpointConfig(async_save=True))
    engine.train_batch(batch, actor_loss())
    engine.save(folder / "checkpoint")
    after = {"unbroken": (engine.train_batch(batch, actor_loss()), weights_of(engine))}  # while threads write
    if not engine.saved(wait=True):
        raise RuntimeError("waited for what is not written")
    dist.barrier()
    for saved in sorted(folder.parent.glob("*/checkpoint")):
        resumed = make_engine(LIMITS["tokens"])
        resumed.load(saved)
        after[saved.parent.name] = resumed.train_batch(batch, actor_loss()), weights_of(resumed)
    return after
