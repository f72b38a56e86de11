"""Validation with a rollout engine and rewards that are stand-ins."""

from types import SimpleNamespace

import pytest
from tests.trainer.fakes import EOS, FakeEngine, FakeRewards, FakeRollout, FakeTokenizer, FakeTracker, config
from tests.trainer.test_stages import prompts

from verl.core.rollout_engine.api import SamplingParams
from verl.data.batch import SampleBatch
from verl.trainer import validation


class FakePrompts:
    def __init__(self, batch: SampleBatch):
        self._batch = batch

    def __len__(self):
        return len(self._batch)

    def batch(self, indices, step):
        return self._batch.select(indices)


def fake_run(rewards, *overrides, sources=("sums", "sums", "words")):
    batch = prompts([5], [6], [7]).with_columns(data_source=list(sources))
    logged: list = []
    tracker = FakeTracker()
    tracker.log_generations = lambda rows, step: logged.append((rows, step))
    return SimpleNamespace(
        config=config("data.max_response_length=8", *overrides),
        val_prompts=FakePrompts(batch),
        rewards=rewards,
        tokenizer=FakeTokenizer(),
        roles=SimpleNamespace(rollout=FakeRollout(), actor=FakeEngine()),
        tracker=tracker,
        step=4,
        logged=logged,
    )


def test_without_validation_files_there_is_nothing_to_report():
    assert validation.validate(SimpleNamespace(val_prompts=None)) == {}


def test_greedy_unless_told_to_sample():
    key = "actor_rollout_ref.rollout"
    given = [f"{key}.val_kwargs.temperature=0.6", f"{key}.val_kwargs.top_k=5", f"{key}.val_kwargs.top_p=0.9"]
    seed = 7 + validation.SEED_OFFSET
    run = fake_run(None, f"{key}.seed=7", *given)
    assert validation.sampling(run) == SamplingParams(8, 1, 0.0, -1, 1.0, (EOS,), seed=seed)
    run = fake_run(None, f"{key}.seed=7", f"{key}.val_kwargs.do_sample=True", f"{key}.val_kwargs.n=3", *given)
    assert validation.sampling(run) == SamplingParams(8, 3, 0.6, 5, 0.9, (EOS,), seed=seed)


@pytest.mark.parametrize("size", ["null", "2"])
def test_mean_score_by_data_source(size):
    sampled = (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        f"data.val_batch_size={size}",
    )
    scores = {"0": 1.0, "10": 0.0, "1": 1.0, "11": 1.0, "2": 0.25, "12": 0.5}
    run = fake_run(FakeRewards(scores), *sampled)
    values = validation.validate(run)
    assert values == {
        "val/test_score/sums": 0.75,
        "val-core/sums/reward/mean@2": 0.75,
        "val/test_score/words": 0.375,
        "val-core/words/reward/mean@2": 0.375,
        "val-core/sums/reward/best@2/mean": 1.0,
        "val-aux/sums/reward/worst@2/mean": 0.5,
        "val-core/words/reward/best@2/mean": 0.5,
        "val-aux/words/reward/worst@2/mean": 0.25,
        "val/response_length/mean": 2.0,
        "val/reward_failures": 0,
    }
    [(rows, step)] = run.logged
    assert step == 4
    assert rows[1] == {"prompt": "5", "response": "10", "score": 0.0, "ground_truth": "0"}


def test_further_numbers_of_the_reward_have_names_of_their_own():
    rewards = FakeRewards({"99": 0.5}, metrics={"reward": [9.0, 9.0, 9.0], "format": [1.0, None, 0.0]}, failed=(1,))
    run = fake_run(rewards)
    values = validation.validate(run)
    assert values["val/test_score/sums"] == 0.5
    assert values["val-core/sums/reward/mean@1"] == 0.5
    assert values["val-aux/sums/reward/mean@1"] == 9.0
    assert values["val-aux/sums/format/mean@1"] == 1.0
    assert values["val-aux/words/format/mean@1"] == 0.0
    assert values["val/reward_failures"] == 1
    assert run.tracker.notices == ["1 of 3 rewards failed and count as reward.failure_score=0. The first: oh no"]


def test_accuracy_is_a_core_number_and_votes_count_where_answers_are_known():
    acc = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    answers = ["7", "8", "7", "7", None, None]
    scores = dict.fromkeys(["0", "10", "1", "11", "2", "12"], 0.5)
    rewards = FakeRewards(scores, metrics={"acc": acc}, answers=answers)
    key = "actor_rollout_ref.rollout.val_kwargs"
    values = validation.validate(fake_run(rewards, f"{key}.do_sample=True", f"{key}.temperature=1", f"{key}.n=2"))
    assert values["val-core/sums/acc/mean@2"] == 0.75
    assert values["val-core/sums/acc/best@2/mean"] == 1.0
    assert values["val-core/sums/acc/maj@2/mean"] == 0.75  # a tie counts half
    assert "val-core/words/acc/best@2/mean" in values
    assert "val-core/words/acc/maj@2/mean" not in values  # nobody's answer is known


def test_samples_shown_are_spread_over_the_set():
    run = fake_run(FakeRewards({"99": 0.0}))
    run.val_prompts = FakePrompts(prompts(*[[i] for i in range(40)]))
    validation.validate(run)
    [(rows, _)] = run.logged
    assert [row["prompt"] for row in rows] == [str(i) for i in range(0, 40, 5)]
