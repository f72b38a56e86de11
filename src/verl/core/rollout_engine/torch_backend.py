"""The decoder's operations in plain torch: the CPU path, the fallback on a GPU, and what the Triton kernels are tested against.

A backend gives the element-wise operations, and two phases that know where keys and values go: `prefill` for whole
prompts packed end to end, `decode` for one token in each of the first n slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache
from verl.core.rollout_engine.weights import LayerWeights, Linear


class TorchBackend:
    """rotary: (cos, sin), float32 [positions, head_dim / 2] each."""

    def __init__(self, spec: ModelSpec, rotary: tuple[Tensor, Tensor]):
        self.spec = spec
        cos, sin = rotary
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = sin

    def project(self, x: Tensor, parts: tuple[Linear, ...]) -> Tensor:
        """x [n, in] through projections side by side: [n, sum of out]."""
        if len(parts) == 1:
            return F.linear(x, *parts[0])
        out = x.new_empty(x.shape[0], sum(part.weight.shape[0] for part in parts))
        for columns, (weight, bias) in zip(out.split([p.weight.shape[0] for p in parts], dim=1), parts):
            if bias is None:
                torch.mm(x, weight.t(), out=columns)
            else:
                torch.addmm(bias, x, weight.t(), out=columns)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), the sum written over `residual`."""
        residual = residual.add_(x)
        return self.rms_norm(residual, weight), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of the columns."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions on heads [n, h, head_dim] at positions [n]."""
        half = heads.shape[-1] // 2
        cos = self.cos[positions][:, None].to(heads.dtype)
        sin = self.sin[positions][:, None].to(heads.dtype)
        out = heads * cos
        out[..., :half].addcmul_(heads[..., half:], sin, value=-1)
        out[..., half:].addcmul_(heads[..., :half], sin)
        return out

    def heads(self, qkv: Tensor, layer: LayerWeights, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [n, (heads + 2 kv_heads) * head_dim] -> normed and rotated q, k and plain v, each [n, h, head_dim]."""
        spec = self.spec
        all_heads = qkv.view(len(qkv), -1, spec.head_dim)
        q_k, v = all_heads.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = q_k.split((spec.num_heads, spec.num_kv_heads), dim=1)
            q_k = torch.cat((self.rms_norm(q, layer.q_norm), self.rms_norm(k, layer.k_norm)), dim=1)
        q, k = self.rotate(q_k, positions).split((spec.num_heads, spec.num_kv_heads), dim=1)
        return q, k, v

    def prefill(self, cache: KVCache, slots: Tensor, positions: Tensor, lengths: list[int]) -> TorchPrefill:
        """Phase of prompts laid end to end. slots, positions: int64 [tokens]; lengths: tokens of each prompt, in order."""
        return TorchPrefill(self, cache, slots, positions, equal_runs(lengths))

    def decode(self, cache: KVCache, positions: Tensor, context: int) -> TorchDecode:
        """Phase of one token in slots 0..n-1. positions: int64 [n], all below `context`."""
        n, kv_heads = len(positions), self.spec.num_kv_heads
        hidden = torch.arange(context, device=positions.device) > positions[:, None]
        mask = torch.zeros(n, context, dtype=cache.keys.dtype, device=positions.device).masked_fill_(hidden, -math.inf)
        return TorchDecode(self, cache, positions, mask.repeat_interleave(kv_heads, dim=0)[:, None])


@dataclass
class TorchPrefill:
    backend: TorchBackend
    cache: KVCache
    slots: Tensor
    positions: Tensor
    runs: list[tuple[int, int]]

    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """Store keys and values of layer `index`; causal attention within each prompt: [tokens, heads * head_dim]."""
        q, k, v = self.backend.heads(qkv, layer, self.positions)
        self.cache.keys[index][self.slots, :, self.positions] = k
        self.cache.values[index][self.slots, :, self.positions] = v
        out = torch.empty_like(q)
        start = 0
        for count, length in self.runs:
            rows = slice(start, start + count * length)
            batch = [x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
            mixed = F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            out[rows] = mixed.transpose(1, 2).flatten(0, 1)
            start += count * length
        return out.flatten(1)


@dataclass
class TorchDecode:
    """mask: [n * kv_heads, 1, context], 0 where a position is seen and -inf where not."""

    backend: TorchBackend
    cache: KVCache
    positions: Tensor
    mask: Tensor

    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """Store keys and values of layer `index`; attention over each slot's cache: [n, heads * head_dim]."""
        spec, n, context = self.backend.spec, len(qkv), self.mask.shape[2]
        q, k, v = self.backend.heads(qkv, layer, self.positions)
        rows = torch.arange(n, device=qkv.device)
        keys, values = self.cache.keys[index], self.cache.values[index]
        keys[rows, :, self.positions] = k
        values[rows, :, self.positions] = v
        seen_keys = keys[:n, :, :context].flatten(0, 1)
        seen_values = values[:n, :, :context].flatten(0, 1)
        # The query heads that share a key head are the rows of one small matrix product.
        grouped = q.reshape(n * spec.num_kv_heads, -1, spec.head_dim)
        mask = self.mask.expand(-1, grouped.shape[1], -1)
        scores = torch.baddbmm(mask, grouped, seen_keys.transpose(1, 2), alpha=spec.head_dim**-0.5)
        return torch.bmm(scores.softmax(dim=-1), seen_values).view(n, -1)


def equal_runs(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of equal neighbours as (count, length), so that attention takes equally long prompts in one call.

    >>> equal_runs([3, 3, 5])
    [(2, 3), (1, 5)]
    """
    runs: list[tuple[int, int]] = []
    for length in lengths:
        count = runs.pop()[0] if runs and runs[-1][1] == length else 0
        runs.append((count + 1, length))
    return runs
