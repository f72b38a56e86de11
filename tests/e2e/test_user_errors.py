"""Users' mistakes: status 2, one message that says what and where and what to write, no traceback."""

import importlib.util
import json

import pytest
from tests.e2e.runs import overrides, run, train

pytestmark = pytest.mark.e2e

CASES = {
    "misspelled key": (["actor_rollout_ref.rollout.temprature=0.7"], ["temprature", "actor_rollout_ref.rollout.temperature"]),
    "misspelled estimator": (["algorithm.adv_estimator=grppo"], ["algorithm.adv_estimator", "grppo", "grpo"]),
    "wrong type": (["data.train_batch_size=many"], ["data.train_batch_size", "many"]),
    "missing file": (["data.train_files=/nowhere/train.parquet"], ["data.train_files", "/nowhere/train.parquet"]),
    "dataset smaller than the batch": (["data.train_batch_size=300"], ["data.train_batch_size=300", "256"]),
    "wrong model path": (["actor_rollout_ref.model.path=/nowhere/model"], ["actor_rollout_ref.model.path=/nowhere/model"]),
    "more devices than there are": (["trainer.n_gpus_per_node=4096"], ["trainer.n_gpus_per_node=4096", "asked: trainer", "free:"]),
    "wrong folder to resume from": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_3"],
        ["trainer.resume_from_path=/nowhere/global_step_3", "no such folder"],
    ),
    "logger that is not installed": (["trainer.logger=[console,nosuch]"], ["trainer.logger=nosuch", "wandb"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mistake(case, tiny_model, tiny_data, tmp_path, capfd):
    words, parts = CASES[case]
    assert train([*overrides(tiny_model, tiny_data, tmp_path / "run"), *words]) == 2
    check(capfd.readouterr().err, parts)
    assert not (tmp_path / "run").exists()


def check(err: str, parts: list[str]):
    assert "Traceback" not in err
    assert "error: " in err
    for part in parts:
        assert part in err


def test_unknown_data_source(tiny_model, tiny_data, tmp_path, capfd):
    path = tmp_path / "puzzles.jsonl"
    row = {"data_source": "my/puzzles", "prompt": [{"role": "user", "content": "1+1="}]}
    path.write_text((json.dumps({**row, "reward_model": {"ground_truth": "2"}}) + "\n") * 8)
    assert train([*overrides(tiny_model, tiny_data, tmp_path / "run"), f"data.train_files={path}"]) == 2
    check(capfd.readouterr().err, ["my/puzzles", "custom_reward_function.path"])


def test_wrong_name_of_the_reward_function(tiny_model, tiny_data, tmp_path, capfd):
    path = tmp_path / "reward.py"
    path.write_text("def compute_reward(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n")
    words = [f"custom_reward_function.path={path}", "custom_reward_function.name=compute_rewards"]
    assert train([*overrides(tiny_model, tiny_data, tmp_path / "run"), *words]) == 2
    check(capfd.readouterr().err, ["compute_rewards", "reward.py", "compute_reward"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed(tiny_model, tiny_data, tmp_path, capfd):
    words = [*overrides(tiny_model, tiny_data, tmp_path / "run"), "actor_rollout_ref.rollout.name=vllm"]
    assert train(words) == 2
    check(capfd.readouterr().err, ["rollout.name=vllm", "pip install", "rollout.name=native"])


def test_a_reward_that_always_fails_stops_the_run_with_its_traceback(tiny_model, tiny_data, tmp_path, capfd):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    words = [f"custom_reward_function.path={path}", "trainer.val_before_train=False"]
    assert train([*overrides(tiny_model, tiny_data, tmp_path / "run"), *words]) == 2
    err = capfd.readouterr().err
    assert "32 of 32 rewards failed" in err
    assert "ZeroDivisionError" in err
    assert err.index("error: ") < err.index("nothing was saved yet: the same command starts anew")
    assert "verl/trainer" not in err  # the user's frames, not ours


def test_in_a_process_of_its_own(tiny_model, tiny_data, tmp_path):
    words = [*overrides(tiny_model, tiny_data, tmp_path / "run"), "algorithm.adv_estimator=grppo"]
    status, out, err = run(words, tmp_path)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    check(err, ["algorithm.adv_estimator", "grpo"])
