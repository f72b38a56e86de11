"""Runs that really train: from random weights to a high reward within seconds."""

import pytest
from tests.e2e.runs import curve, metrics, overrides, sevens_reward, train

pytestmark = pytest.mark.e2e
LR = {"actor_rollout_ref__actor__optim__lr": 3e-3}


def test_grpo_learns(tiny_model, tiny_data, tmp_path):
    changes = {**LR, "trainer__total_training_steps": 20, **sevens_reward(tmp_path)}
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    scores = curve(tmp_path / "run", "critic/score/mean")
    assert len(scores) == 20
    assert scores[0] < 0.2  # one token in seventeen is a seven
    assert sum(scores[-3:]) / 3 > scores[0] + 0.4
    before, after = curve(tmp_path / "run", "val/test_score/tiny/arithmetic")
    assert after > before + 0.5
    # What the tokens were sampled with and what the trainer computes for them are the same numbers.
    assert max(curve(tmp_path / "run", "training/rollout_probs_diff_max")) < 1e-4


def test_ppo_with_a_critic_learns(tiny_model, tiny_data, tmp_path):
    changes = {
        **LR,
        "algorithm__adv_estimator": "gae",
        "actor_rollout_ref__rollout__n": 2,
        "data__train_batch_size": 16,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
        "critic__optim__lr": 1e-2,
        "trainer__critic_warmup": 2,
        "trainer__total_training_steps": 25,
        **sevens_reward(tmp_path),
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    scores, lines = curve(tmp_path / "run", "critic/score/mean"), metrics(tmp_path / "run")
    assert sum(scores[-3:]) / 3 > sum(scores[:2]) / 2 + 0.4
    # The value head begins at zero, learns alone for two steps, and comes to foretell the score.
    assert lines[1]["critic/values/max"] == lines[1]["critic/values/min"] == 0
    assert ["actor/pg_loss" in line for line in lines[1:4]] == [False, False, True]
    assert curve(tmp_path / "run", "critic/values/mean")[-1] == pytest.approx(scores[-1], abs=0.3)
    assert (tmp_path / "run" / "global_step_25" / "critic" / "model").is_dir()


def test_transformers_generates_too(tiny_model, tiny_data, tmp_path):
    engines = {}
    for name in ("native", "hf"):
        changes = {"actor_rollout_ref__rollout__name": name, **LR, **sevens_reward(tmp_path)}
        assert train(overrides(tiny_model, tiny_data, tmp_path / name, **changes)) == 0
        engines[name] = metrics(tmp_path / name)
        assert max(curve(tmp_path / name, "training/rollout_probs_diff_max")) < 1e-4
    # Greedy, the untrained model says the same with either engine.
    for name in ("val/test_score/tiny/arithmetic", "val/response_length/mean"):
        assert engines["native"][0][name] == engines["hf"][0][name]


def test_micro_batches_do_not_change_the_run(tiny_model, tiny_data, tmp_path):
    runs = {"packed": {}, "small": {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 3}}
    for name, changes in runs.items():
        changes = {**changes, "trainer__total_training_steps": 3, **LR, **sevens_reward(tmp_path)}
        assert train(overrides(tiny_model, tiny_data, tmp_path / name, **changes)) == 0
    for one, other in zip(metrics(tmp_path / "packed"), metrics(tmp_path / "small"), strict=True):
        for key in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            if key in one:
                assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6)


def test_ones_own_estimator_gets_the_critic_that_it_asks_for(tiny_model, tiny_data, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from verl.algorithms.registry import Needs, register_advantage\n"
        "@register_advantage('above_the_value', needs=Needs(critic=True))\n"
        "def above_the_value(inputs, options):\n"
        "    return inputs.token_rewards - inputs.values, inputs.token_rewards\n"
    )
    changes = {
        "trainer__plugins": path,
        "algorithm__adv_estimator": "above_the_value",
        "data__val_files": "null",
        **sevens_reward(tmp_path),
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    assert all("critic/vf_loss" in line for line in metrics(tmp_path / "run"))
