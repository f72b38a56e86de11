import math

import numpy as np
import pytest
import torch

from verl.rewards.outcome import SHOWN_CHARACTERS, read_outcome, score_in_process, with_model_score
from verl.rewards.types import Outcome, RewardInput, RewardResult

SAMPLE = RewardInput("lab/sums", "the solution text", "the truth")


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(3), 3.0),
        (np.array(0.75), 0.75),
        (np.array([2.0]), 2.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (-torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max),
    ],
)
def test_numbers_of_every_kind(value, score):
    outcome = read_outcome(value, SAMPLE)
    assert outcome == (score, {}, "", None)
    assert type(outcome.score) is float


def test_dict_gives_score_and_numeric_metrics():
    value = {"score": np.float64(1), "acc": True, "steps": 3, "pred": "42", "none": None, "nan": math.nan}
    assert read_outcome(value, SAMPLE) == (1.0, {"acc": 1.0, "steps": 3.0}, "", "42")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "returned None (NoneType)"),
        ("1.0", "returned '1.0' (str)"),
        (math.nan, "returned nan (float)"),
        (math.inf, "returned inf (float)"),
        (-3.5e38, "returned -3.5e+38 (float)"),  # infinite in float32
        (10**400, "(int); return a finite number (at most 3.4e38"),
        ([1.0], "returned [1.0] (list)"),
        (np.array([1.0, 2.0]), "(ndarray)"),
        ({"acc": 1}, "a dict without 'score': it has ['acc']"),
        ({"score": None}, "returned None (NoneType)"),
    ],
)
def test_anything_else_is_a_failure_that_shows_the_sample(value, said):
    outcome = read_outcome(value, SAMPLE)
    assert outcome.score is None
    assert said in outcome.error
    for content in ("lab/sums", "the solution text", "the truth"):
        assert content in outcome.error


def test_raising_shows_the_users_frames_alone():
    def broken(solution_str, **_):
        return {}["missing key"]

    outcome = score_in_process(broken, SAMPLE)
    assert outcome.score is None
    assert "raised KeyError" in outcome.error
    assert 'return {}["missing key"]' in outcome.error
    assert "score_in_process" not in outcome.error


def test_long_texts_are_cut_in_messages():
    outcome = read_outcome(None, RewardInput("d", "x" * 10_000))
    assert len(outcome.error) < 3 * SHOWN_CHARACTERS
    assert "(10002 characters)" in outcome.error


def test_metric_means_are_over_the_samples_that_have_them():
    result = RewardResult([0, 0, 0], {"a": [1.0, None, 3.0], "b": [None, None, None]}, failed=[1])
    assert result.metric_means() == {"a": 2.0}
    assert result.failures == 1


def test_a_quick_scorer_may_raise_anything_but_ctrl_c_is_the_trainers():
    def leaves(**_):
        raise SystemExit(3)

    def interrupted(**_):
        raise KeyboardInterrupt

    assert "raised SystemExit" in score_in_process(leaves, SAMPLE).error
    with pytest.raises(KeyboardInterrupt):
        score_in_process(interrupted, SAMPLE)


def test_a_models_score_replaces_or_is_added():
    rule, model = Outcome(1.0, {"acc": 1.0}, answer="4"), Outcome(-2.0, {"sure": 0.5}, answer="5")
    alone = with_model_score(None, model, 0.5)
    assert alone == Outcome(-1.0, {"sure": 0.5, "rm_score": -2.0}, answer="5")
    both = with_model_score(rule, model, 0.5)
    assert both.score == 1.0 + 0.5 * -2.0
    assert both.metrics == {"acc": 1.0, "sure": 0.5, "rule_score": 1.0, "rm_score": -2.0}
    assert both.answer == "4"


def test_a_sample_fails_where_function_or_model_failed():
    good, bad = Outcome(1.0, {}), Outcome(None, {}, "no")
    assert with_model_score(bad, good, 1.0) == bad
    assert with_model_score(good, bad, 1.0) == bad
    assert with_model_score(None, bad, 1.0) == bad
