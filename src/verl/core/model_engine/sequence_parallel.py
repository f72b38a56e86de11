"""Ulysses sequence parallelism (arXiv:2309.14509): neighbouring ranks share the tokens of a micro-batch.

Every layer runs on a rank's own tokens, but for the attention product, which needs whole sequences: an all-to-all before it
gives each rank all tokens of its share of the heads, and one after it gives the tokens back with all heads. Log-probs and
values are computed where their tokens are, and put together, so that the loss of each rank is that of the whole micro-batch.
Its gradient goes back through the rank's own tokens alone: the sum over ranks is the gradient, counted once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from verl.core.model_engine.packing import PackedInputs
from verl.errors import ConfigError

KEY = "ulysses_sequence_parallel_size"


def check_heads(config, size: int, section: str) -> None:
    """Raise ConfigError if the attention heads of a model cannot be shared evenly by `size` ranks."""
    heads = getattr(config, "num_attention_heads", size)
    if heads % size:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"{section}.fsdp_config.{KEY}={size} does not divide the {heads} attention heads of the model. Sizes that do: "
            f"{fits}."
        )


class SequenceGroup:
    """The ranks that share each micro-batch. rank, size: within it."""

    def __init__(self, device: torch.device, size: int):
        """Every rank of the default group calls this; neighbours, which tend to be on one machine, come together."""
        world = dist.get_world_size()
        mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("data", "sequence"))
        self.group, self.size = mesh.get_group("sequence"), size
        self.rank = mesh.get_local_rank("sequence")

    def part(self, inputs: PackedInputs) -> SequencePart:
        """This rank's part of a micro-batch: as many tokens as on the others, the last ones filled up."""
        tokens = len(inputs.input_ids)
        width = -(-tokens // self.size)
        start = self.rank * width
        ids, positions = (_cut(x, start, width) for x in (inputs.input_ids, inputs.position_ids))
        place = inputs.target_positions - start
        own = ((place >= 0) & (place < width)).nonzero().squeeze(1)
        place, labels = place[own], inputs.labels[own]
        if len(own) == 0:  # one that counts for nothing, so that every rank's gradient has the same parts
            place, labels = place.new_zeros(1), labels.new_zeros(1)
        return SequencePart(self, tokens, ids, positions, len(inputs.labels), own, place, labels)


@dataclass(frozen=True)
class SequencePart:
    """One rank's part of a micro-batch of T packed tokens with N targets.

    input_ids, position_ids: int64 [W], W x ranks >= T. own: int64 [n], which of the N targets are here; target_positions,
    labels: int64 [max(n, 1)], where among the W tokens they are, and what they are.
    """

    sequence: SequenceGroup
    tokens: int
    input_ids: Tensor
    position_ids: Tensor
    num_targets: int
    own: Tensor
    target_positions: Tensor
    labels: Tensor

    @torch.compiler.disable
    def all_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Own tokens [W, H, D] of each of q, k, v to all tokens of own heads: [T, H / ranks, D].

        Fewer key heads than ranks, or a number that ranks do not divide: they are repeated as often as it takes.
        """
        size = self.sequence.size
        repeat = size // math.gcd(k.shape[1], size)
        if repeat > 1:
            k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        blocks = torch.cat([x.unflatten(1, (size, -1)) for x in (q, k, v)], dim=2)  # [W, ranks, heads of a rank, D]
        whole = _exchange(blocks.transpose(0, 1), self.sequence.group).flatten(0, 1)[: self.tokens]
        return whole.split([x.shape[1] // size for x in (q, k, v)], dim=1)

    @torch.compiler.disable
    def all_heads(self, out: Tensor) -> Tensor:
        """All tokens of own heads [T, H / ranks, D] to own tokens of all heads [W, H, D]."""
        size, width = self.sequence.size, len(self.input_ids)
        whole = F.pad(out, (0, 0, 0, 0, 0, size * width - self.tokens))
        return _exchange(whole.unflatten(0, (size, width)), self.sequence.group).transpose(0, 1).flatten(1, 2)

    def all_targets(self, values: Tensor) -> Tensor:
        """Values of own targets [max(n, 1), ...] to those of all N targets; each rank's gradient is that of its own."""
        return _Together.apply(values[: len(self.own)], self.own, self.num_targets, self.sequence.group)


def _cut(tokens: Tensor, start: int, width: int) -> Tensor:
    """Tokens start to start + width, zeros beyond the last one."""
    part = tokens[start : start + width]
    return F.pad(part, (0, width - len(part)))


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: block i to rank i of the group; gives the blocks that the ranks sent here, by rank."""
    return _Exchange.apply(blocks, group)


class _Exchange(torch.autograd.Function):
    """An all-to-all, which is its own reverse."""

    @staticmethod
    def forward(ctx, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(blocks, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros((count, *values.shape[1:])).index_copy_(0, own, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None
