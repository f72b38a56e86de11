from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from verl.algorithms.aggregate import MODES, loss_weights
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOptions,
    get_policy_loss,
    list_policy_losses,
)
from verl.algorithms.policy_losses.covariance import covariance

from .batches import generator, loss_inputs, pick, seeds, steady, token_index

NAMES = list_policy_losses()
OPTIONS = PolicyLossOptions()
# Large enough to pick something in a batch of a few tokens.
PICKY = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
}


def options_for(name: str) -> PolicyLossOptions:
    return PolicyLossOptions(extra=PICKY.get(name, {}))


def tokens(
    advantages: list[float], log_probs: list[float], old: list[float] | None = None, lengths: list[int] | None = None
) -> PolicyLossInputs:
    """Policy tokens only, weights 1; old and rollout log-probs are `old`."""
    new = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    before = torch.tensor(old, dtype=torch.float64) if old else new.detach()
    ones = torch.ones_like(before)
    sizes = torch.tensor(lengths or [1] * len(log_probs))
    return PolicyLossInputs(
        new, before, torch.tensor(advantages).double(), ones.bool(), sizes, ones, rollout_log_probs=before
    )


def ratios(advantages: list[float], rs: list[float]) -> PolicyLossInputs:
    return tokens(advantages, [math.log(r) - 3 for r in rs], [-3.0] * len(rs))


def run(name: str, inputs: PolicyLossInputs, options: PolicyLossOptions = OPTIONS):
    """Token losses, their gradients by the log-probs, and metrics as numbers."""
    out = get_policy_loss(name)(inputs, options)
    (gradient,) = torch.autograd.grad(out.loss, inputs.log_probs)
    return out.token_loss.tolist(), gradient.tolist(), {k: m.mean() for k, m in out.metrics.items()}


# Right values by hand -------------------------------------------------------------------------------------------------


def test_vanilla_by_hand():
    advantages, rs = [1, 1, -1, -1, 1, -1], [1.5, 0.5, 1.5, 4.0, 1.0, 0.5]
    loss, gradient, metrics = run("vanilla", ratios(advantages, rs))
    # clipped above; free (below, A > 0); free (above, A < 0); dual clip at 3; on policy; clipped below.
    assert loss == pytest.approx([-1.2, -0.5, 1.5, 3.0, -1.0, 0.8])
    assert gradient == pytest.approx([0, -0.5, 1.5, 0, -1.0, 0])
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 6)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(1 / 6)
    assert metrics["ppo_kl"] == pytest.approx(-sum(math.log(r) for r in rs) / 6)


def test_vanilla_clip_higher_by_hand():
    loss, _, _ = run("vanilla", ratios([1, 1, -1], [1.25, 1.5, 0.5]), PolicyLossOptions(clip_low=0.1, clip_high=0.28))
    assert loss == pytest.approx([-1.25, -1.28, 0.9])


def test_cispo_by_hand():
    inputs = tokens([1.0, 1.0], [math.log(0.5)] * 2, [math.log(0.5 / 1.5), math.log(0.5 / 0.1)])
    loss, gradient, metrics = run("cispo", inputs, PolicyLossOptions(clip_low=10, clip_high=0.2))
    assert loss == pytest.approx([1.2 * math.log(2), 0.1 * math.log(2)])
    assert gradient == pytest.approx([-1.2, -0.1])  # the clipped token keeps a gradient
    assert metrics["pg_clipfrac"] == 0.5


def test_sapo_by_hand():
    loss, gradient, _ = run("sapo", ratios([1, -1, 1], [1.0, 1.0, 3.0]))
    sigmoid = 1 / (1 + math.exp(-2))
    assert loss == pytest.approx([-2, 2 / 1.05, -4 * sigmoid])
    # d/dlog pi = -4 sigma (1 - sigma) r A: 1 on policy, damped far off.
    assert gradient == pytest.approx([-1, 1, -4 * sigmoid * (1 - sigmoid) * 3])


def test_gpg_by_hand():
    assert run("gpg", tokens([2.0], [math.log(0.5)]))[:2] == (pytest.approx([2 * math.log(2)]), [-2.0])


@pytest.mark.parametrize("name", ["dppo", "dppo_tv"])
def test_dppo_tv_by_hand(name):
    mu = [0.01, 0.5, 0.5, 0.5, 0.5]
    pi = [0.05, 0.75, 0.75, 0.25, 0.25]
    inputs = tokens([1, 1, -1, -1, 1], [math.log(p) for p in pi], [math.log(m) for m in mu])
    loss, gradient, metrics = run(name, inputs)
    # A fivefold ratio of a rare token stays; a shift of 0.25 the advantage's way goes, the other way stays.
    assert loss == pytest.approx([-5, 0, 1.5, 0, -0.5])
    assert gradient == pytest.approx([-5, 0, 1.5, 0, -0.5])
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (pytest.approx(0.2), pytest.approx(0.2))


def test_dppo_kl_by_hand():
    inputs = tokens([1.0], [math.log(0.75)], [math.log(0.5)])
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)  # 0.1438
    assert run("dppo_kl", inputs, PolicyLossOptions(clip_high=divergence - 1e-6))[0] == [0.0]
    assert run("dppo_kl", inputs, PolicyLossOptions(clip_high=divergence + 1e-6))[0] == pytest.approx([-1.5])


def test_dppo_is_anchored_to_the_rollout_not_to_the_old_policy():
    inputs = tokens([1.0], [math.log(0.5)], [math.log(0.25)])
    assert run("dppo", replace(inputs, rollout_log_probs=torch.tensor([math.log(0.5)])))[0] == pytest.approx([-1.0])


def test_dro_by_hand():
    loss, gradient, _ = run("dro", tokens([1.0], [math.log(0.5)], [math.log(0.25)]))
    assert loss == pytest.approx([math.log(2) + 0.025 * math.log(2) ** 2])
    assert gradient == pytest.approx([-1 + 0.05 * math.log(2)])


def test_gspo_by_hand():
    inputs = tokens([1, 1, -1], [-1.0, -0.6, -2.0], [-1.0, -1.0, -2.1], lengths=[2, 1])
    loss, gradient, metrics = run("gspo", inputs)
    # s = exp(0.2) = 1.2214 is clipped; the second sample has s = exp(0.1).
    assert loss == pytest.approx([-1.2, -1.2, math.exp(0.1)])
    assert gradient == pytest.approx([0, 0, math.exp(0.1)])
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 3)
    loss, gradient, _ = run("gspo", inputs, PolicyLossOptions(clip_high=0.3))
    assert loss[:2] == pytest.approx([-math.exp(0.2)] * 2)
    assert gradient[:2] == pytest.approx([-math.exp(0.2)] * 2)


def test_geo_mean_by_hand():
    inputs = tokens([1, 1, -1, -1], [-1.0, -0.6, -1.9, -1.0], [-1.0, -1.0, -1.0, -1.0], lengths=[2, 2])
    loss, gradient, metrics = run("geo_mean", inputs)
    # log r = 0, 0.4 -> 0, 0.2; mean 0.1. log r = -0.9, 0 -> -0.2, 0; mean -0.1.
    assert loss == pytest.approx([-math.exp(0.1)] * 2 + [math.exp(-0.1)] * 2)
    # The loss stands at both tokens, so its gradient by the free one is twice half of it.
    assert gradient == pytest.approx([-math.exp(0.1), 0, 0, math.exp(-0.1)])
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (0.25, 0.25)


def test_clip_cov_by_hand():
    inputs = tokens([2, 0, 0, -2], [-1.0, -2.0, -2.0, -3.0])
    # Means -2 and 0: covariances 2, 0, 0, 2. Half of all are asked for, and the two inside (1, 5) are they.
    assert covariance(inputs).tolist() == [2, 0, 0, 2]
    half = PolicyLossOptions(extra={"clip_cov_ratio": 0.5})
    loss, gradient, metrics = run("clip_cov", inputs, half)
    assert loss == gradient == [0, 0, 0, 0]
    assert metrics["cov_selected"] == 0.5
    one = run("clip_cov", inputs)
    assert sorted(one[0]) in ([-2, 0, 0, 0], [0, 0, 0, 2])  # a tiny share is still one token


def test_kl_cov_by_hand():
    inputs = tokens([2, 0, 0, -1], [-1 + math.log(1.5), -2.0, -2.0, -2.5], [-1.0, -2.0, -2.0, -2.5])
    loss, gradient, metrics = run("kl_cov", inputs)
    assert loss == pytest.approx([-3 + 0.1 * math.log(1.5), 0, 0, 1])
    assert gradient == pytest.approx([-3 + 0.1, 0, 0, 1])
    assert metrics["cov_selected"] == 0.25


# Properties of all ----------------------------------------------------------------------------------------------------


def with_weights(inputs: PolicyLossInputs, mode: str) -> PolicyLossInputs:
    return replace(inputs, weights=loss_weights(inputs.mask, inputs.lengths, mode, scale=10.0).double())


def loss_and_gradient(entry, inputs: PolicyLossInputs, options: PolicyLossOptions):
    log_probs = inputs.log_probs.detach().requires_grad_()
    out = entry(replace(inputs, log_probs=log_probs), options)
    (gradient,) = torch.autograd.grad(out.loss, log_probs)
    return out, gradient


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@steady
def test_loss_gradient_and_metrics_do_not_depend_on_split_or_order(name, seed):
    entry, options = get_policy_loss(name), options_for(name)
    inputs = with_weights(loss_inputs(seed), MODES[seed % 4])
    inputs = replace(inputs, selection=entry.select(inputs, options))
    whole, gradient = loss_and_gradient(entry, inputs, options)

    g = generator(seed)
    order = torch.randperm(inputs.lengths.numel(), generator=g)
    cuts = (torch.rand(len(order) - 1, generator=g) < 0.5).nonzero().squeeze(1) + 1
    total, metrics, gradients = 0.0, {}, torch.zeros_like(gradient)
    for part in order.tensor_split(cuts):
        out, part_gradient = loss_and_gradient(entry, pick(inputs, part), options)
        total += out.loss.item()
        gradients[token_index(inputs.lengths, part)] = part_gradient
        for key, metric in out.metrics.items():
            metrics[key] = metrics[key] + metric if key in metrics else metric
    assert total == pytest.approx(whole.loss.item(), abs=1e-12)
    torch.testing.assert_close(gradients, gradient, rtol=1e-10, atol=1e-12)
    assert {k: m.mean() for k, m in metrics.items()} == pytest.approx(
        {k: m.mean() for k, m in whole.metrics.items()}, abs=1e-6
    )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cispo", "gspo"}))
@pytest.mark.parametrize("seed", [5, 7])
def test_gradient_against_finite_differences(name, seed):
    entry, options = get_policy_loss(name), options_for(name)
    inputs = with_weights(loss_inputs(seed), "token-mean")
    inputs = replace(inputs, selection=entry.select(inputs, options))
    assert int(inputs.mask.sum()) > 5
    log_probs = inputs.log_probs.requires_grad_()
    assert torch.autograd.gradcheck(lambda p: entry(replace(inputs, log_probs=p), options).loss, log_probs)


@pytest.mark.parametrize("seed", [5, 7])
def test_gspo_gradient_is_that_of_the_sequence_loss(seed):
    inputs = loss_inputs(seed)
    per_sample = torch.randn(inputs.lengths.numel(), generator=generator(seed), dtype=torch.float64)
    advantages = per_sample.repeat_interleave(inputs.lengths)
    inputs = with_weights(replace(inputs, advantages=advantages, rollout_is_weights=None), "seq-mean-token-mean")
    rows = [r.nonzero().squeeze(1) + s for r, s in zip(inputs.mask.split(inputs.lengths.tolist()), starts(inputs))]

    def sequence_loss(log_probs):
        losses = []
        for i, row in enumerate(rows):
            if len(row):
                ratio = (log_probs[row] - inputs.old_log_probs[row]).mean().exp()
                losses.append(torch.maximum(-per_sample[i] * ratio, -per_sample[i] * ratio.clamp(0.8, 1.2)))
        return torch.stack(losses).mean()

    log_probs = inputs.log_probs.requires_grad_()
    expected = sequence_loss(log_probs)
    out, gradient = loss_and_gradient(get_policy_loss("gspo"), inputs, OPTIONS)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the weights are float32
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, log_probs)[0], rtol=1e-6, atol=1e-9)


def starts(inputs: PolicyLossInputs) -> list[int]:
    return (inputs.lengths.cumsum(0) - inputs.lengths).tolist()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cispo", "sapo"}))
def test_on_policy_gradient_is_minus_the_advantage(name):
    inputs = loss_inputs(7)
    advantages = torch.ones_like(inputs.advantages)  # equal, as the sequence losses average them
    inputs = replace(
        inputs,
        log_probs=inputs.old_log_probs,
        rollout_log_probs=inputs.old_log_probs,
        advantages=advantages,
        rollout_is_weights=None,
        selection=torch.zeros_like(inputs.mask),
    )
    _, gradient = loss_and_gradient(get_policy_loss(name), inputs, OPTIONS)
    torch.testing.assert_close(gradient, torch.where(inputs.mask, -1.0, 0.0).double())


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@steady
def test_masked_tokens_may_hold_anything(name, seed):
    entry, options = get_policy_loss(name), options_for(name)
    inputs = loss_inputs(seed)
    nonsense = {
        column: torch.where(inputs.mask, getattr(inputs, column), value)
        for column, value in (("log_probs", -math.inf), ("old_log_probs", math.nan), ("rollout_log_probs", math.inf))
    }
    plain, gradient = loss_and_gradient(entry, inputs, options)
    dirty, dirty_gradient = loss_and_gradient(entry, replace(inputs, **nonsense), options)
    assert torch.equal(plain.token_loss, dirty.token_loss)
    assert torch.equal(gradient, dirty_gradient)
    assert not dirty_gradient[~inputs.mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_policies_far_apart_stay_finite(name):
    inputs = tokens([1, -1, 1, -1], [-80.0, -80.0, -1e-4, -1e-4], [-1e-4, -1e-4, -80.0, -80.0])
    inputs = replace(
        inputs, **{k: v.float() for k, v in vars(inputs).items() if k.endswith("log_probs") and v is not None}
    )
    out, gradient = loss_and_gradient(get_policy_loss(name), inputs, OPTIONS)
    assert out.token_loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_tokens_give_loss_zero(name):
    inputs = tokens([1.0, 1.0], [-1.0, -2.0])
    out, gradient = loss_and_gradient(
        get_policy_loss(name), replace(inputs, mask=torch.tensor([False, False])), OPTIONS
    )
    assert out.loss.item() == 0
    assert gradient.tolist() == [0, 0]
    assert out.metrics["ppo_kl"].mean() == 0


@pytest.mark.parametrize("name", NAMES)
def test_rollout_weights_multiply_the_token_loss(name):
    entry, inputs = get_policy_loss(name), loss_inputs(7)
    inputs = replace(inputs, selection=torch.zeros_like(inputs.mask))
    plain = entry(replace(inputs, rollout_is_weights=None), OPTIONS).token_loss
    assert torch.equal(entry(inputs, OPTIONS).token_loss, plain * inputs.rollout_is_weights)


@pytest.mark.parametrize("name", NAMES)
def test_declares_exactly_the_options_that_it_reads(name):
    entry = get_policy_loss(name)
    seen: set[str] = set()

    class Recorder:
        def __getattr__(self, key):
            seen.add(key)
            return entry.extra if key == "extra" else getattr(PolicyLossOptions(), key)

    inputs = loss_inputs(7)
    inputs = replace(inputs, selection=torch.zeros_like(inputs.mask))
    entry.function(inputs, Recorder())
    if entry.prepare:
        entry.prepare(inputs, Recorder())
    assert seen - {"extra"} == set(entry.reads)
    assert ("extra" in seen) == bool(entry.extra)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@given(seed=seeds)
@steady
def test_selection_does_not_depend_on_order(name, seed):
    entry, options, inputs = get_policy_loss(name), options_for(name), loss_inputs(seed)
    order = torch.randperm(inputs.lengths.numel(), generator=generator(seed))
    picked = entry.select(inputs, options)
    assert torch.equal(entry.select(pick(inputs, order), options), picked[token_index(inputs.lengths, order)])
    assert not (picked & ~inputs.mask).any()


def test_clip_cov_draws_evenly():
    # 4000 tokens of equal covariance; a fair draw of a quarter has about 500 of 1000 in each half, deviation 14.
    g = generator(5)
    sign = torch.where(torch.rand(4000, generator=g) < 0.5, 1.0, -1.0)
    inputs = tokens((2 * sign).tolist(), (-2 + sign).tolist(), lengths=[1000] * 4)
    picked = get_policy_loss("clip_cov").select(inputs, PolicyLossOptions(extra={"clip_cov_ratio": 0.25}))
    assert int(picked.sum()) == 1000
    assert all(190 < int(quarter.sum()) < 310 for quarter in picked.split(1000))


def test_dppo_without_rollout_log_probs_says_so():
    with pytest.raises(ValueError, match="'dppo_kl' needs rollout_log_probs"):
        get_policy_loss("dppo_kl")(replace(tokens([1.0], [-1.0]), rollout_log_probs=None), OPTIONS)
