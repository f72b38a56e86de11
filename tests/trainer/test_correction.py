"""Rollout correction: what the keys say, and what it does to a batch, by hand."""

import math

import pytest
import torch
from tests.trainer.fakes import batch_of, config

from verl.errors import ConfigError
from verl.trainer.correction import correct, read_correction

KEY = "algorithm.rollout_correction"


def correction(**settings):
    return read_correction(
        config(*(f"{KEY}.{name}={value}" for name, value in settings.items())).algorithm.rollout_correction
    )


def mismatched():
    """Ratios pi / mu of 1, 3 | 0.25 | 1, 1 (the last token is a tool's)."""
    logs = [[0.0, math.log(3)], [math.log(0.25)], [0.0, 0.0, 5.0]]
    zeros = [[0.0] * len(row) for row in logs]
    return batch_of([[1, 1], [1], [1, 1, 0]], old_log_probs=logs, rollout_log_probs=zeros)


def weights(**settings):
    batch, metrics = correct(mismatched(), correction(**settings))
    return batch["rollout_is_weights"].values.tolist(), metrics


def kept(**settings):
    batch, metrics = correct(mismatched(), correction(**settings))
    return [row.tolist() for row in batch["loss_mask"].rows()], metrics


def test_nothing_is_corrected_unless_asked():
    assert not correction().active
    batch = mismatched()
    out, metrics = correct(batch, correction())
    assert out.columns.keys() == batch.columns.keys()
    assert metrics == {}


def test_truncation_and_icepop():
    assert weights(rollout_is="token")[0] == pytest.approx([1, 2, 0.25, 1, 1, 0])
    assert weights(rollout_is="token", rollout_is_threshold="0.5_5")[0] == pytest.approx([1, 3, 0, 1, 1, 0])
    values, metrics = weights(rollout_is="sequence", rollout_is_threshold=2.5)
    assert values == pytest.approx([2.5, 2.5, 0.25, 1, 1, 0])
    # (sum w)^2 / (n sum w^2) over the five tokens of the policy
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(7.25**2 / (5 * 14.5625))


def test_normalised_weights_have_mean_one():
    values, metrics = weights(rollout_is="token", rollout_is_batch_normalize=True)
    mean = (1 + 2 + 0.25 + 1 + 1) / 5
    assert values == pytest.approx([w / mean for w in (1, 2, 0.25, 1, 1, 0)])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(mean)  # what they were


def test_rejection_of_tokens_and_samples():
    tokens, metrics = kept(rollout_rs="token_k1", rollout_rs_threshold="0.2_2.0")
    assert tokens == [[True, False], [True], [True, True, False]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0
    # One number bounds the ratio by it and by its inverse.
    samples, metrics = kept(rollout_rs="sequence", rollout_rs_threshold=2.0)
    assert samples == [[False, False], [False], [True, True, False]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 5)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    # The geometric mean of 1 and 3 is 1.73.
    assert kept(rollout_rs="geometric", rollout_rs_threshold=2.0)[0] == [[True, True], [False], [True, True, False]]


def test_several_rules_count_together():
    both, _ = kept(rollout_rs="'token_k1,seq_max_k2'", rollout_rs_threshold="'0.1_2.0,0.5'")
    # k2 of log 0.25 is 0.96, that of log 3 is 0.60: both samples go; the third stays.
    assert both == [[False, False], [False], [True, True, False]]
    same, _ = kept(rollout_rs="'seq_max_k2,seq_sum_k3'", rollout_rs_threshold=0.7)
    assert same == [[False, False], [False], [True, True, False]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_is_threshold": "much"}, "rollout_is_threshold=much: takes a number above 0, or two as LOW_HIGH"),
        ({"rollout_is_threshold": "-1"}, "rollout_is_threshold=-1"),
        ({"rollout_is_threshold": "5_0.5"}, "rollout_is_threshold=5_0.5"),
        ({"rollout_rs": "token_k1"}, "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ({"rollout_rs_threshold": "2.0"}, "only read with algorithm.rollout_correction.rollout_rs"),
        (
            {"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0},
            "unknown statistic: 'token_k4'. Did you mean 'token_k",
        ),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "'1,2'"}, "2 thresholds for the 1"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "write a number above 1, or LOW_HIGH"),
        ({"rollout_is": "token", "bypass_mode": True}, "compare them with themselves"),
    ],
)
def test_what_cannot_be_read_is_told(settings, words):
    with pytest.raises(ConfigError) as error:
        correction(**settings)
    assert words in str(error.value)


def test_rejected_tokens_have_no_part_in_the_loss():
    from tests.trainer.test_stages import fake_run

    from verl.trainer import stages
    from verl.trainer.steplog import StepLog

    run = fake_run(f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=2.0")
    batch = mismatched().with_columns(score=torch.tensor([1.0, 0.0, 0.0]))
    batch = stages.add_advantages(run, batch.with_columns(uid=["a", "a", "a"]), StepLog())
    # The group's mean is taken over all three samples.
    assert batch["advantages"].values[0] == pytest.approx((2 / 3) / (3**-0.5), rel=1e-4)
    stages.update_actor(run, batch, StepLog())
    trained, _ = run.roles.actor.trained[0]
    # Three tokens are left; each weighs a third.
    assert trained["loss_weights"].values.tolist() == pytest.approx([1 / 3, 0, 0, 1 / 3, 1 / 3, 0])
    assert trained["response_mask"].values.tolist() == [True, False, False, True, True, False]
