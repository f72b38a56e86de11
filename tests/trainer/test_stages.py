"""Stages of a step with engines that are stand-ins: columns worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.fakes import (
    EOS,
    STEP,
    FakeEngine,
    FakeRewards,
    FakeRollout,
    FakeTokenizer,
    FakeTracker,
    batch_of,
    config,
)

from verl.algorithms.inputs import PolicyLossOptions
from verl.algorithms.kl import AdaptiveKLController, FixedKLController
from verl.algorithms.registry import AdvantageEstimator, Needs, get_advantage, get_policy_loss
from verl.config.batch_plan import BatchPlan
from verl.core.rollout_engine.api import SamplingParams
from verl.data.batch import Ragged, SampleBatch
from verl.errors import RewardError
from verl.rewards.types import RewardInput, RewardResult
from verl.trainer import stages
from verl.trainer.steplog import StepLog

SMALL = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2")


def fake_run(*overrides, **fields):
    """What the stages read of a run."""
    cfg = config(*SMALL, *overrides)
    defaults = {
        "config": cfg,
        "plan": BatchPlan.make(cfg, num_prompts=8),
        "estimator": get_advantage(cfg.algorithm.adv_estimator),
        "policy_loss": get_policy_loss(cfg.actor_rollout_ref.actor.policy_loss.loss_mode),
        "tokenizer": FakeTokenizer(),
        "kl_control": None,
        "tracker": FakeTracker(),
        "roles": SimpleNamespace(
            actor=FakeEngine(), ref=None, critic=None, rollout=FakeRollout(version=3), same_numerics=False
        ),
        "step": STEP,
    }
    return SimpleNamespace(**{**defaults, **fields})


def prompts(*ids):
    return SampleBatch(
        {
            "uid": [f"p{i}" for i in range(len(ids))],
            "prompt_ids": Ragged.from_rows(ids),
            "data_source": ["sums"] * len(ids),
            "ground_truth": [str(i) for i in range(len(ids))],
            "extra_info": [{"index": i} for i in range(len(ids))],
            "raw_prompt": [[{"role": "user", "content": f"question {i}"}] for i in range(len(ids))],
        }
    )


# --- generation and rewards ---------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_lie_side_by_side_each_with_its_stream():
    run = fake_run(rewards=FakeRewards({}))
    batch, _ = stages.generate(run, prompts([5], [6, 7]), SamplingParams(max_tokens=8, n=2), first_stream=20)
    assert batch["uid"] == ["p0", "p0", "p1", "p1"]
    assert [r.tolist() for r in batch["prompt_ids"].rows()] == [[5], [5], [6, 7], [6, 7]]
    assert [r.tolist() for r in batch["response_ids"].rows()] == [[20, EOS], [30, EOS], [21, EOS], [31, EOS]]
    assert batch["finish_reason"] == ["length", "length", "stop", "stop"]
    assert batch["policy_version"].tolist() == [3] * 4
    assert batch["response_mask"].values.all()
    assert batch["rollout_log_probs"].values.tolist() == [-0.5, -0.25] * 4
    assert [r.prompt_ids for r in run.roles.rollout.requests] == [[5], [6, 7]]


def test_training_sampling_follows_the_config():
    run = fake_run(
        "data.max_response_length=9",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.top_k=5",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.seed=11",
    )
    assert stages.training_sampling(run) == SamplingParams(9, 2, 0.7, 5, 0.9, (EOS,), True, 11)


@pytest.mark.parametrize(("more", "ids"), [(None, (EOS,)), (4, (4, EOS)), ([4, 2, EOS], (2, 4, EOS))])
def test_stop_tokens_are_the_tokenizers_and_the_generation_configs(more, ids):
    run = fake_run()
    run.roles.actor.generation_config = SimpleNamespace(eos_token_id=more)
    assert stages.stop_token_ids(run) == ids


def test_rewards_get_the_text_without_special_tokens_and_the_rows_truth():
    run = fake_run(rewards=FakeRewards({"20": 0.0, "30": 1.0}))
    batch, rewards = stages.generate(run, prompts([5]), SamplingParams(max_tokens=8, n=2), first_stream=20)
    log = StepLog()
    scored = stages.collect_rewards(run, batch, rewards, log)
    question = [{"role": "user", "content": "question 0"}]
    assert run.rewards.seen[1] == RewardInput("sums", "30", "0", {"index": 0}, 2, question)
    assert scored["score"].tolist() == [0.0, 1.0]
    assert log.metrics == {"reward/failures": 0}


def test_further_numbers_of_a_reward_become_columns_where_every_sample_has_them():
    result = RewardResult(
        [1.0, 0.0], {"format": [1.0, 0.5], "length": [None, 4.0]}, failed=[1], failure_messages=["oh no"]
    )
    run, log = fake_run("reward.failure_score=-1"), StepLog()
    batch = stages.collect_rewards(run, batch_of([[1], [1]]), SimpleNamespace(result=lambda: result), log)
    assert run.tracker.notices == ["1 of 2 rewards failed and count as reward.failure_score=-1. The first: oh no"]
    assert batch["reward/format"].tolist() == [1.0, 0.5]
    assert "reward/length" not in batch
    assert log.metrics == {"reward/failures": 1, "reward/format": 0.75, "reward/length": 4.0}


def test_a_rewards_own_failures_do_not_hide_those_that_are_counted():
    result, log = RewardResult([1.0, 0.0], {"failures": [7.0, 7.0]}, [1], ["oh no"]), StepLog()
    stages.collect_rewards(fake_run(), batch_of([[1], [1]]), SimpleNamespace(result=lambda: result), log)
    assert log.metrics == {"reward/failures": 1}


def test_an_estimator_of_several_rewards_asks_for_them():
    handle = SimpleNamespace(result=lambda: RewardResult([1.0, 0.0], {"format": [1.0, None]}))
    with pytest.raises(RewardError, match=r"adv_estimator=gdpo works on several rewards.*dict"):
        stages.collect_rewards(fake_run("algorithm.adv_estimator=gdpo"), batch_of([[1], [1]]), handle, StepLog())


def test_remax_compares_with_the_greedy_response():
    run = fake_run("algorithm.adv_estimator=remax", rewards=FakeRewards({"99": 0.25}))
    asked = prompts([5], [6])
    batch = batch_of([[1], [1], [1], [1]], uids=["p0", "p0", "p1", "p1"])
    log = StepLog()
    run.rewards.scores = {"99": 0.25}
    assert stages.add_baselines(run, batch, asked, log)["baseline_score"].tolist() == [0.25] * 4
    assert log.metrics["critic/baseline_score/mean"] == 0.25
    assert {r.sampling.temperature for r in run.roles.rollout.requests} == {0.0}
    assert {r.sampling.n for r in run.roles.rollout.requests} == {1}
    assert stages.add_baselines(fake_run(), batch, asked, log) is batch


# --- log-probs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "fields", "needed"),
    [
        ((), {}, False),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=2",), {}, True),
        (("actor_rollout_ref.actor.ppo_epochs=2",), {}, True),
        ((), {"kl_control": FixedKLController(0.1)}, True),
        (("actor_rollout_ref.actor.use_kl_loss=True",), {}, False),
        (("algorithm.rollout_correction.rollout_is=token",), {}, True),
        (("algorithm.adv_estimator=optimal_token_baseline",), {}, True),
        (("algorithm.adv_estimator=rloo",), {}, False),
        (("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",), {}, True),
    ],
)
def test_when_old_log_probs_are_needed(overrides, fields, needed):
    assert stages.needs_old_log_probs(fake_run(*overrides, **fields)) is needed


def test_only_what_the_algorithm_needs_is_computed():
    batch = batch_of([[1, 1], [1]], rollout_log_probs=[[-1.0, -1.0], [-1.0]], policy_version=[3, 3])
    log = StepLog()
    assert stages.add_log_probs(fake_run(), batch, log).columns.keys() == batch.columns.keys()
    assert log.metrics == {}

    run = fake_run("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.temperature=0.5")
    run.roles.ref, run.roles.critic = FakeEngine(log_prob=-1.5), FakeEngine(value=0.75)
    full = stages.add_log_probs(run, batch, log)
    assert full["old_log_probs"].values.tolist() == [-1.0] * 3
    assert full["ref_log_probs"].values.tolist() == [-1.5] * 3
    assert full["values"].values.tolist() == [0.75] * 3
    # Trainer and reference look at the policy at the temperature that sampled.
    assert run.roles.actor.asked == run.roles.ref.asked == ["log_probs at 0.5"]
    assert log.metrics["actor/entropy"] == 2.0
    assert {"timing/old_log_prob", "timing/ref", "timing/values"} <= log.metrics.keys()


@pytest.mark.parametrize(
    ("bypass", "same", "version", "expected"),
    [
        ("null", True, 3, True),
        ("null", True, 2, False),  # sampled by older weights
        ("null", False, 3, False),
        ("True", False, 2, True),
        ("False", True, 3, False),
    ],
)
def test_rollout_log_probs_stand_for_the_old_ones(bypass, same, version, expected):
    two_updates = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    run = fake_run(two_updates, f"algorithm.rollout_correction.bypass_mode={bypass}")
    run.roles.same_numerics = same
    batch = batch_of([[1], [1]], rollout_log_probs=[[-0.5], [-0.25]], policy_version=[3, version])
    full = stages.add_log_probs(run, batch, StepLog())
    assert full["old_log_probs"].values.tolist() == ([-0.5, -0.25] if expected else [-1.0, -1.0])
    assert run.roles.actor.asked == ([] if expected else ["log_probs at 1.0"])


@pytest.mark.parametrize("bypass", ["False", "True"])
def test_an_estimator_that_reads_squares_gets_them_from_the_same_forward(bypass):
    words = ["algorithm.adv_estimator=optimal_token_baseline", f"algorithm.rollout_correction.bypass_mode={bypass}"]
    run, log = fake_run(*words), StepLog()
    batch = batch_of([[1, 1], [1]], rollout_log_probs=[[-0.5, -0.5], [-0.25]], policy_version=[3, 3])
    full = stages.add_log_probs(run, batch, log)
    assert full["sum_pi_squared"].values.tolist() == [0.25] * 3
    assert full["old_log_probs"].values.tolist() == ([-0.5, -0.5, -0.25] if bypass == "True" else [-1.0] * 3)
    assert run.roles.actor.asked == ["statistics at 1.0"]
    assert log.metrics["actor/entropy"] == 2.0


@pytest.mark.parametrize(
    ("difference", "alarm", "warns"), [(0.2, "0.1", True), (0.05, "0.1", False), (0.2, "null", False)]
)
def test_probabilities_that_differ_much_are_said(difference, alarm, warns):
    said = []
    run = fake_run(f"actor_rollout_ref.rollout.mismatch_alarm={alarm}", tracker=SimpleNamespace(notice=said.append))
    log = StepLog()
    log.add({"training/rollout_probs_diff_mean": difference})
    stages.warn_of_mismatch(run, log)
    assert ["differ by 0.200" in text for text in said] == ([True] if warns else [])


# --- rewards of tokens and advantages -----------------------------------------------------------------------------------


def test_score_is_on_the_last_token_of_the_policy():
    batch = batch_of([[1, 1, 0], [0, 1, 1], [0, 0], [1]], score=[1.0, 2.0, 3.0, -1.0])
    rewards = stages.token_rewards(fake_run(), batch, StepLog())["token_rewards"]
    assert [r.tolist() for r in rewards.rows()] == [[0, 1, 0], [0, 0, 2], [0, 0], [-1]]


def test_kl_penalty_is_subtracted_at_every_policy_token():
    batch = batch_of(
        [[1, 1, 0], [1]],
        score=[1.0, 0.0],
        old_log_probs=[[-1.0, -2.0, -9.0], [-1.0]],
        ref_log_probs=[[-1.5, -1.0, -1.0], [-3.0]],
    )
    run, log = fake_run(kl_control=FixedKLController(0.1)), StepLog()
    rewards = stages.token_rewards(run, batch, log)["token_rewards"]
    # k1 = old - ref: 0.5, -1 | 2. The score is on the second token of the first sample.
    torch.testing.assert_close(rewards.values, torch.tensor([-0.05, 1 + 0.1, 0.0, -0.2]))
    assert log.metrics["actor/reward_kl_penalty"] == pytest.approx(((0.5 - 1) / 2 + 2) / 2)
    assert log.metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_adaptive_coefficient_counts_from_the_next_step():
    batch = batch_of([[1], [1]], score=[0.0, 0.0], old_log_probs=[[-1.0], [-1.0]], ref_log_probs=[[-3.0], [-3.0]])
    run = fake_run(kl_control=AdaptiveKLController(0.1, target=1.0, horizon=10))
    log = StepLog()
    stages.token_rewards(run, batch, log)
    assert log.metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert run.kl_control.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_groups_are_found_by_uid_wherever_their_samples_lie():
    batch = batch_of([[1, 1], [1, 0], [1], [1]], uids="abab", score=[1.0, 0.0, 0.0, 4.0])
    run = fake_run("algorithm.norm_adv_by_std_in_grpo=False")
    advantages = stages.add_advantages(run, batch, StepLog())["advantages"]
    assert [r.tolist() for r in advantages.rows()] == [[0.5, 0.5], [-2.0, 0.0], [-0.5], [2.0]]


def test_gae_reads_gamma_and_lambda_of_the_config():
    batch = batch_of([[1, 1]], score=[1.0], values=[[0.5, 0.25]])
    run = fake_run("algorithm.adv_estimator=gae", "algorithm.gamma=0.5", "algorithm.lam=0.5")
    returns = stages.add_advantages(run, batch, StepLog())["returns"].values
    # delta = 0 + 0.5 * 0.25 - 0.5 = -0.375, then 1 - 0.25 = 0.75; advantages -0.375 + 0.25 * 0.75, 0.75; plus values.
    torch.testing.assert_close(returns, torch.tensor([-0.1875 + 0.5, 0.75 + 0.25]))


def test_rollout_correction_is_truncated_at_the_threshold():
    batch = batch_of(
        [[1, 1], [1, 0]],
        uids="aa",
        score=[1.0, 0.0],
        old_log_probs=[[-1.0, -1.0], [-1.0, -1.0]],
        rollout_log_probs=[[-1.0, -3.0], [-1.0 - math.log(1.5), -1.0]],
    )
    run, log = fake_run("algorithm.rollout_correction.rollout_is=token"), StepLog()
    weights = stages.add_advantages(run, batch, log)["rollout_is_weights"]
    torch.testing.assert_close(weights.values, torch.tensor([1.0, 2.0, 1.5, 0.0]))
    assert any("is" in name for name in log.metrics)


def test_a_reward_of_several_parts_reaches_the_estimator():
    batch = batch_of([[1], [1]], uids="aa", score=[1.0, 0.0]).with_columns(
        **{"reward/a": torch.tensor([1.0, 0.0]), "reward/b": torch.tensor([0.0, 1.0])}
    )
    seen = {}

    def estimate(inputs, options):
        seen.update(inputs.reward_components)
        return inputs.token_rewards, inputs.token_rewards

    estimator = AdvantageEstimator("mine", estimate, Needs(reward_components=True))
    stages.add_advantages(fake_run(estimator=estimator), batch, StepLog())
    assert {name: column.tolist() for name, column in seen.items()} == {"a": [1.0, 0.0], "b": [0.0, 1.0]}


def test_a_reward_without_the_parts_that_are_wanted_is_told():
    batch = batch_of([[1], [1]], uids="aa", score=[1.0, 0.0], **{"reward/a": [1.0, 0.0]})
    run = fake_run("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]")
    with pytest.raises(RewardError, match=r"gdpo_reward_keys: .* did not return b for every sample. It returned a"):
        stages.add_advantages(run, batch, StepLog())


def test_weights_of_gdpo_reach_it_by_name():
    columns = {"reward/a": [1.0, 0.0], "reward/b": [0.0, 1.0], "reward/c": [0.0, 1.0]}
    batch = batch_of([[1], [1]], uids="aa", score=[1.0, 0.0], **columns)
    words = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[b,a]"]
    # With weights 1 and 1 the two rewards cancel; the better of b wins as soon as b weighs more.
    for weights, expected in (("null", [0.0, 0.0]), ("[2,1]", [-(0.5**0.5), 0.5**0.5])):
        run = fake_run(*words, f"algorithm.gdpo_reward_weights={weights}")
        out = stages.add_advantages(run, batch, StepLog())["advantages"].values.tolist()
        assert out == pytest.approx(expected, abs=1e-4)


# --- updates ------------------------------------------------------------------------------------------------------------


def test_mini_batches_are_consecutive_in_every_pass():
    batch = batch_of([[1]] * 5)
    parts = [b["uid"] for b in stages.mini_batches(batch, 2, epochs=2)]
    assert parts == [["0", "1"], ["2", "3"], ["4"]] * 2


def test_shuffled_mini_batches_repeat_by_seed_and_hold_every_sample_once():
    batch = batch_of([[1]] * 16)

    def order(seed):
        return [uid for b in stages.mini_batches(batch, 4, 2, shuffle_seed=seed) for uid in b["uid"]]

    assert order(5) == order(5)
    assert order(5) != order(6)
    first, second = order(5)[:16], order(5)[16:]
    assert sorted(first) == sorted(second) == sorted(batch["uid"])
    assert first != second
    assert first != batch["uid"]


def test_averages_of_a_steps_updates():
    updates = [
        {"pg_loss": 1.0, "lr": 0.1, "skipped_updates": 1.0, "ratio_max": 3.0},
        {"pg_loss": 2.0, "lr": 0.2, "skipped_updates": 1.0, "ratio_max": 2.0},
    ]
    assert stages.averages(updates) == {"pg_loss": 1.5, "lr": 0.2, "skipped_updates": 2.0, "ratio_max": 3.0}


def trainable(**columns):
    rows = [[1, 1]] * 8
    full = {"advantages": [[1.0, 1.0]] * 8, "returns": [[1.0, 1.0]] * 8, "rollout_log_probs": [[-1.0, -1.0]] * 8}
    return batch_of(rows, **full, **columns)


def test_actor_is_updated_mini_batch_by_mini_batch():
    actor = "ppo_mini_batch_size=2 ppo_epochs=2 clip_ratio=0.1 clip_ratio_high=0.3 entropy_coeff=0.01"
    run = fake_run(
        *(f"actor_rollout_ref.actor.{word}" for word in actor.split()),
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "data.max_response_length=10",
    )
    log = StepLog()
    stages.update_actor(run, trainable(old_log_probs=[[-1.0, -1.0]] * 8, score=[1.0] * 8), log)
    trained = run.roles.actor.trained
    assert [len(batch) for batch, _ in trained] == [4] * 4
    for batch, loss in trained:
        # Four sequences, divided by the longest response that the config allows.
        torch.testing.assert_close(batch["loss_weights"].values, torch.full((8,), 1 / 40))
        assert "score" not in batch
        assert (loss.options, loss.temperature) == (PolicyLossOptions(0.1, 0.3, 3.0), 0.7)
        assert (loss.entropy_coeff, loss.kl_coef) == (0.01, 0.0)
    assert log.metrics["actor/pg_loss"] == 2.5
    assert log.metrics["actor/lr"] == pytest.approx(0.4)
    assert log.metrics["actor/entropy"] == log.metrics["actor/entropy_loss"] == 1.5
    assert "actor/kl_coef" not in log.metrics


@pytest.mark.parametrize(("skipped", "said"), [([1.0, 1.0], True), ([1.0, 0.0], False)])
def test_a_step_of_skipped_updates_alone_is_said(skipped, said):
    run, left = fake_run("actor_rollout_ref.actor.ppo_mini_batch_size=2"), iter(skipped)
    run.roles.actor.train_batch = lambda batch, loss: {"entropy_loss": 1.5, "skipped_updates": next(left)}
    stages.update_actor(run, trainable(old_log_probs=[[-1.0, -1.0]] * 8), StepLog())
    assert ["a step of the actor changed nothing" in notice for notice in run.tracker.notices] == [True] * said


def test_kl_loss_has_its_coefficient_and_estimator():
    run = fake_run("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.02")
    log = StepLog()
    stages.update_actor(run, trainable(ref_log_probs=[[-1.0, -1.0]] * 8), log)
    loss = run.roles.actor.trained[0][1]
    assert (loss.kl_coef, loss.kl_kind, log.metrics["actor/kl_coef"]) == (0.02, "low_var_kl", 0.02)


def test_critic_is_updated_with_its_own_sizes():
    run = fake_run("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=2", "critic.cliprange_value=0.25")
    log = StepLog()
    stages.update_critic(run, trainable(values=[[0.0, 0.0]] * 8), log)
    assert log.metrics == {}  # a run without a value model
    run.roles.critic = FakeEngine()
    stages.update_critic(run, trainable(values=[[0.0, 0.0]] * 8), log)
    assert [len(batch) for batch, _ in run.roles.critic.trained] == [4, 4]
    assert run.roles.critic.trained[0][1].clip_range == 0.25
    assert log.metrics["critic/grad_norm"] == 3.0
