"""Log-probabilities and entropy straight from hidden states, chunk by chunk.

The logits of a chunk live only while that chunk is worked on, in the forward and again in the backward pass: memory is
O(chunk x vocabulary), never O(tokens x vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Logits that live at once. A GPU wants chunks large enough that adding up the weight's gradient costs little beside them.
LOGITS_PER_CHUNK = {"cpu": 2**26, "cuda": 2**29}


def _chunk_size(weight: Tensor) -> int:
    return max(64, LOGITS_PER_CHUNK[weight.device.type] // weight.shape[0])


def _forward_chunk(logits: Tensor, labels: Tensor, inverse_temperature: float, with_entropy: bool):
    scaled = logits.float() * inverse_temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    log_probs = scaled.gather(1, labels[:, None]).squeeze(1) - normaliser
    if not with_entropy:
        return log_probs, normaliser, log_probs
    log_p = scaled - normaliser[:, None]
    entropy = -(torch.exp(log_p) * log_p).sum(-1)
    return log_probs, normaliser, entropy


def _backward_chunk(
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    inverse_temperature: float,
    with_entropy: bool,
) -> Tensor:
    """Gradient of the chunk's logits: d log p_y / dz = (1[y] - p) / T and dH / dz = -p (log p + H) / T."""
    log_p = logits.float() * inverse_temperature - normaliser[:, None]
    p = torch.exp(log_p)
    grad = -p * grad_log_probs[:, None]
    if with_entropy:
        grad = grad - p * (log_p + entropy[:, None]) * grad_entropy[:, None]
    if logits.is_cuda:  # a comparison fuses with the rest; a scatter would be a pass of its own over the logits
        is_label = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) == labels.int()[:, None]
        grad = grad + torch.where(is_label, grad_log_probs[:, None], 0.0)
    else:
        grad = grad.scatter_add(1, labels[:, None], grad_log_probs[:, None])
    return (grad * inverse_temperature).to(logits.dtype)


def _statistics_chunk(logits: Tensor, labels: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and sums of squared probabilities, in the order in which the compiler reads the logits once."""
    scaled = logits.float() * inverse_temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    log_p = scaled - normaliser[:, None]
    p = torch.exp(log_p)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(p * log_p).sum(-1), (p * p).sum(-1)


_compiled: dict[str, object] = {}


def _kernel(name: str, compiled: bool):
    plain = {"forward": _forward_chunk, "backward": _backward_chunk, "statistics": _statistics_chunk}[name]
    if not compiled:
        return plain
    if name not in _compiled:
        _compiled[name] = _for_any_chunk(torch.compile(plain))
    return _compiled[name]


def _for_any_chunk(kernel):
    """Compile once for any number of rows, but for this vocabulary: a division by a size known only at run time, to find
    each number's row, costs several times what the kernel computes."""

    def call(logits: Tensor, *rest):
        for tensor in (logits, *rest):
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_dynamic(tensor, 0)
        return kernel(logits, *rest)

    return call


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, inverse_temperature, with_entropy, compiled):
        chunk = _chunk_size(weight)
        kernel = _kernel("forward", compiled)
        parts = [
            kernel(h @ weight.t(), y, inverse_temperature, with_entropy)
            for h, y in zip(hidden.split(chunk), labels.split(chunk))
        ]
        log_probs, normaliser, entropy = (torch.cat(p) for p in zip(*parts))
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.options = (chunk, inverse_temperature, with_entropy, compiled)
        return log_probs, entropy if with_entropy else torch.zeros_like(log_probs)

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        chunk, inverse_temperature, with_entropy, compiled = ctx.options
        kernel = _kernel("backward", compiled)
        grad_hidden = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]  # not where adapters alone are
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if trained else None
        for start in range(0, hidden.shape[0], chunk):
            at = slice(start, start + chunk)
            h = hidden[at]
            grad_logits = kernel(
                h @ weight.t(),
                labels[at],
                normaliser[at],
                entropy[at],
                grad_log_probs[at],
                grad_entropy[at],
                inverse_temperature,
                with_entropy,
            )
            grad_hidden[at] = grad_logits @ weight
            if grad_weight is None:
                continue
            if grad_weight.dtype == grad_logits.dtype:
                grad_weight.addmm_(grad_logits.t(), h)
            else:
                grad_weight += grad_logits.t() @ h
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of its distribution, under softmax(hidden @ weight.T / temperature).

    Differentiable in hidden and weight, for both results.

    Args:
        hidden: [N, H]. weight: [V, H], same dtype. labels: int64 [N].
        temperature: above 0. with_entropy: else the second result is zeros.
        compiled: fuse the work on a chunk's logits with torch.compile (on a GPU).

    Returns:
        (log_probs, entropy), float32 [N], in nats.
    """
    if hidden.shape[0] == 0:
        empty = hidden.float().sum(-1)
        return empty, empty
    return _LinearLogProb.apply(hidden, weight, labels, 1.0 / temperature, with_entropy, compiled)


@torch.no_grad()
def linear_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, *, compiled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As `linear_log_probs` without gradient: (log_probs, entropy, sum_v p_v^2), float32 [N].

    The third is the probability that two draws from a token's distribution are equal.
    """
    if hidden.shape[0] == 0:
        empty = hidden.float().sum(-1)
        return empty, empty, empty
    chunk, kernel = _chunk_size(weight), _kernel("statistics", compiled)
    parts = [kernel(h @ weight.t(), y, 1.0 / temperature) for h, y in zip(hidden.split(chunk), labels.split(chunk))]
    log_probs, entropy, squared = (torch.cat(p) for p in zip(*parts))
    return log_probs, entropy, squared
