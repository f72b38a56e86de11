"""The reward manager with a model that scores: in the place of rules, or beside them."""

import pytest

from verl.config.schema import CustomRewardConfig, RewardConfig, RewardModelConfig
from verl.errors import RewardError
from verl.rewards import RewardInput, RewardManager
from verl.rewards.types import Outcome

SAMPLES = [RewardInput("openai/gsm8k", text, "42") for text in ("#### 42", "#### 41", "fail")]


class Lengths:
    """Scores a text by its length; "fail" cannot be scored."""

    def __init__(self):
        self.seen, self.closed = [], False

    def score(self, samples):
        self.seen.append(list(samples))
        texts = [s.solution_str for s in samples]
        return [Outcome(None, {}, "cannot") if t == "fail" else Outcome(float(len(t)), {"long": 1.0}) for t in texts]

    def close(self):
        self.closed = True


def manager(model, **options):
    config = RewardModelConfig(enable=True, **options)
    made = RewardManager(RewardConfig(failure_score=-9.0), CustomRewardConfig(), config)
    made.attach(model)
    return made


def test_the_models_score_is_the_reward():
    model = Lengths()
    with manager(model, weight=2.0) as rewards:
        rewards.check({"a source that no scorer knows"})
        result = rewards.score(SAMPLES)
    assert result.scores == [14.0, 14.0, -9.0]
    assert result.metrics == {"long": [1.0, 1.0, None], "rm_score": [7.0, 7.0, None]}
    assert (result.failed, result.failure_messages) == ([2], ["sample 2: cannot"])
    assert model.seen == [SAMPLES]
    assert model.closed


def test_the_models_score_is_added_to_the_scorers():
    with manager(Lengths(), combine="add", weight=0.5) as rewards:
        rewards.check({"openai/gsm8k"})
        result = rewards.score(SAMPLES[:2])
    assert result.scores == [1 + 3.5, 0 + 3.5]
    assert result.metrics["rule_score"] == [1.0, 0.0]
    assert result.metrics["rm_score"] == [7.0, 7.0]
    assert result.answers == ["42", "41"]


def test_added_rules_still_need_a_scorer():
    with manager(Lengths(), combine="add") as rewards:
        with pytest.raises(RewardError, match="No scorer for data_source 'unheard/of'"):
            rewards.check({"unheard/of"})


def test_the_model_scores_once_when_the_result_is_asked_for():
    model = Lengths()
    with manager(model) as rewards:
        handle = rewards.submit(SAMPLES)
        assert model.seen == []
        assert handle.result() is handle.result()
    assert len(model.seen) == 1


def test_too_many_failures_of_the_model_stop_the_run():
    with manager(Lengths()) as rewards:
        with pytest.raises(RewardError, match=r"2 of 3 rewards failed, more than reward\.max_failure_ratio=0\.5"):
            rewards.score([SAMPLES[2], SAMPLES[0], SAMPLES[2]])
