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

NAME = "packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: PackedLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function in transformers' signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    if packing is None:
        raise ValueError("packed attention needs the layout: call the model with packing=PackedLayout.make(...)")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < packing.max_length else None
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        out = _flash(q, k, v, packing, scaling, window)
    else:
        out = _by_length_groups(q, k, v, packing, scaling, window)
    return out.unsqueeze(0), None


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    cu, longest = packing.cu_seqlens, packing.max_length
    return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest, **options)


def _by_length_groups(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    starts = packing.lengths.cumsum(0) - packing.lengths
    groups = _length_groups(packing.lengths)
    outputs, places = [], []
    for members in groups:
        lengths = packing.lengths[members]
        width = int(lengths.max())
        offsets = torch.arange(width)
        valid = offsets < lengths[:, None]
        gather = torch.where(valid, starts[members][:, None] + offsets, starts[members][:, None])
        on_device = gather.flatten().to(q.device)
        padded = [x.index_select(0, on_device).unflatten(0, gather.shape).transpose(1, 2) for x in (q, k, v)]
        out = _padded_causal(*padded, scale=scale, window=window).transpose(1, 2).flatten(0, 1)
        outputs.append(out.index_select(0, valid.flatten().nonzero().squeeze(1).to(q.device)))
        places.append(gather[valid])
    if len(outputs) == 1 and len(groups[0]) == len(packing.lengths):
        return outputs[0]
    order = torch.cat(places).argsort().to(q.device)
    return torch.cat(outputs).index_select(0, order)


def _padded_causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None) -> Tensor:
    """q [B, Hq, W, D], k and v [B, Hkv, W, D], right-padded -> [B, Hq, W, D]."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < window), scale=scale)


def _length_groups(lengths: Tensor) -> list[Tensor]:
    """Sequences in groups of like length, so that padding within a group stays under about a third.

    Groups under 2,048 padded tokens are not worth a call of their own. The first group of a single one keeps the order.
    """
    longest = int(lengths.max())
    if len(lengths) * longest <= max(2048, 1.5 * float(lengths.sum())):
        return [torch.arange(len(lengths))]
    order = lengths.argsort(stable=True)
    groups: list[Tensor] = []
    first = 0
    ordered = lengths[order].tolist()
    for end in range(1, len(ordered) + 1):
        full = end < len(ordered) and ordered[end] > 1.5 * ordered[first]
        if end == len(ordered) or (full and (end - first) * ordered[end - 1] >= 2048):
            groups.append(order[first:end])
            first = end
    return groups


AttentionInterface.register(NAME, packed_attention)
