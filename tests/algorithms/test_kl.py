from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.kl import (
    KINDS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    batch_kl,
    kl_estimate,
)


def estimate(d: float, kind: str) -> tuple[float, float]:
    """Value and gradient at log pi - log pi_ref = d."""
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(log_prob, log_prob.detach() - d, kind)
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", 0.5, 1),
        ("kl", 0.5, 1),
        ("abs", 0.5, 1),
        ("k2", 0.125, 0.5),
        ("mse", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
        ("low_var_kl", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("k3+", math.exp(-0.5) - 1 + 0.5, 0.5),
        ("low_var_kl+", math.exp(-0.5) - 1 + 0.5, 0.5),
    ],
)
def test_by_hand(kind, value, gradient):
    assert estimate(0.5, kind) == pytest.approx((value, gradient))


def test_negative_difference():
    assert estimate(-0.5, "k1") == pytest.approx((-0.5, 1))
    assert estimate(-0.5, "abs") == pytest.approx((0.5, -1))
    assert estimate(-0.5, "k3") == pytest.approx((math.exp(0.5) - 1.5, 1 - math.exp(0.5)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difference", [-1000.0, -25.0, 0.0, 25.0, 1000.0])
def test_far_apart_is_finite_in_float32(kind, difference):
    log_prob = torch.tensor([-1.0], requires_grad=True)
    value = kl_estimate(log_prob, log_prob.detach() - difference, kind)
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    if kind.startswith(("k3", "low_var_kl")):
        assert 0 <= value.item() <= 10


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_over_all_tokens(kind):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    exact = (policy.exp() * (policy - reference)).sum().item()
    assert (policy.exp() * kl_estimate(policy, reference, kind)).sum().item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "unbiased"), [("k1", False), ("k2", True), ("k3", False), ("k1+", True), ("k3+", True)]
)
def test_which_gradients_are_those_of_the_kl(kind, unbiased):
    logits = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    sampled = (policy.exp().detach() * kl_estimate(policy, reference, kind)).sum()
    (gradient,) = torch.autograd.grad(sampled, logits)
    assert torch.allclose(gradient, exact) == unbiased


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"unknown KL estimator 'k4'\. Allowed: kl, k1"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_penalty_by_hand_and_masked_tokens():
    mask = torch.tensor([True, False, True])
    rewards, kl = apply_kl_penalty(
        token_scores=torch.tensor([0.0, 5.0, 1.0]),
        log_probs=torch.tensor([-1.0, math.nan, -2.0]),
        ref_log_probs=torch.tensor([-1.5, 0.0, -1.0]),
        mask=mask,
        coef=0.1,
        kind="kl",
    )
    assert kl.tolist() == [0.5, 0.0, -1.0]
    assert rewards.tolist() == pytest.approx([-0.05, 0.0, 1.1])
    # First sample's mean 0.5, second's -1; the third has no policy token.
    metric = batch_kl(kl, torch.tensor([True, False, True]), torch.tensor([2, 1, 0]))
    assert metric.mean() == pytest.approx(-0.25)


def test_controllers():
    adaptive = AdaptiveKLController(coef=0.1, target=1.0, horizon=100)
    adaptive.update(kl=1.1, num_samples=10)
    assert adaptive.coef == pytest.approx(0.1 * 1.01)
    adaptive.update(kl=0.0, num_samples=10)
    assert adaptive.coef == pytest.approx(0.1 * 1.01 * 0.98)
    resumed = AdaptiveKLController(coef=9.0, target=1.0, horizon=100)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coef == adaptive.coef
    adaptive.update(kl=0.0, num_samples=10_000)
    assert adaptive.coef == 0.0
    fixed = FixedKLController(0.3)
    fixed.update(kl=100.0, num_samples=10)
    assert fixed.coef == 0.3
    with pytest.raises(ValueError, match="target and horizon above 0, not 0"):
        AdaptiveKLController(coef=0.1, target=0, horizon=100)
