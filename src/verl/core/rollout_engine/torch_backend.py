"""The decoder's operations in plain torch: the CPU path, the fallback on a GPU, and what the Triton kernels are tested against.

A backend gives the element-wise operations; two phases that know where keys and values go, `prefill` for whole prompts
packed end to end and `decode` for one token in each of the first n slots; and `draw`, which ends a decode step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache
from verl.core.rollout_engine.sampling import SamplingRule, sample
from verl.core.rollout_engine.slots import SlotState
from verl.core.rollout_engine.weights import LayerWeights, Linear


class TorchBackend:
    """Operations for one model on one device; `attach` says which cache and slots they work on."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.cos, self.sin = (torch.empty(0, spec.head_dim // 2, device=device) for _ in range(2))
        self.cache: KVCache | None = None

    def attach(self, cache: KVCache, state: SlotState, rule: SamplingRule) -> None:
        """Work on this cache and these slots, and draw by this rule."""
        self.cache, self.state, self.rule = cache, state, rule
        self.stop = torch.tensor(rule.stop_token_ids, dtype=torch.int64, device=self.device)
        if len(self.cos) < cache.length:
            self.cos, self.sin = self.spec.rotary_table(cache.length, self.device)

    def detach(self) -> None:
        """Let go of the cache."""
        self.cache = None

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

    def prefill(self, slots: Tensor, positions: Tensor, lengths: list[int]) -> TorchPrefill:
        """Phase of prompts laid end to end. slots, positions: int64 [tokens]; lengths: tokens of each prompt, in order."""
        return TorchPrefill(self, slots, positions, *self.angles(positions), equal_runs(lengths))

    def decode(self, n: int, context: int) -> TorchDecode:
        """Phase of one token in slots 0..n-1, whose positions are all below `context`."""
        positions = self.state.position[:n]
        hidden = torch.arange(context, device=self.device) > positions[:, None]
        mask = torch.zeros(n, context, dtype=self.cache.keys.dtype, device=self.device).masked_fill_(hidden, -math.inf)
        mask = mask.repeat_interleave(self.spec.num_kv_heads, dim=0)[:, None]
        rows = torch.arange(n, device=self.device)
        return TorchDecode(self, rows, positions, *self.angles(positions), mask)

    def draw(self, logits: Tensor) -> None:
        """Draw a token for slots 0..n-1 and record it in their state. logits: float32 [n, vocab], may be overwritten."""
        n = len(logits)
        tokens, log_probs = sample(logits, self.state.key[:n], self.state.position[:n], self.rule)
        self.state.record(tokens, log_probs, self.stop)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at positions [n]: [n, 1, head_dim / 2] each, in the cache's dtype."""
        dtype = self.cache.keys.dtype
        return self.cos[positions][:, None].to(dtype), self.sin[positions][:, None].to(dtype)

    def heads(self, qkv: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [n, (heads + 2 kv_heads) * head_dim] -> normed and rotated q, k and plain v, each [n, h, head_dim]."""
        spec = self.spec
        all_heads = qkv.view(len(qkv), -1, spec.head_dim)
        q_k, v = all_heads.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = q_k.split((spec.num_heads, spec.num_kv_heads), dim=1)
            q_k = torch.cat((self.head_norm(q, layer.q_norm), self.head_norm(k, layer.k_norm)), dim=1)
        q, k = rotate(q_k, cos, sin).split((spec.num_heads, spec.num_kv_heads), dim=1)
        return q, k, v

    def head_norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of each head: [n, h, head_dim]."""
        return F.rms_norm(heads, (self.spec.head_dim,), weight, self.spec.rms_eps)


@dataclass
class TorchPrefill:
    backend: TorchBackend
    slots: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    runs: list[tuple[int, int]]

    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """Store keys and values of layer `index`; causal attention within each prompt: [tokens, heads * head_dim]."""
        cache = self.backend.cache
        q, k, v = self.backend.heads(qkv, layer, self.cos, self.sin)
        cache.keys[index][self.slots, :, self.positions] = k
        cache.values[index][self.slots, :, self.positions] = v
        return attend_runs(q, k, v, self.runs)


@dataclass
class TorchDecode:
    """mask: [n * kv_heads, 1, context], 0 where a position is seen and -inf where not."""

    backend: TorchBackend
    rows: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor

    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """Store keys and values of layer `index`; attention over each slot's cache: [n, heads * head_dim]."""
        spec, n, context = self.backend.spec, len(qkv), self.mask.shape[2]
        q, k, v = self.backend.heads(qkv, layer, self.cos, self.sin)
        keys, values = self.backend.cache.keys[index], self.backend.cache.values[index]
        keys[self.rows, :, self.positions] = k
        values[self.rows, :, self.positions] = v
        seen_keys = keys[:n, :, :context].flatten(0, 1)
        seen_values = values[:n, :, :context].flatten(0, 1)
        # The query heads that share a key head are the rows of one small matrix product.
        grouped = q.reshape(n * spec.num_kv_heads, -1, spec.head_dim)
        mask = self.mask.expand(-1, grouped.shape[1], -1)
        scores = torch.baddbmm(mask, grouped, seen_keys.transpose(1, 2), alpha=spec.head_dim**-0.5)
        return torch.bmm(scores.softmax(dim=-1), seen_values).view(n, -1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the pairs (i, i + head_dim / 2) of heads [n, h, head_dim] turned; cos, sin [n, 1, head_dim / 2]."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    out = torch.empty_like(heads)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Causal attention within each prompt of q, k, v [tokens, heads, head_dim]: [tokens, heads * head_dim].

    runs: (count, length) of equally long neighbours, each one call.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for count, length in runs:
        rows = slice(start, start + count * length)
        batch = [x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out[rows] = mixed.transpose(1, 2).flatten(0, 1)
        start += count * length
    return out.flatten(1)


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
