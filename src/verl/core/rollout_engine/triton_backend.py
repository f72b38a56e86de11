"""`TritonBackend`: `TorchBackend`'s operations as fused kernels on a GPU; nothing in a decode step waits for the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache
from verl.core.rollout_engine.sampling import BLOCK, SamplingRule
from verl.core.rollout_engine.slots import SlotState
from verl.core.rollout_engine.torch_backend import TorchBackend, attend_runs, equal_runs
from verl.core.rollout_engine.triton_kernels import (
    add_rms_norm_kernel,
    combine_splits_kernel,
    decode_attention_kernel,
    rope_store_kernel,
    silu_mul_kernel,
)
from verl.core.rollout_engine.triton_sampling import block_sums_kernel, pick_kernel, thresholds_kernel
from verl.core.rollout_engine.weights import LayerWeights
from verl.errors import ConfigError

MAX_STOPS = 64
SPLITS = (1, 4, 16)  # few, because each is a kernel to compile
HEADS_A_PROGRAM = 8
SEARCH_WAYS = 8
SEARCH_BLOCK = 2048
_next_power = triton.next_power_of_2


class TritonBackend(TorchBackend):
    """Fused kernels. Addresses that kernels read from device memory stay the same for the backend's life: `table` (the
    cache), `numbers`, `top_k` and `stop` (the sampling rule); so captured graphs follow `attach`."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        super().__init__(spec, device)
        self.cos, self.sin = spec.rotary_table(spec.max_positions, device)
        self.table = torch.zeros(5, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(3, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(1, dtype=torch.int64, device=device)
        self.stop = torch.full((MAX_STOPS,), -1, dtype=torch.int64, device=device)
        self._block = min(BLOCK, _next_power(spec.vocab_size))
        self._blocks = triton.cdiv(spec.vocab_size, self._block)
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1

    def attach(self, cache: KVCache, state: SlotState, rule: SamplingRule) -> None:
        """Work on this cache and these slots, and draw by this rule."""
        if len(rule.stop_token_ids) > MAX_STOPS:
            raise ConfigError(f"{len(rule.stop_token_ids)} stop tokens: the native engine takes at most {MAX_STOPS}")
        self.cache, self.state, self.rule = cache, state, rule
        keys, values = cache.keys, cache.values
        self.table.copy_(torch.tensor([keys.data_ptr(), values.data_ptr(), *keys.stride()[:3]]))
        greedy = rule.temperature == 0
        self.numbers.copy_(torch.tensor([1.0 if greedy else 1.0 / rule.temperature, rule.top_p, float(greedy)]))
        self.top_k.fill_(rule.top_k if 0 < rule.top_k < self.spec.vocab_size else self.spec.vocab_size)
        stop = list(rule.stop_token_ids)
        self.stop.copy_(torch.tensor(stop + [-1] * (MAX_STOPS - len(stop))))

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, None, weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        block = min(1024, _next_power(size))
        silu_mul_kernel[(rows, triton.cdiv(size, block))](gate_up, out, size, block)
        return out

    def prefill(self, slots: Tensor, positions: Tensor, lengths: list[int]) -> TritonPrefill:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32, non_blocking=True)
        return TritonPrefill(self, slots, positions, ends, max(lengths), equal_runs(lengths))

    def decode(self, n: int, context: int) -> TritonDecode:
        """Phase of one token in slots 0..n-1; how long their contexts are is read on the device."""
        programs = n * self.spec.num_kv_heads
        wanted = 2 * self._processors / programs
        return TritonDecode(self, n, next((s for s in SPLITS if s >= wanted), SPLITS[-1]))

    def draw(self, logits: Tensor) -> None:
        n, vocab = logits.shape
        state, blocks, block = self.state, self._blocks, self._block
        peaks, totals = (torch.empty(n, blocks, dtype=torch.float32, device=self.device) for _ in range(2))
        cut_totals = torch.empty_like(totals) if self.rule.truncates else totals
        thresholds = torch.empty(n, dtype=torch.int32, device=self.device)
        shape = {"VOCAB": vocab, "BLOCK": block, "BLOCKS": blocks}
        padded = _next_power(blocks)
        block_sums_kernel[(n, blocks)](logits, self.numbers, thresholds, peaks, totals, CUT=False, **shape)
        if self.rule.truncates:
            thresholds_kernel[(n,)](
                logits, self.numbers, self.top_k, peaks, thresholds, vocab, blocks, padded,
                min(SEARCH_BLOCK, block), SEARCH_WAYS, num_warps=8,
            )  # fmt: skip
            block_sums_kernel[(n, blocks)](logits, self.numbers, thresholds, peaks, cut_totals, CUT=True, **shape)
        pick_kernel[(n,)](
            logits, self.numbers, thresholds, peaks, totals, cut_totals, self.stop, state.token, state.position,
            state.start, state.limit, state.key, state.done.view(torch.uint8), state.out_tokens, state.out_log_probs,
            state.out_tokens.stride(0), BLOCKS_PAD=padded, STOPS=MAX_STOPS, CUT=self.rule.truncates, num_warps=8, **shape,
        )  # fmt: skip

    def rope_store(self, index: int, layer: LayerWeights, qkv: Tensor, positions: Tensor, slots: Tensor | None) -> None:
        """Norm and rotate q and k within qkv, and store k and v of layer `index` at (slot, position)."""
        spec = self.spec
        norm = layer.q_norm is not None
        grid = (len(qkv), triton.cdiv(spec.num_heads + 2 * spec.num_kv_heads, HEADS_A_PROGRAM))
        rope_store_kernel[grid](
            qkv, self.cos, self.sin, positions, positions if slots is None else slots,
            layer.q_norm if norm else qkv, layer.k_norm if norm else qkv, self.table, index, spec.rms_eps,
            spec.num_heads, spec.num_kv_heads, spec.head_dim, _next_power(spec.head_dim // 2), HEADS_A_PROGRAM,
            slots is not None, norm,
        )  # fmt: skip

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> Tensor:
        size = x.shape[1]
        out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
        block = _next_power(size)
        add_rms_norm_kernel[(len(x),)](
            x, x if residual is None else residual, weight, out, x.stride(0), self.spec.rms_eps, size, block,
            residual is not None, num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
        return out


@dataclass
class TritonPrefill:
    """ends: int32 [prompts + 1], where each prompt's tokens begin, and the end."""

    backend: TritonBackend
    slots: Tensor
    positions: Tensor
    ends: Tensor
    longest: int
    runs: list[tuple[int, int]]

    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        spec = self.backend.spec
        self.backend.rope_store(index, layer, qkv, self.positions, self.slots)
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16) and spec.head_dim % 8 == 0:
            # torch's variable-length flash attention; its public wrapper wants key heads repeated.
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, self.ends, self.ends, self.longest, self.longest, 0.0, True, False, scale=spec.head_dim**-0.5
            )[0]
            return out.flatten(1)
        return attend_runs(q, k, v, self.runs)


@dataclass
class TritonDecode:
    """splits: programs that share one row's context, so that few rows keep the whole GPU busy."""

    backend: TritonBackend
    n: int
    splits: int

    def attend(self, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        backend, spec, n, splits = self.backend, self.backend.spec, self.n, self.splits
        state = backend.state
        backend.rope_store(index, layer, qkv, state.position, None)
        out = qkv.new_empty(n, spec.num_heads * spec.head_dim)
        parts = (n, spec.num_heads, splits)
        partial = torch.empty((*parts, spec.head_dim), dtype=torch.float32, device=qkv.device) if splits > 1 else out
        peak, total = (torch.empty(parts, dtype=torch.float32, device=qkv.device) for _ in range(2))
        dim_block = max(16, _next_power(spec.head_dim))
        single = qkv.dtype == torch.float32
        tokens_at_once = 8192 // dim_block // (4 if single else 1)
        decode_attention_kernel[(n, spec.num_kv_heads, splits)](
            qkv, state.position, state.done.view(torch.uint8), backend.table, index, out, partial, peak, total,
            spec.head_dim**-0.5 * math.log2(math.e), spec.num_heads, spec.num_kv_heads, spec.head_dim, dim_block,
            max(16, _next_power(spec.num_heads // spec.num_kv_heads)), max(16, tokens_at_once), splits,
            "ieee" if single else "tf32", num_warps=4,
        )  # fmt: skip
        if splits > 1:
            combine_splits_kernel[(n * spec.num_heads,)](
                partial, peak, total, out, spec.head_dim, dim_block, splits, num_warps=1
            )
        return out
