"""Process group and FSDP2 wrapping, applied to a model from outside it."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.config.schema import FSDPConfig
from verl.core.checkpoint_engine.gather import own_rows


def ensure_process_group(device: torch.device, timeout_seconds: int) -> None:
    """A process group: the launcher's where there is one, else a group of this process alone, without a network port."""
    if not dist.is_initialized():
        _init(device, dist.HashStore(), 0, 1, timeout_seconds)


def open_store(address: str, timeout_seconds: int) -> dist.TCPStore:
    """A store on a free port of this machine, at which the ranks of a process group find each other.

    address: at which the other machines reach this one.
    """
    return dist.TCPStore(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds), use_libuv=True
    )


def join_store(address: str, port: int, timeout_seconds: int) -> dist.TCPStore:
    """The store that another process opened."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds), use_libuv=True)


def join_process_group(
    device: torch.device, store: dist.Store, rank: int, world_size: int, timeout_seconds: int, own_address: str
) -> None:
    """Become `rank` of the default process group. own_address: of this machine, where the others reach it."""
    choose_interface(own_address)
    _init(device, dist.PrefixStore("ranks", store), rank, world_size, timeout_seconds)


def choose_interface(own_address: str) -> None:
    """Let gloo use the network interface that has this address, not the one that the host's name leads to."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family in (socket.AF_INET, socket.AF_INET6) and a.address == own_address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _init(device: torch.device, store: dist.Store, rank: int, world_size: int, timeout_seconds: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def make_mesh(device: torch.device, fsdp_size: int = -1) -> DeviceMesh:
    """One dimension over which parameters are sharded; and, where fsdp_size is less than all ranks, one that repeats it.

    Neighbouring ranks, which tend to share a machine, shard together.
    """
    world = dist.get_world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "dp"))


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
                module.set_force_sum_reduction_for_comms(True)  # a factor of 1 needs no product, which gloo lacks
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered parameters of every layer, so that the model's parameters are the optimizer's own again.

    A forward without a backward leaves them gathered, and then `parameters()` gives copies in the computation's dtype.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, as they are now: moving or sharding the model leaves these where they were."""
    return {name: t.detach() for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}


def spread_weights(model: nn.Module, source: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give every rank its shards of the first rank's weights, one tensor at a time.

    source: `tensors_of` the model before it was sharded; read on the first rank alone.
    """
    first = dist.get_rank() == 0
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if first:
            whole.copy_(source[name])
        dist.broadcast(whole, src=0)
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(own_rows(name, tensor, whole))
            else:
                tensor.copy_(whole)
