"""Attention over samples that share their prompt's tokens, for a kernel that takes sequences of different lengths.

The packed tokens of a sample that does not own its prompt are its response's alone. They are its queries as they stand:
a kernel whose causal mask is aligned at the end of both lets the queries [response] see the keys [prompt, response]. Only
keys and values are laid out once a sample, and their gradients added up again; they are the small part under grouped-query
attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.data.batch import copy_to


@dataclass(frozen=True)
class SharedPrompts:
    """How B' sequences (those with at least one query) read T packed tokens; all tensors on the device.

    cu_queries, cu_keys: int32 [B' + 1]. max_queries, max_keys: of a sequence. index: int64 [K], the packed token of each
    key. Tokens that are the key of several sequences: `rows` int64 [S], and in `uses` int64 [S, M] the keys that each of
    them is, with `counts` bool [S, M] where not all are M. first: int64 [T], the first key that each packed token is.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    index: Tensor
    first: Tensor
    rows: Tensor
    uses: Tensor
    counts: Tensor | None

    @classmethod
    def make(cls, queries: Tensor, keys: Tensor, index: Tensor, device: torch.device | str) -> SharedPrompts:
        """From the number of queries and of keys of each sequence [B], and the packed token of each key [keys.sum()].

        Two samples of the prompt [a, b] with responses [c] and [d] are packed as [a, b, c, d]: queries [3, 1], keys [3, 3]
        and index [0, 1, 2, 0, 1, 3] give rows [0, 1] and uses [[0, 3], [1, 4]].
        """
        asks = queries > 0  # a response of one token has nothing to feed, and then its keys have no reader
        index = index[asks.repeat_interleave(keys)]
        queries, keys = queries[asks], keys[asks]
        order = index.argsort(stable=True)
        uses = torch.bincount(index)
        begins = uses.cumsum(0) - uses
        rows = (uses > 1).nonzero().squeeze(1)
        most = int(uses.max())
        nth = torch.arange(most)
        table = order[begins[rows, None] + torch.minimum(nth, uses[rows, None] - 1)]
        counts = None if bool((uses[rows] == most).all()) else nth < uses[rows, None]
        cu_queries, cu_keys, index, first, rows, table = (
            copy_to(x, device) for x in (_cumulated(queries), _cumulated(keys), index, order[begins], rows, table)
        )
        longest = (int(queries.max()), int(keys.max()))
        counts = None if counts is None else copy_to(counts, device)
        return cls(cu_queries, cu_keys, *longest, index, first, rows, table, counts)

    def keys_of(self, packed: Tensor) -> Tensor:
        """Keys or values of all sequences: packed [T, ...] -> [K, ...]. Its gradient adds up what each token's uses get."""
        return _Repeat.apply(packed, self)


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))


class _Repeat(torch.autograd.Function):
    """A gather whose backward is a gather too: adding into rows with atomics is several times slower on a GPU."""

    @staticmethod
    def forward(ctx, packed: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return packed.index_select(0, shared.index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        shared: SharedPrompts = ctx.shared
        out = grad.index_select(0, shared.first)
        parts = grad.index_select(0, shared.uses.flatten()).unflatten(0, shared.uses.shape)
        if shared.counts is not None:
            parts = parts * shared.counts.view(*shared.counts.shape, *[1] * (grad.ndim - 1))
        total = parts.sum(1, dtype=torch.promote_types(grad.dtype, torch.float32))
        return out.index_copy_(0, shared.rows, total.to(grad.dtype)), None
