"""How token losses become one number.

The four modes are per-token weights, computed once for a whole mini-batch. The loss of any part of it is
`(weights * token_loss).sum()`, and the parts' losses and gradients add up to the mini-batch's, however it was split
into micro-batches, ranks or slices of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.segments import check_lengths, expand, segment_count

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def loss_weights(
    mask: Tensor,
    lengths: Tensor,
    mode: str,
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Weight of each token's loss: float32 [N], 0 at masked tokens.

    Args:
        mask: bool [N], True where the policy chose the token. lengths: int64 [B].
        mode: with T policy tokens and S samples that have any, and l the sample's own policy tokens
            token-mean: 1 / T; every token counts the same (DAPO, Yu et al. 2025, arXiv 2503.14476)
            seq-mean-token-sum: 1 / S
            seq-mean-token-mean: 1 / (S l); every sample counts the same (GRPO, Shao et al. 2024, arXiv 2402.03300)
            seq-mean-token-sum-norm: 1 / (S scale) (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)
        num_tokens, num_sequences: T and S of the whole mini-batch, where these samples are one rank's part of it;
            None: these samples are all. Ranks whose gradients are averaged, not added, multiply by their number.
        scale: seq-mean-token-sum-norm's divisor, in tokens: a fixed length, so that the loss does not depend on the
            longest response at hand.

    A sample without policy tokens has weight 0 and is not counted.

    >>> m, l = torch.tensor([True, True, False, True]), torch.tensor([3, 1])
    >>> loss_weights(m, l, "seq-mean-token-mean").tolist()
    [0.25, 0.25, 0.0, 0.5]
    """
    check_lengths(mask, lengths, "mask")
    if mode not in MODES:
        raise ValueError(f"unknown loss aggregation '{mode}'. Allowed: {', '.join(MODES)}")
    counts = segment_count(mask, lengths).to(torch.float64)
    tokens = float(counts.sum()) if num_tokens is None else num_tokens
    sequences = float((counts > 0).sum()) if num_sequences is None else num_sequences
    if mode == "token-mean":
        per_sample = torch.full_like(counts, 1 / max(tokens, 1))
    else:
        per_sample = torch.full_like(counts, 1 / max(sequences, 1))
        if mode == "seq-mean-token-mean":
            per_sample = per_sample / counts.clamp(min=1)
        elif mode == "seq-mean-token-sum-norm":
            if scale is None or scale <= 0:
                raise ValueError(f"seq-mean-token-sum-norm needs a scale above 0 (a length in tokens), not {scale}")
            per_sample = per_sample / scale
    return expand(per_sample, lengths).masked_fill(~mask, 0).to(torch.float32)
