from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from verl.algorithms import correction

from .batches import loss_inputs, pick, seeds, steady, token_index

LOGS = torch.tensor([-1.0, -1.0, -5.0, -1.0])
ROLLOUT = torch.tensor([-1.0, -3.0, 0.0, -0.5])
MASK = torch.tensor([True, True, False, True])
LENGTHS = torch.tensor([3, 1, 0])
BATCH = (LOGS, ROLLOUT, MASK, LENGTHS)


def approx(*numbers: float):
    return pytest.approx(list(numbers), rel=1e-6)


def test_ratios_and_truncation_by_hand():
    e2, e_half = math.exp(2), math.exp(-0.5)
    assert correction.importance_ratios(*BATCH).tolist() == approx(1, e2, 0, e_half)
    assert correction.importance_ratios(*BATCH, "sequence").tolist() == approx(e2, e2, 0, e_half)
    assert correction.truncated_weights(*BATCH).tolist() == approx(1, 2, 0, e_half)
    assert correction.truncated_weights(*BATCH, "sequence", threshold=5.0).tolist() == approx(5, 5, 0, e_half)


def test_icepop_by_hand():
    assert correction.icepop_weights(*BATCH).tolist() == approx(1, 0, 0, math.exp(-0.5))
    assert correction.icepop_weights(*BATCH, low=0.7, high=10).tolist() == approx(1, math.exp(2), 0, 0)
    assert correction.icepop_weights(*BATCH, "sequence").tolist() == approx(0, 0, 0, math.exp(-0.5))


# d = log mu - log pi of the policy tokens: 0, -2 and 0.5.
K3_SECOND, K3_THIRD = math.exp(2) - 1 - 2, math.exp(-0.5) - 1 + 0.5


@pytest.mark.parametrize(
    ("statistic", "of_tokens"),
    [
        ("token_k1", [0, -2, 0.5]),
        ("token_k2", [0, 2, 0.125]),
        ("token_k3", [0, K3_SECOND, K3_THIRD]),
        ("seq_sum_k1", [-2, -2, 0.5]),
        ("seq_sum_k2", [2, 2, 0.125]),
        ("seq_sum_k3", [K3_SECOND, K3_SECOND, K3_THIRD]),
        ("seq_mean_k1", [-1, -1, 0.5]),
        ("seq_mean_k2", [1, 1, 0.125]),
        ("seq_mean_k3", [K3_SECOND / 2, K3_SECOND / 2, K3_THIRD]),
        ("seq_max_k2", [2, 2, 0.125]),
        ("seq_max_k3", [K3_SECOND, K3_SECOND, K3_THIRD]),
    ],
)
def test_rejection_by_hand(statistic, of_tokens):
    # A bound just below a value drops its tokens, just above keeps them; so the statistic has that value.
    for value in set(of_tokens):
        for high in (value - 1e-4, value + 1e-4):
            kept = correction.rejection_mask(*BATCH, statistic, high=high)
            assert kept[MASK].tolist() == [v <= high for v in of_tokens]
            assert not kept[2]
            kept = correction.rejection_mask(*BATCH, statistic, low=high)
            assert kept[MASK].tolist() == [v >= high for v in of_tokens]


def test_every_rejection_statistic_is_tested():
    marks = next(m for m in test_rejection_by_hand.pytestmark if m.name == "parametrize")
    assert {name for name, _ in marks.args[1]} == set(correction.REJECTION_STATISTICS)


@given(seed=seeds)
@steady
def test_results_do_not_depend_on_the_other_samples(seed):
    inputs = loss_inputs(seed)
    one = torch.tensor([inputs.lengths.numel() - 1])
    alone, where = pick(inputs, one), token_index(inputs.lengths, one)
    for level in correction.LEVELS:
        whole = correction.truncated_weights(
            inputs.log_probs, inputs.rollout_log_probs, inputs.mask, inputs.lengths, level
        )
        part = correction.truncated_weights(alone.log_probs, alone.rollout_log_probs, alone.mask, alone.lengths, level)
        torch.testing.assert_close(whole[where], part)
        assert not whole[~inputs.mask].any()


def test_far_apart_and_masked_nonsense_are_finite():
    logs = torch.tensor([-1e4, 0.0, math.nan])
    mask = torch.tensor([True, True, False])
    for level in correction.LEVELS:
        weights = correction.importance_ratios(logs, -logs - 1e4, mask, torch.tensor([1, 2]), level)
        assert weights.isfinite().all()
        assert weights[2] == 0


def test_effective_sample_size():
    mask = torch.tensor([True, True, True, False])
    assert correction.effective_sample_size(torch.tensor([2.0, 2, 2, 9]), mask) == pytest.approx(1)
    assert correction.effective_sample_size(torch.tensor([5.0, 0, 0, 9]), mask) == pytest.approx(1 / 3)
    assert correction.effective_sample_size(torch.tensor([1.0, 2, 0, 9]), mask) == pytest.approx(9 / 15)
    assert correction.effective_sample_size(torch.zeros(4), mask) == 0
    assert correction.effective_sample_size(torch.ones(4), torch.zeros(4, dtype=torch.bool)) == 0


def test_weight_metrics_by_hand():
    metrics = correction.weight_metrics(torch.tensor([1.0, 2.0, 9.0, 0.0]), torch.tensor([True, True, False, True]))
    assert {k.removeprefix("rollout_corr/rollout_is_"): v for k, v in metrics.items()} == pytest.approx(
        {"mean": 1, "min": 0, "max": 2, "zero_fraction": 1 / 3, "eff_sample_size": 9 / 15}
    )
    assert correction.weight_metrics(torch.zeros(1), torch.tensor([False])) == {}


def test_mismatch_metrics_by_hand():
    metrics = correction.mismatch_metrics(*BATCH)
    pi, mu = [math.exp(-1)] * 3, [math.exp(-1), math.exp(-3), math.exp(-0.5)]
    apart = [abs(p - m) for p, m in zip(pi, mu, strict=True)]
    mean = sum(apart) / 3
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(mean)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(max(apart))
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(
        math.sqrt(sum((a - mean) ** 2 for a in apart) / 3)
    )
    assert metrics["training/rollout_actor_probs_pearson_corr"] == 0.0  # one side is constant
    assert metrics["rollout_corr/kl"] == pytest.approx((0 - 2 + 0.5) / 3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((K3_SECOND + K3_THIRD) / 3)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(math.e)
    assert metrics["rollout_corr/rollout_ppl"] == pytest.approx((math.exp(2) + math.exp(0.5)) / 2)
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx((math.exp(-1) + math.exp(0.5)) / 2)
    ratios = [1, math.exp(2), math.exp(-0.5)]
    effective = sum(ratios) ** 2 / (3 * sum(w * w for w in ratios))
    assert metrics["rollout_corr/eff_sample_size"] == pytest.approx(effective)


def test_correlation():
    x = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.bool)

    def correlation(y: torch.Tensor) -> float:
        metrics = correction.mismatch_metrics(x.log(), y.log(), ones, torch.tensor([3]))
        return metrics["training/rollout_actor_probs_pearson_corr"]

    assert correlation(x) == pytest.approx(1)
    assert correlation(0.9 - x) == pytest.approx(-1)
    # y - mean = -1/30, 1/15, -1/30; x - mean = -2/15, -1/30, 1/6: covariance -1/300.
    y = torch.tensor([0.2, 0.3, 0.2], dtype=torch.float64)
    assert correlation(y) == pytest.approx((-1 / 300) / math.sqrt((4 / 225 + 1 / 900 + 1 / 36) * (6 / 900)))


def test_mismatch_without_tokens_and_unknown_names():
    assert correction.mismatch_metrics(LOGS, ROLLOUT, torch.zeros(4, dtype=torch.bool), LENGTHS) == {}
    with pytest.raises(ValueError, match=r"unknown importance sampling level 'seq'\. Allowed: token, sequence"):
        correction.importance_ratios(*BATCH, "seq")
    with pytest.raises(ValueError, match="unknown rejection statistic 'k3'"):
        correction.rejection_mask(*BATCH, "k3", high=1.0)
