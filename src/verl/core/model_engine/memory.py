"""Reckoning of memory and work from a model's shape."""

from __future__ import annotations

import ctypes
import sys

import psutil
import torch
from torch import nn

# Activations that a decoder layer keeps for its backward, in widths of the hidden state and of the MLP, per token: layer by
# layer, and compiled, which recomputes what is cheap (measured on Qwen2 shapes).
HIDDEN_WIDTHS, MLP_WIDTHS = (12, 6), (4, 2)
SHARE = 0.25
ACTIVATIONS_SHARE = 0.4
# float32 weights and gradients, and the weights once more as the computation and the rollout have them; two moments.
STATE_BYTES, MOMENT_BYTES = 12, 8
# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def activation_bytes(config, tokens: int, dtype: torch.dtype, *, compiled: bool = False) -> int:
    """Bytes that the decoder layers keep for the backward pass of `tokens` packed tokens, without checkpointing."""
    width = HIDDEN_WIDTHS[compiled] * config.hidden_size + MLP_WIDTHS[compiled] * config.intermediate_size
    return tokens * config.num_hidden_layers * width * dtype.itemsize


def device_bytes(device: torch.device) -> int:
    """Memory of the device, or of this machine where the device is its CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def needs_checkpointing(
    config,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    parameters: int = 0,
    moments: bool = True,
    compiled: bool = False,
) -> bool:
    """Whether activations of a micro-batch would take more than 40 % of the device's memory, or than the model's state leaves.

    A model whose config does not tell its shape is taken to need it. parameters: of this device's share of the model.
    moments: whether the optimizer's are on the device, too.
    """
    if not all(hasattr(config, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")):
        return True
    memory = device_bytes(device)
    state = parameters * (STATE_BYTES + MOMENT_BYTES * moments)
    room = min(ACTIVATIONS_SHARE * memory, 0.9 * memory - state)
    return activation_bytes(config, tokens, dtype, compiled=compiled) > room


def holds_whole_model(parameters: int, trained: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the whole model, gathered, and float32 gradients of what is trained take at most a quarter of the device."""
    return parameters * dtype.itemsize + trained * 4 <= SHARE * device_bytes(device)


def keep_freed_memory() -> None:
    """Let glibc keep what this process frees, up to 1 GiB a block, for its next allocation.

    By default it returns every large tensor to the system at once, and the next one of that size costs a page fault for
    each 4 KiB: a tenth of a training step on a CPU. Elsewhere (macOS, musl) nothing happens.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def train_flops(model: nn.Module, config, lengths: torch.Tensor, tokens: int) -> float:
    """Floating-point operations of one forward and backward, without recomputation.

    Args:
        lengths: of the sequences that attention sees, [B]. tokens: that the layers compute; fewer than lengths.sum() where
            samples share a prompt.

    6 x parameters x tokens for the matrix products (an input embedding that is not also the output layer does none), and
    for causal attention 6 x layers x heads x head size x length^2: two products of 2 x length^2 x width each, halved by
    causality, once forward and twice backward.
    """
    parameters = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    squares = float(lengths.double().square().sum())
    return 6.0 * parameters * tokens + 6.0 * config.num_hidden_layers * width * squares


# Dense bf16 tensor-core peaks by the vendors' data sheets, in FLOP/s.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
    "4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)
