"""The decoder's forward pass, the same for prompts and for single steps: only attention differs, and a phase does that."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.core.rollout_engine.torch_backend import TorchBackend
from verl.core.rollout_engine.weights import LayerWeights, ModelWeights


class Phase(Protocol):
    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """Rotate, store keys and values, attend: [n, (heads + 2 kv_heads) * head_dim] -> [n, heads * head_dim]."""


def forward(
    weights: ModelWeights, backend: TorchBackend, tokens: Tensor, phase: Phase, cache_only: bool = False
) -> Tensor:
    """Hidden states after the last norm: tokens int64 [n] -> [n, hidden].

    cache_only: stop when the last layer's keys and values are stored, which is all that prompts are computed for.
    """
    residual = F.embedding(tokens, weights.embed)
    x = backend.rms_norm(residual, weights.layers[0].input_norm)
    next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms)):
        mixed = phase.attend(index, layer, backend.project(x, layer.qkv))
        if cache_only and index + 1 == len(weights.layers):
            return residual
        x, residual = backend.add_rms_norm(F.linear(mixed, *layer.o), residual, layer.post_norm)
        inner = backend.silu_mul(backend.project(x, layer.gate_up))
        x, residual = backend.add_rms_norm(F.linear(inner, *layer.down), residual, next_norm)
    return x


def logits(weights: ModelWeights, hidden: Tensor) -> Tensor:
    """float32 logits: hidden [n, hidden] -> [n, vocab]."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, weights.head)
    if hidden.is_cuda:
        # Products of bf16 numbers summed and kept in float32: a bf16 result would blur the log-probs.
        return torch.mm(hidden, weights.head.t(), out_dtype=torch.float32)
    return F.linear(hidden, weights.head).float()
