"""Every algorithm by its name, and what stands around them, from the command line through two steps of training."""

import pytest
from tests.e2e.runs import comparable, curve, metrics, overrides, train

from verl.algorithms.registry import list_advantages, list_policy_losses
from verl.trainer.algorithm_index import builtin_advantages, builtin_policy_losses

pytestmark = pytest.mark.e2e

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Sevens among four characters, and two further numbers."""
    sevens = min(solution_str.count("7"), 4) / 4
    return {"score": sevens, "acc": sevens, "short": len(solution_str) < 4}
'''

A = "actor_rollout_ref__actor__"
FAST = {
    "data__val_files": "null",
    "actor_rollout_ref__model__enable_gradient_checkpointing": False,
    f"{A}optim__lr": 3e-3,
}


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return {"custom_reward_function__path": path}


@pytest.fixture
def run(tiny_model, tiny_data, tmp_path, reward):
    """Train two steps; returns the lines of metrics.jsonl."""

    def go(name="run", **changes):
        words = overrides(tiny_model, tiny_data, tmp_path / name, **{**FAST, **reward, **changes})
        assert train(words) == 0
        return metrics(tmp_path / name)

    return go


def learns(lines):
    return all(line["actor/grad_norm"] > 0 and line["actor/skipped_updates"] == 0 for line in lines)


@pytest.mark.parametrize("name", builtin_advantages())
def test_every_estimator_trains(name, run):
    lines = run(algorithm__adv_estimator=name, algorithm__norm_adv_by_std_in_grpo=name != "grpo_passk")
    assert [line["step"] for line in lines] == [1, 2]
    assert learns(lines)
    assert ("critic/vf_loss" in lines[0]) == (name == "gae")


@pytest.mark.parametrize("name", builtin_policy_losses())
def test_every_policy_loss_trains(name, run):
    # Three samples a micro-batch of sixteen: losses that look at the whole mini-batch have to cope.
    lines = run(**{f"{A}policy_loss__loss_mode": name, f"{A}ppo_micro_batch_size_per_gpu": 3})
    assert len(lines) == 2
    assert learns(lines)


def test_these_are_all_names():
    assert set(builtin_advantages()) <= set(list_advantages())
    assert set(builtin_policy_losses()) <= set(list_policy_losses())
    assert len(builtin_advantages()) >= 11
    assert len(builtin_policy_losses()) >= 11


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "low_var_kl+"])
def test_every_kl_estimator_trains(kind, run):
    lines = run(**{f"{A}use_kl_loss": True, f"{A}kl_loss_type": kind, f"{A}kl_loss_coef": 0.1})
    assert learns(lines)
    assert all("actor/kl_loss" in line for line in lines)


def test_rollout_correction_weighs_and_rejects(run):
    correction = "algorithm__rollout_correction__"
    lines = run(
        **{
            f"{correction}rollout_is": "token",
            f"{correction}rollout_is_threshold": "0.5_5.0",
            f"{correction}rollout_rs": "seq_max_k2",
            f"{correction}rollout_rs_threshold": 0.1,
        }
    )
    assert learns(lines)
    # The native engine computes what the trainer does: nothing is weighed or left out.
    assert all(line["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-4) for line in lines)
    assert all(line["rollout_corr/rollout_rs_masked_fraction"] == 0 for line in lines)


DAPO = {
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "acc",
    "data__gen_batch_size": 12,
    "reward__reward_manager__name": "dapo",
    "reward__reward_kwargs__overlong_buffer_cfg__enable": True,
    "reward__reward_kwargs__overlong_buffer_cfg__len": 2,
    "reward__reward_kwargs__overlong_buffer_cfg__log": True,
    f"{A}clip_ratio_high": 0.28,
}


def test_dapo_trains_and_resumes_to_the_same_numbers(run, tiny_model, tiny_data, tmp_path, reward):
    lines = run("whole", **DAPO, trainer__total_training_steps=4)
    assert learns(lines)
    assert [line["reward/groups_without_spread"] for line in lines] == [0] * 4
    assert max(line["train/surplus_prompts"] for line in lines) > 0
    assert 0 < lines[0]["reward/filtered_groups"] < 1
    assert all(line["reward/overlong_reward"] < 0 for line in lines if "reward/overlong_reward" in line)
    # A step that ends in the middle of a surplus goes on with it.
    run("halves", **DAPO, trainer__total_training_steps=2)
    resumed = run("halves", **DAPO, trainer__total_training_steps=4)
    assert comparable(resumed) == comparable(lines)


def test_a_step_that_cannot_be_filled_ends_the_run_with_a_checkpoint(tiny_model, tiny_data, tmp_path, reward, capsys):
    changes = {**FAST, **reward, **DAPO, "algorithm__filter_groups__metric": "flat", "trainer__total_training_steps": 4}
    path = tmp_path / "flat.py"
    path.write_text(REWARD.replace('"acc"', '"flat": 1 if CALLS.tick() else sevens, "acc"') + FLAT)
    changes["custom_reward_function__path"] = path
    changes["reward__num_workers"] = 1
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 2
    assert "cannot be filled" in capsys.readouterr().err
    done = len(curve(tmp_path / "run", "actor/grad_norm"))
    assert done >= 1
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == str(done)


FLAT = '''
class Calls:
    """True once the first 100 samples are scored."""
    def __init__(self):
        self.number = 0
    def tick(self):
        self.number += 1
        return self.number > 100

CALLS = Calls()
'''


def test_policy_filtration_trains(run):
    assert learns(run(algorithm__use_pf_ppo=True, algorithm__adv_estimator="gae"))
