"""Tokens from logits, with random numbers that depend on nothing but the sample and the position.

A token is drawn in two levels: first a block of the vocabulary in proportion to its mass, then a token of that block.
That needs the exponentials of a row once, and a running sum over one block only; and two uniform numbers of 24 bits
resolve probabilities far below 2**-24.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core.rollout_engine.api import SamplingParams

BLOCK = 4096  # tokens of the vocabulary that are summed as one
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRule:
    """The part of `SamplingParams` that all rows of a decode step share."""

    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingRule:
        stop = () if params.ignore_eos else tuple(sorted(set(params.stop_token_ids)))
        if params.temperature == 0:
            return cls(0.0, -1, 1.0, stop)
        return cls(params.temperature, params.top_k, params.top_p, stop)

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


def sample(logits: Tensor, keys: Tensor, positions: Tensor, rule: SamplingRule) -> tuple[Tensor, Tensor]:
    """One token a row.

    Args:
        logits: float32 [n, vocab]; may be overwritten.
        keys: int64 [n], from `stream_key`.
        positions: int64 [n], position of the token before the one drawn.
    Returns:
        (tokens int64 [n], log-probs float32 [n]). Log-probs are of the whole distribution at the rule's temperature, at 1
        when that is 0: top_k and top_p change which tokens can come, not their log-probs. A row with a logit that is not a
        number gives some token of the vocabulary and the log-prob NaN, which `requests.check_finite` finds.
    """
    if rule.temperature == 0:
        best, tokens = logits.max(dim=-1)
        return tokens, best - logits.logsumexp(dim=-1)
    if rule.temperature != 1:
        logits = logits.mul_(1.0 / rule.temperature)
    peak = logits.amax(dim=-1, keepdim=True)
    mass = _padded_exp(logits, peak)
    log_total = mass.sum(dim=(1, 2)).log()
    if rule.truncates:
        flat = mass.view(len(mass), -1)
        flat.masked_fill_(flat < mass_threshold(flat, rule.top_k, rule.top_p), 0.0)
    first, second = uniforms(keys, positions)
    block = _draw(mass.sum(dim=2), first)
    rows = torch.arange(len(mass), device=mass.device)
    tokens = block * mass.shape[2] + _draw(mass[rows, block], second)
    tokens = tokens.clamp_(max=logits.shape[1] - 1)  # NaN mass leads into the padding of the last block
    log_probs = logits.gather(1, tokens[:, None]) - peak
    return tokens, log_probs[:, 0] - log_total


def mass_threshold(mass: Tensor, top_k: int, top_p: float) -> Tensor:
    """The smallest mass that top_k and then top_p keep.

    top_k keeps the k largest; top_p, of what is left, the smallest set of largest masses that holds the share top_p.
    Masses equal to the threshold are all kept.

    Args:
        mass: [n, vocab], not negative. top_k: below 1 keeps all. top_p: 1 keeps all.
    Returns: [n, 1].
    """
    vocab = mass.shape[1]
    if 0 < top_k < vocab and top_p >= 1.0:
        return mass.topk(top_k, dim=-1).values[:, -1:]
    ordered = mass.topk(top_k, dim=-1).values if 0 < top_k < vocab else mass.sort(dim=-1, descending=True).values
    running = ordered.cumsum(dim=-1)
    wanted = top_p * running[:, -1:]
    kept = (running < wanted).sum(dim=-1, keepdim=True).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, kept)


def stream_key(seed: int, stream: int, sample_index: int) -> int:
    """The random stream of one sample as a signed 64-bit number."""
    key = 0
    for part in (seed, stream, sample_index):
        key = _mix((key + (part + 1) * _GOLDEN) & _MASK)
    return key - (1 << 64) if key >> 63 else key


def uniforms(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent uniform numbers in [0, 1) for each (key, position): float32, multiples of 2**-24.

    The SplitMix64 generator (Steele, Lea and Flood 2014) with the key as its state, read at the position.
    """
    z = keys + (positions + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    scale = 2.0**-24
    return _shift(z, 40).float() * scale, (_shift(z, 16) & 0xFFFFFF).float() * scale


def _padded_exp(logits: Tensor, peak: Tensor) -> Tensor:
    """exp(logits - peak) as [n, blocks, block size]; the tail of the last block is 0."""
    n, vocab = logits.shape
    size = min(BLOCK, vocab)
    blocks = -(-vocab // size)
    mass = logits.new_empty(n, blocks * size)
    torch.sub(logits, peak, out=mass[:, :vocab])
    mass[:, :vocab].exp_()
    mass[:, vocab:] = 0.0
    return mass.view(n, blocks, size)


def _draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """Index of each row in proportion to mass [n, m] by inverting its running sum: int64 [n]."""
    running = mass.cumsum(dim=-1)
    total = running[:, -1]
    # Rounding must not lift the target to the total: the answer is the first running sum above the target.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    # No running sum is above a target of NaN: the clamp keeps the index one that can be read, on a GPU too.
    return torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp_(max=mass.shape[1] - 1)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
