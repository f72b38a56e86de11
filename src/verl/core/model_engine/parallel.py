"""Process group and FSDP2 wrapping, applied to a model from outside it."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl.config.schema import FSDPConfig


def ensure_process_group(device: torch.device, timeout_seconds: int) -> None:
    """A process group: the launcher's where there is one, else a group of this process alone, without a network port."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_seconds)
    )


def make_mesh(device: torch.device) -> DeviceMesh:
    """One data-parallel dimension over all ranks."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def compile_layers(model: nn.Module, layer_classes: set[str]) -> None:
    """Compile the forward of each decoder layer for any number of tokens.

    All layers of a model share one compiled graph. FSDP2's hooks and activation checkpointing stay outside of it.
    """
    for layer in model.modules():
        if type(layer).__name__ in layer_classes:
            layer.forward = torch.compile(layer.forward, dynamic=True)


def shard(
    model: nn.Module, layer_classes: set[str], mesh: DeviceMesh, config: FSDPConfig, dtype: torch.dtype
) -> nn.Module:
    """Wrap each decoder layer, then the whole, with FSDP2.

    Gradients are summed over ranks, not averaged: losses are already divided by global counts.

    Args:
        layer_classes: class names of the layers that are gathered one at a time.
        dtype: of the computation; gradients are reduced in float32.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload: OffloadPolicy = (
        CPUOffloadPolicy() if config.offload_policy and mesh.device_type == "cuda" else OffloadPolicy()
    )
    options = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    layers = [m for m in model.modules() if type(m).__name__ in layer_classes]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward and mesh.size() > 1, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    if config.forward_prefetch:
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    if mesh.size() > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered parameters of every layer, so that the model's parameters are the optimizer's own again.

    A forward without a backward leaves them gathered, and then `parameters()` gives copies in the computation's dtype.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
