"""Causal attention within each packed sequence, registered with transformers as `attn_implementation="packed"`.

On a GPU in half precision: torch's own variable-length flash attention, forward and backward. Elsewhere: sequences of
like length are padded together for the attention product alone (padding on the right of a causal product changes nothing
and its rows are dropped), while every other layer still runs on packed tokens.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verl.core.model_engine.packing import PackedLayout
from verl.core.model_engine.sequence_parallel import SequencePart

NAME = "packed"
SHORT = 64
"""Up to this length scores written out are faster on a CPU than a flash kernel, forward and backward together."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: PackedLayout | None = None,
    part: SequencePart | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function in transformers' signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].

    part: with sequence parallelism, which of the layout's tokens these are.
    """
    if packing is None:
        raise ValueError("packed attention needs the layout: call the model with packing=PackedLayout.make(...)")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if part is not None:
        q, k, v = part.all_tokens(q, k, v)
    window = sliding_window if sliding_window is not None and sliding_window < packing.max_length else None
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        out = _flash(q, k, v, packing, scaling, window)
    else:
        out = _by_length_groups(q, k, v, packing, scaling, window)
    return (out if part is None else part.all_heads(out)).unsqueeze(0), None


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu = (packing.cu_seqlens, packing.cu_seqlens)
    longest = (packing.max_length, packing.max_length)
    if (shared := packing.shared) is not None:
        k, v = shared.keys_of(k), shared.keys_of(v)
        cu, longest = (shared.cu_queries, shared.cu_keys), (shared.max_queries, shared.max_keys)
    options: dict = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), *cu, *longest, **options)


def _by_length_groups(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    outputs = []
    for gather in packing.padding.gathers:
        padded = [x.index_select(0, gather.flatten()).unflatten(0, gather.shape) for x in (q, k, v)]
        attend = _short_causal if gather.shape[1] <= SHORT else _padded_causal
        outputs.append(attend(*padded, scale=scale, window=window).flatten(0, 1))
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together.index_select(0, packing.padding.take)


def _padded_causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None) -> Tensor:
    """q [B, W, Hq, D], k and v [B, W, Hkv, D], right-padded -> [B, W, Hq, D]."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    mask = _visible(q.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def _short_causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None) -> Tensor:
    """As `_padded_causal`, with the scores written out: for short rows the blocks of a flash kernel cost more than that.

    The query heads that share a key head go into one product with it.
    """
    batch, width, heads, size = q.shape
    key_heads = k.shape[2]
    repeat = heads // key_heads
    q = q * (size**-0.5 if scale is None else scale)
    q = q.unflatten(2, (key_heads, repeat)).permute(0, 2, 3, 1, 4).reshape(batch * key_heads, repeat * width, size)
    k, v = (x.transpose(1, 2).reshape(batch * key_heads, width, size) for x in (k, v))
    hidden = torch.zeros(width, width, dtype=q.dtype, device=q.device)
    hidden.masked_fill_(~_visible(width, window, q.device), float("-inf"))
    weights = (q @ k.transpose(1, 2) + hidden.repeat(repeat, 1)).softmax(-1)
    out = (weights @ v).view(batch, key_heads, repeat, width, size)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, width, heads, size)


def _visible(width: int, window: int | None, device: torch.device) -> Tensor:
    """Whether a query (row) sees a key (column): bool [width, width]."""
    position = torch.arange(width, device=device)
    distance = position[:, None] - position[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)
