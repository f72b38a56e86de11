"""Padding-free batches: samples laid end to end, and how a batch splits into micro-batches of bounded size."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.data.batch import SampleBatch, ranges


@dataclass(frozen=True)
class PackedLayout:
    """Where each of B sequences lies in T packed tokens.

    lengths: int64 [B] on the CPU. cu_seqlens: int32 [B + 1] on the device. max_length: of the longest sequence.
    """

    lengths: Tensor
    cu_seqlens: Tensor
    max_length: int

    @classmethod
    def make(cls, lengths: Tensor, device: torch.device | str) -> PackedLayout:
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        return cls(lengths, cu_seqlens.to(device, non_blocking=True), int(lengths.max()))


@dataclass(frozen=True)
class PackedInputs:
    """Model inputs of B samples (prompt then response, without the last token, which predicts nothing).

    input_ids, position_ids: int64 [T]. layout: of the T tokens. target_positions: int64 [N], the index in T of the hidden
    state that predicts each of the N response tokens (and at which its value is read). labels: int64 [N], those tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    target_positions: Tensor
    labels: Tensor

    @classmethod
    def make(cls, batch: SampleBatch, device: torch.device | str) -> PackedInputs:
        """Pack `prompt_ids` and `response_ids` of every sample.

        A prompt [7, 8] with response [9, 2] gives input_ids [7, 8, 9], position_ids [0, 1, 2], target_positions [1, 2]
        and labels [9, 2].
        """
        prompts, responses = batch["prompt_ids"], batch["response_ids"]
        total = prompts.lengths + responses.lengths
        whole = torch.empty(int(total.sum()), dtype=torch.int64)
        starts = total.cumsum(0) - total
        whole[ranges(starts, prompts.lengths)] = prompts.values.cpu()
        whole[ranges(starts + prompts.lengths, responses.lengths)] = responses.values.cpu()

        lengths = (total - 1).clamp(min=1)
        packed_starts = lengths.cumsum(0) - lengths
        input_ids = whole[ranges(starts, lengths)]
        position_ids = ranges(torch.zeros_like(lengths), lengths)
        targets = ranges(packed_starts + prompts.lengths - 1, responses.lengths)
        on = {"device": device, "non_blocking": True}
        return cls(
            input_ids.to(**on),
            position_ids.to(**on),
            PackedLayout.make(lengths, device),
            targets.to(**on),
            responses.values.to(**on),
        )


def split_by_count(num_samples: int, size: int) -> list[Tensor]:
    """Consecutive index groups of at most `size` samples."""
    return list(torch.arange(num_samples).split(size))


def split_by_tokens(token_counts: Tensor, max_tokens: int, min_groups: int = 1) -> list[Tensor]:
    """Index groups whose tokens sum to at most `max_tokens`, as few and as even as a greedy rule makes them.

    Longest sample first, each to the group with the fewest tokens so far. A sample longer than `max_tokens` gets a group
    of its own. Indices within a group ascend.

    Args:
        token_counts: int64 [B]. max_tokens: budget. min_groups: at least this many groups (where there are that many
            samples), so that ranks that must step together can agree on a number.
    """
    counts = token_counts.tolist()
    order = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    fitting = sum(c for c in counts if c <= max_tokens)
    fewest = max(min_groups, sum(c > max_tokens for c in counts) + -(-fitting // max_tokens), 1)
    for num_groups in range(min(fewest, len(counts)), len(counts) + 1):
        heap = [(0, g) for g in range(num_groups)]
        groups: list[list[int]] = [[] for _ in range(num_groups)]
        fits = True
        for i in order:
            tokens, g = heapq.heappop(heap)
            if tokens and tokens + counts[i] > max_tokens:
                fits = False
                break
            groups[g].append(i)
            heapq.heappush(heap, (tokens + counts[i], g))
        if fits:
            return [torch.tensor(sorted(g), dtype=torch.int64) for g in groups if g]
    return [torch.tensor([i]) for i in range(len(counts))]
