"""Dynamic sampling with engines that are stand-ins: which groups stay, what waits for the next step, and when it ends."""

import pytest
import torch
from tests.trainer.fakes import FakeRewards
from tests.trainer.test_stages import fake_run, prompts

from verl.data.sampler import PromptSampler
from verl.errors import RewardError
from verl.rewards.types import RewardResult
from verl.trainer import stages
from verl.trainer.checkpoints import _plain, _samples
from verl.trainer.groups import draw_by_reward
from verl.trainer.sampling import NoSpreadError, fill_step
from verl.trainer.steplog import StepLog

FILTER = "algorithm.filter_groups.enable=True"


class Prompts:
    """Eight prompts, one token each."""

    def __len__(self):
        return 8

    def batch(self, indices, step):
        return prompts(*([i] for i in indices)).with_columns(uid=[f"{step}-{i}" for i in indices])


class Rewards(FakeRewards):
    """Prompt i's two samples differ where i is in `spread`; every group reports its own numbers."""

    def __init__(self, spread, metrics=None):
        super().__init__({}, metrics)
        self.spread = spread

    def score(self, samples):
        self.seen += samples
        texts = [int(s.solution_str) for s in samples]
        # The fake rollout writes stream + 10 k: streams count prompts, in the order in which they are drawn.
        scores = [float(text >= 10) if text % 10 in self.spread else 1.0 for text in texts]
        metrics = {name: [value(text) for text in texts] for name, value in self.metrics.items()}
        return RewardResult(scores, metrics)


def run_of(spread, *overrides, metrics=None, wanted=2, batch=2, **fields):
    words = (FILTER, f"data.train_batch_size={wanted}", f"actor_rollout_ref.actor.ppo_mini_batch_size={wanted}")
    sampler = PromptSampler(8, batch, shuffle=False)
    more = {"prompts": Prompts(), "sampler": sampler, "rewards": Rewards(spread, metrics), "surplus": None, "step": 0}
    return fake_run(*words, *overrides, **{**more, **fields})


def drawn(batch):
    return [ids.tolist()[0] for ids in batch["prompt_ids"].rows()]


def test_groups_without_spread_are_replaced_and_the_surplus_waits():
    run, log = run_of({1, 2, 3, 5}), StepLog()
    assert drawn(fill_step(run, log)) == [1, 1, 2, 2]
    assert drawn(run.surplus) == [3, 3]
    assert log.metrics["train/num_gen_batches"] == 2
    assert log.metrics["train/surplus_prompts"] == 1
    assert log.metrics["reward/filtered_groups"] == pytest.approx(1 / 4)
    # Scores 1, 1 | 0, 1 | 0, 1 | 0, 1: of all that were sampled, not of those that stay.
    assert log.metrics["reward/sampled_score"] == pytest.approx(5 / 8)
    run.step, log = 1, StepLog()
    assert drawn(fill_step(run, log)) == [3, 3, 5, 5]
    assert run.surplus is None
    assert log.metrics["train/num_gen_batches"] == 1


def test_a_surplus_that_fills_the_step_needs_no_generation():
    run = run_of({0, 1, 2, 3}, batch=4)
    fill_step(run, StepLog())
    asked, log = len(run.roles.rollout.requests), StepLog()
    assert drawn(fill_step(run, log)) == [2, 2, 3, 3]
    assert len(run.roles.rollout.requests) == asked
    assert log.metrics["train/num_gen_batches"] == 0


def test_uids_and_streams_differ_between_the_draws_of_a_step():
    run = run_of({7}, wanted=1)
    batch = fill_step(run, StepLog())
    assert [r.stream for r in run.roles.rollout.requests] == list(range(8))
    assert batch["uid"] == ["1-7-3", "1-7-3"]
    assert run.sampler.drawn == 8


def test_the_metric_decides():
    flat = {"acc": lambda text: 1.0, "format": lambda text: float(text >= 10)}
    run = run_of({0, 1}, "algorithm.filter_groups.metric=format", metrics=flat)
    assert drawn(fill_step(run, StepLog())) == [0, 0, 1, 1]
    with pytest.raises(NoSpreadError, match="differ in acc"):
        fill_step(run_of({0, 1}, "algorithm.filter_groups.metric=acc", metrics=flat), StepLog())
    with pytest.raises(RewardError, match=r"metric=length: .* It returned score, acc, format"):
        fill_step(run_of({0, 1}, "algorithm.filter_groups.metric=length", metrics=flat), StepLog())


def test_the_end_is_told_with_its_numbers_and_nothing_is_lost():
    run = run_of({3})
    with pytest.raises(NoSpreadError) as error:
        fill_step(run, StepLog())
    for part in (
        "step 1",
        "of 8 prompts in 4 batches",
        "1 have samples that differ",
        "train_batch_size=2",
        "all training prompts",
    ):
        assert part in str(error.value)
    assert drawn(run.surplus) == [3, 3]
    with pytest.raises(NoSpreadError, match=r"max_num_gen_batches=1 is reached"):
        fill_step(run_of({3}, "algorithm.filter_groups.max_num_gen_batches=1"), StepLog())


def test_the_surplus_survives_a_checkpoint(tmp_path):
    run = run_of({0, 1, 2, 3}, batch=4, metrics={"acc": lambda text: float(text)})
    fill_step(run, StepLog())
    torch.save(_plain(run.surplus), tmp_path / "surplus.pt")
    back = _samples(torch.load(tmp_path / "surplus.pt", weights_only=True))
    assert back.columns.keys() == run.surplus.columns.keys()
    assert "ground_truth" not in back.columns
    assert drawn(back) == [2, 2, 3, 3]
    assert back["uid"] == run.surplus["uid"]
    assert back["score"].tolist() == [0.0, 1.0] * 2
    assert back["reward/acc"].tolist() == run.surplus["reward/acc"].tolist()


def test_samples_of_an_older_policy_get_log_probs_of_before():
    run = run_of({0, 1}, batch=2)
    batch = fill_step(run, StepLog())
    run.step = int(batch["policy_version"][0])
    assert "old_log_probs" not in stages.add_log_probs(run, batch, StepLog())  # one update, this very policy
    run.step += 1
    assert stages.add_log_probs(run, batch, StepLog())["old_log_probs"].values.tolist() == [-1.0] * 8  # the trainer's
    run.roles.same_numerics = True
    old = stages.add_log_probs(run, batch, StepLog())["old_log_probs"]
    assert old.values.tolist() == batch["rollout_log_probs"].values.tolist()  # the ratio is to the policy that sampled


def test_policy_filtration_draws_by_reward():
    scores = torch.tensor([0.0, 1.0, 0.0, 3.0])
    batch = prompts([0], [1], [2], [3]).with_columns(uid=["a", "a", "b", "b"], score=scores)
    assert draw_by_reward(fake_run(), batch) is batch
    run = fake_run("algorithm.use_pf_ppo=True")
    one, two = draw_by_reward(run, batch), draw_by_reward(run, batch)
    assert len(one) == 4
    assert drawn(one) == drawn(two)
    assert set(drawn(one)) <= {1, 3}  # |score|^2 of the others is 0
    run.step += 1
    draws = []
    for run.step in range(200):
        draws += drawn(draw_by_reward(run, batch))
    assert draws.count(3) / len(draws) == pytest.approx(0.9, abs=0.04)  # 9 of 1 + 9
