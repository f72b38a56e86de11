"""Metrics of a batch, worked out by hand."""

import pytest
import torch
from tests.trainer.fakes import batch_of

from verl.trainer.metrics import batch_metrics, group_metrics, performance_metrics
from verl.trainer.steplog import StepLog


@pytest.fixture
def batch():
    """Three samples; of the second, a tool wrote the middle token, and the third was cut at four tokens."""
    full = batch_of(
        [[1, 1], [1, 0, 1], [1, 1, 1, 1]],
        uids="aab",
        score=[1.0, 0.0, 0.5],
        token_rewards=[[0.0, 1.0], [-0.25, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]],
        advantages=[[1.0, 1.0], [-1.0, 9.0, -1.0], [0.0, 0.0, 0.0, 0.0]],
        returns=[[1.0, 2.0], [3.0, 9.0, 4.0], [0.0, 0.0, 0.0, 0.0]],
    )
    return full.with_columns(finish_reason=["stop", "abort", "length"])


def test_lengths_scores_and_clip_ratios(batch):
    values = batch_metrics(batch, max_prompt_length=2, max_response_length=4)
    expected = {
        "critic/score/mean": 0.5,
        "critic/rewards/mean": (1 - 0.25 + 0.5) / 3,
        "critic/rewards/min": -0.25,
        # The token that the policy did not choose counts nowhere.
        "critic/advantages/max": 1.0,
        "critic/returns/max": 4.0,
        "response_length/mean": (2 + 2 + 4) / 3,
        "response_length/min": 2,
        "response_length/max": 4,
        "response_length/clip_ratio": 1 / 3,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 2,
        "prompt_length/clip_ratio": 1.0,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in values if name.startswith("critic/v")]


def test_clip_ratio_is_against_the_configured_limit(batch):
    ended = batch.with_columns(finish_reason=["stop"] * 3)
    assert batch_metrics(ended, max_prompt_length=3, max_response_length=9)["response_length/clip_ratio"] == 0
    assert batch_metrics(ended, max_prompt_length=3, max_response_length=9)["prompt_length/clip_ratio"] == 0


def test_value_model_is_measured_against_the_returns(batch):
    exact = batch.with_columns(values=batch["returns"])
    assert batch_metrics(exact, 2, 4)["critic/vf_explained_var"] == 1.0
    constant = batch.with_columns(values=batch["returns"].with_values(torch.full((9,), 1.5)))
    values = batch_metrics(constant, 2, 4)
    assert values["critic/vf_explained_var"] == 0.0
    assert values["critic/values/mean"] == 1.5


def test_groups_without_spread_teach_nothing():
    batch = batch_of([[1]] * 6, uids="abacbc", score=[1.0, 0.0, 1.0, 0.5, 1.0, 0.5])
    assert group_metrics(batch) == {"reward/groups_without_spread": pytest.approx(2 / 3)}


def test_throughput_counts_real_tokens(batch):
    log = StepLog()
    log.add({"timing/step": 2.0, "timing/gen": 0.5})
    values = performance_metrics(batch, log, devices=2)
    tokens = 3 * 2 + 2 + 3 + 4  # prompts and responses
    assert values["perf/total_num_tokens"] == tokens
    assert values["perf/time_per_step"] == 2.0
    assert values["perf/throughput"] == tokens / 2.0 / 2
    assert values["perf/gen_throughput"] == 9 / 0.5 / 2
    assert values["timing_per_token_ms/gen"] == pytest.approx(1000 * 0.5 / 9)
    assert 0 < values["perf/cpu_memory_used_gb"] < 1000


def test_a_step_whose_samples_were_there_before_it_has_no_speed_of_generation(batch):
    log = StepLog()
    log.add({"timing/step": 2.0, "timing/gen": 0.0})
    values = performance_metrics(batch, log, devices=1)
    assert values["perf/throughput"] == 15 / 2.0
    assert not {"perf/gen_throughput", "timing_per_token_ms/gen"} & values.keys()
