from __future__ import annotations

import pytest
import torch
from hypothesis import given

from verl.algorithms import segments

from .batches import generator, seeds, steady


def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(seed)
    lengths = torch.randint(0, 6, (int(torch.randint(1, 8, (1,), generator=g)),), generator=g)
    values = torch.randn(int(lengths.sum()), generator=g, dtype=torch.float64)
    return values, lengths, torch.rand(values.shape, generator=g) < 0.6


@given(seed=seeds)
@steady
def test_against_loops(seed):
    values, lengths, mask = ragged(seed)
    rows = [r.tolist() for r in values.split(lengths.tolist())]
    masks = [m.tolist() for m in mask.split(lengths.tolist())]
    kept = [[v for v, m in zip(r, ms, strict=True) if m] for r, ms in zip(rows, masks, strict=True)]
    approx = pytest.approx
    assert segments.segment_sum(values, lengths).tolist() == approx([sum(r) for r in rows])
    assert segments.segment_sum(values, lengths, mask).tolist() == approx([sum(r) for r in kept])
    assert segments.segment_mean(values, lengths, mask).tolist() == approx([sum(r) / max(len(r), 1) for r in kept])
    assert segments.segment_mean(values, lengths).tolist() == approx([sum(r) / max(len(r), 1) for r in rows])
    assert segments.segment_count(mask, lengths).tolist() == [len(r) for r in kept]
    assert segments.positions(lengths).tolist() == [i for r in rows for i in range(len(r))]
    assert segments.prefix_sum(values, lengths).tolist() == approx(
        [sum(r[: i + 1]) for r in rows for i in range(len(r))]
    )
    decayed = [sum(0.5 ** (j - i) * r[j] for j in range(i, len(r))) for r in rows for i in range(len(r))]
    assert segments.suffix_sum(values, lengths, 0.5).tolist() == approx(decayed)


@given(seed=seeds)
@steady
def test_unpad_undoes_pad(seed):
    values, lengths, _ = ragged(seed)
    padded = segments.pad(values, lengths, fill=9.0)
    assert padded.shape == (lengths.numel(), int(lengths.max()))
    assert int((padded == 9.0).sum()) == padded.numel() - values.numel()
    assert torch.equal(segments.unpad(padded, lengths), values)


def test_gradients_and_second_gradients():
    values, lengths, mask = ragged(5)
    values.requires_grad_()
    per_sample = torch.randn(lengths.numel(), dtype=torch.float64, requires_grad=True)
    for function, at in (
        (lambda v: segments.segment_sum(v.sin(), lengths), values),
        (lambda v: segments.segment_mean(v.square(), lengths, mask), values),
        (lambda v: segments.suffix_sum(v.square(), lengths, 0.7), values),
        (lambda v: segments.pad(v.square(), lengths), values),
        (lambda v: segments.unpad(segments.pad(v.square(), lengths), lengths), values),
        (lambda v: segments.expand(v.square(), lengths), per_sample),
    ):
        assert torch.autograd.gradcheck(function, at)
        assert torch.autograd.gradgradcheck(function, at)


def test_long_sample_with_discount():
    # 0.5 ** 1000 of the far end is nothing: the sum from the start is 2 up to rounding.
    total = segments.suffix_sum(torch.ones(1000, dtype=torch.float64), torch.tensor([1000]), 0.5)
    assert total[0].item() == pytest.approx(2.0)
    assert total[-3:].tolist() == [1.75, 1.5, 1.0]


def test_place_scores_on_the_last_policy_token():
    mask = torch.tensor([True, False, True, False, False, True])
    placed = segments.place_scores(torch.tensor([5.0, 6.0, 7.0]), mask, torch.tensor([4, 1, 1]))
    assert placed.tolist() == [0, 0, 5, 0, 0, 7]


def test_no_samples():
    none = torch.empty(0, dtype=torch.int64)
    assert segments.segment_sum(torch.empty(0), none).tolist() == []
    assert segments.pad(torch.empty(0), none).shape == (0, 0)
    assert segments.suffix_sum(torch.empty(0), none).tolist() == []


def test_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match="3 tokens, but lengths sum to 2 over 1 samples"):
        segments.segment_sum(torch.zeros(3), torch.tensor([2]))
    with pytest.raises(ValueError, match="2 numbers for 1 samples"):
        segments.expand(torch.zeros(2), torch.tensor([2]))
