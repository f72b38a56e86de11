from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.value_loss import explained_variance, value_loss


def test_by_hand():
    values = torch.tensor([2.0, 2.0, 1.2, math.nan], requires_grad=True)
    old = torch.ones(4)
    returns = torch.tensor([0.0, 3.0, 0.0, 0.0])
    mask = torch.tensor([True, True, True, False])
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0])
    out = value_loss(values, old, returns, mask, weights, clip_range=0.5)
    assert out.token_loss.tolist() == pytest.approx([2.0, 1.125, 0.72, 0.0])
    assert out.loss.item() == pytest.approx(1.0 + 0.28125 + 0.18)
    (gradient,) = torch.autograd.grad(out.loss, values)
    # The second token's clip holds it back; the others pull V to R with weight * (V - R).
    assert gradient[:3].tolist() == pytest.approx([1.0, 0.0, 0.3])
    assert out.metrics["vf_clipfrac"].mean() == pytest.approx(1 / 3)
    assert out.metrics["vpred_mean"].mean() == pytest.approx(5.2 / 3)


def test_gradient_against_finite_differences():
    g = torch.Generator().manual_seed(0)
    values, old, returns, weights = (torch.randn(9, generator=g, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(9, generator=g) < 0.7
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, weights, 0.4).loss, values.requires_grad_()
    )


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(4), returns, mask) == 0.0
    assert explained_variance(torch.tensor([1.0, 2.0, 2.0, 0.0]), returns, mask) == pytest.approx(1 - (1 / 3) / 1)
    assert explained_variance(torch.tensor([3.0, 2.0, 1.0, 0.0]), returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.full((4,), 0.1), mask) == 0.0
    assert explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)) == 0.0
