from __future__ import annotations

import pytest
import torch
from hypothesis import given

from verl.algorithms.aggregate import MODES, loss_weights
from verl.algorithms.segments import segment_count

from .batches import loss_inputs, seeds, steady

MASK = torch.tensor([True, True, False, True, True, True])
LENGTHS = torch.tensor([3, 1, 0, 2])
LOSS = torch.tensor([1.0, 2.0, 100.0, 4.0, 8.0, 16.0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 4 + 8 + 16) / 5),
        ("seq-mean-token-sum", (3 + 4 + 24) / 3),
        ("seq-mean-token-mean", (1.5 + 4 + 12) / 3),
        ("seq-mean-token-sum-norm", (3 + 4 + 24) / 3 / 50),
    ],
)
def test_by_hand(mode, expected):
    weights = loss_weights(MASK, LENGTHS, mode, scale=50)
    assert weights.dtype == torch.float32
    assert (weights * LOSS).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds)
@steady
def test_ranks_with_the_global_totals_have_the_weights_of_the_whole(mode, seed):
    inputs = loss_inputs(seed)
    counts = segment_count(inputs.mask, inputs.lengths)
    whole = loss_weights(inputs.mask, inputs.lengths, mode, scale=7.0)
    totals = {"num_tokens": int(counts.sum()), "num_sequences": int((counts > 0).sum()), "scale": 7.0}
    half = len(counts) // 2
    cut = int(inputs.lengths[:half].sum())
    parts = [
        loss_weights(inputs.mask[:cut], inputs.lengths[:half], mode, **totals),
        loss_weights(inputs.mask[cut:], inputs.lengths[half:], mode, **totals),
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("mode", MODES)
def test_samples_without_policy_tokens_neither_count_nor_weigh(mode):
    none = torch.zeros(3, dtype=torch.bool)
    more = loss_weights(torch.cat([MASK, none]), torch.cat([LENGTHS, torch.tensor([3])]), mode, scale=50)
    assert torch.equal(more[:6], loss_weights(MASK, LENGTHS, mode, scale=50))
    assert not more[6:].any()
    assert not loss_weights(none, torch.tensor([3]), mode, scale=50).any()


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"'mean'\. Allowed: token-mean"):
        loss_weights(MASK, LENGTHS, "mean")
    for scale in (None, 0):
        with pytest.raises(ValueError, match="needs a scale above 0"):
            loss_weights(MASK, LENGTHS, "seq-mean-token-sum-norm", scale=scale)
