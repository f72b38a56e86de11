"""Padding-free batches: samples laid end to end, a shared prompt once, and how a batch splits into bounded micro-batches."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verl.core.model_engine.prompt_sharing import SharedPrompts
from verl.data.batch import Ragged, SampleBatch, copy_to, ranges


@dataclass(frozen=True)
class PackedLayout:
    """Where each of B sequences lies in T packed tokens.

    lengths: int64 [B] on the CPU. cu_seqlens: int32 [B + 1] on the device, of the sequences laid end to end. max_length:
    of the longest sequence.

    Sequences that begin with the same prompt may share its tokens. Then, both int64 on the device, `index` [lengths.sum()]
    says which packed token each token of the sequences is, and `source` [T] says from which token of the sequences each
    packed token takes its attention output. None: nothing is shared, and the packed tokens are the sequences' own.
    shared: how a variable-length kernel reads the shared tokens; None where there is no such kernel, or nothing shared.
    """

    lengths: Tensor
    cu_seqlens: Tensor
    max_length: int
    index: Tensor | None = None
    source: Tensor | None = None
    shared: SharedPrompts | None = None

    @classmethod
    def make(
        cls,
        lengths: Tensor,
        device: torch.device | str,
        index: Tensor | None = None,
        source: Tensor | None = None,
        shared: SharedPrompts | None = None,
    ) -> PackedLayout:
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        on_device = (None if x is None else copy_to(x, device) for x in (cu_seqlens, index, source))
        cu_seqlens, index, source = on_device
        return cls(lengths, cu_seqlens, int(lengths.max()), index, source, shared)

    @cached_property
    def padding(self) -> PaddingPlan:
        """How to pad the sequences for attention without a variable-length kernel; the same for every layer."""
        return PaddingPlan.make(self)


@dataclass(frozen=True)
class PaddingPlan:
    """Sequences of like length side by side, padded on the right.

    gathers: for each group an int64 [B_g, W_g], the packed token at each place (in the padding, the sequence's first one).
    take: int64 [T], where each packed token stands among the places of all groups.
    """

    gathers: list[Tensor]
    take: Tensor

    @classmethod
    def make(cls, layout: PackedLayout) -> PaddingPlan:
        device = layout.cu_seqlens.device
        starts = layout.lengths.cumsum(0) - layout.lengths
        place = torch.empty(int(layout.lengths.sum()), dtype=torch.int64)
        gathers, before = [], 0
        for members in length_groups(layout.lengths):
            lengths, first = layout.lengths[members], starts[members][:, None]
            width = int(lengths.max())
            offsets = torch.arange(width)
            valid = offsets < lengths[:, None]
            gather = torch.where(valid, first + offsets, first)
            place[gather[valid]] = before + valid.flatten().nonzero().squeeze(1)
            gathers.append(gather.to(device))
            before += gather.numel()
        take = place.to(device)
        if layout.index is not None and layout.source is not None:
            gathers = [layout.index[g] for g in gathers]
            take = take[layout.source]
        return cls(gathers, take)


def length_groups(lengths: Tensor) -> list[Tensor]:
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
    def make(cls, batch: SampleBatch, device: torch.device | str, *, share_prompts: bool = False) -> PackedInputs:
        """Pack `prompt_ids` and `response_ids` of every sample.

        A prompt [7, 8] with response [9, 2] gives input_ids [7, 8, 9], position_ids [0, 1, 2], target_positions [1, 2]
        and labels [9, 2].

        share_prompts: samples with equal prompts have it once, where the first of them stands. All but the attention
        product then runs on it once; what the model gives, and its gradient, stay the same. A second response [5, 3] to
        that prompt gives input_ids [7, 8, 9, 5], position_ids [0, 1, 2, 2] and target_positions [1, 2, 1, 3].
        """
        prompts, responses = batch["prompt_ids"], batch["response_ids"]
        fed = (responses.lengths - 1).clamp(min=0)
        owner = prompt_owners(prompts) if share_prompts else torch.arange(len(batch))
        is_first = owner == torch.arange(len(batch))
        own = prompts.lengths * is_first
        base = (own + fed).cumsum(0) - (own + fed)

        lengths = prompts.lengths + fed
        starts = lengths.cumsum(0) - lengths
        ids = torch.empty(int(lengths.sum()), dtype=torch.int64)
        ids[ranges(starts, prompts.lengths)] = prompts.values.cpu()
        first_response = responses.lengths.cumsum(0) - responses.lengths
        ids[ranges(starts + prompts.lengths, fed)] = responses.values.cpu()[ranges(first_response, fed)]
        position_ids = ranges(torch.zeros_like(lengths), lengths)
        targets = ranges(starts + prompts.lengths - 1, responses.lengths)

        index = source = None
        if not bool(is_first.all()):
            parts = torch.stack((prompts.lengths, fed), dim=1).flatten()
            index = ranges(torch.stack((base[owner], base + own), dim=1).flatten(), parts)
            owned = torch.stack((is_first, torch.ones_like(is_first)), dim=1).flatten()
            source = owned.repeat_interleave(parts).nonzero().squeeze(1)
            ids, position_ids, targets = ids[source], position_ids[source], index[targets]
        kernel = index is not None and torch.device(device).type == "cuda"
        shared = SharedPrompts.make(own + fed, lengths, index, device) if kernel else None
        layout = PackedLayout.make(lengths, device, index, source, shared)
        ids, position_ids, targets, labels = (
            copy_to(x, device) for x in (ids, position_ids, targets, responses.values)
        )
        return cls(ids, position_ids, layout, targets, labels)

    @classmethod
    def blank(cls, device: torch.device | str) -> PackedInputs:
        """The smallest sample, for a rank that has none left while others still have; its result counts for nothing."""
        token = Ragged.from_rows([[0]])
        return cls.make(SampleBatch({"prompt_ids": token, "response_ids": token}), device)


def prompt_owners(prompts: Ragged) -> Tensor:
    """For each row the number of the first row equal to it: int64 [B].

    >>> prompt_owners(Ragged.from_rows([[7, 8], [5], [7, 8]])).tolist()
    [0, 1, 0]
    """
    values = prompts.values.cpu().numpy()
    first: dict[bytes, int] = {}
    owners, start = [], 0
    for number, length in enumerate(prompts.lengths.tolist()):
        owners.append(first.setdefault(values[start : start + length].tobytes(), number))
        start += length
    return torch.tensor(owners, dtype=torch.int64)


def split_by_count(num_samples: int, size: int) -> list[Tensor]:
    """Consecutive index groups of at most `size` samples."""
    return list(torch.arange(num_samples).split(size))


def split_by_tokens(token_counts: Tensor, max_tokens: int) -> list[Tensor]:
    """Index groups whose tokens sum to at most `max_tokens`, as few and as even as a greedy rule makes them.

    Longest sample first, each to the group with the fewest tokens so far. A sample longer than `max_tokens` gets a group
    of its own. Indices within a group ascend.

    Args:
        token_counts: int64 [B]. max_tokens: budget.
    """
    counts = token_counts.tolist()
    order = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    fitting = sum(c for c in counts if c <= max_tokens)
    fewest = max(sum(c > max_tokens for c in counts) + -(-fitting // max_tokens), 1)
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


def split_sharing_prompts(batch: SampleBatch, max_tokens: int) -> list[Tensor]:
    """As `split_by_tokens`, but with the samples of a prompt kept together and the prompt's tokens counted once.

    The samples of a prompt whose tokens exceed `max_tokens` are divided, and each part counts the prompt.
    """
    prompts, responses = batch["prompt_ids"].lengths.tolist(), batch["response_ids"].lengths.tolist()
    units: list[list[int]] = []
    costs: list[int] = []
    unit_of: dict[int, int] = {}
    for sample, owner in enumerate(prompt_owners(batch["prompt_ids"]).tolist()):
        unit = unit_of.get(owner)
        if unit is None or costs[unit] + responses[sample] > max_tokens:
            unit = unit_of[owner] = len(units)
            units.append([])
            costs.append(prompts[sample])
        units[unit].append(sample)
        costs[unit] += responses[sample]
    groups = split_by_tokens(torch.tensor(costs), max_tokens)
    return [torch.tensor(sorted(i for unit in group.tolist() for i in units[unit])) for group in groups]
