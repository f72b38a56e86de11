"""Preparing a run: every mistake is found before a model is loaded."""

import json

import pytest
from tests.trainer.fakes import config

from verl.algorithms.kl import AdaptiveKLController, FixedKLController
from verl.core.checkpoint_engine.store import CheckpointStore
from verl.errors import CheckpointError, ConfigError, DataError, RewardError, UserError
from verl.trainer import run as run_module
from verl.trainer.folder import FolderLock
from verl.trainer.run import NothingToDo, kl_controller, prepare


def overrides(model, data, out, *more):
    return [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={out}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        *more,
    ]


class Loaded(Exception):
    """A model would have been loaded."""


@pytest.mark.parametrize(
    ("words", "kind", "parts"),
    [
        (["algorithm.adv_estimator=grppo"], ConfigError, ["algorithm.adv_estimator", "grpo"]),
        (["data.train_files=nowhere/train.parquet"], DataError, ["nowhere/train.parquet", "data.train_files"]),
        (["data.train_batch_size=512"], ConfigError, ["data.train_batch_size=512", "256"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], ConfigError, ["ppo_mini_batch_size=3", "data.train_batch_size=8"]),
        (["actor_rollout_ref.model.path=/nowhere/model"], ConfigError, ["actor_rollout_ref.model.path", "/nowhere/model"]),
        (["custom_reward_function.path=/nowhere/reward.py"], RewardError, ["/nowhere/reward.py"]),
        (["data.train_files={unknown}"], RewardError, ["my/puzzles", "custom_reward_function.path"]),
        (["trainer.n_gpus_per_node=4096"], ConfigError, ["trainer.n_gpus_per_node=4096", "asked: trainer", "free:"]),
        (["critic.nnodes=1", "algorithm.adv_estimator=grpo"], ConfigError, ["critic.nnodes=1", "does not need", "Leave critic.nnodes"]),
        (["actor_rollout_ref.ref.nnodes=1"], ConfigError, ["ref.nnodes=1", "nothing in this run needs one"]),
        (
            ["algorithm.adv_estimator=gae", "critic.nnodes=64", "critic.n_gpus_per_node=64"],
            ConfigError,
            ["asked: critic (critic)", "critic.nnodes=64 x critic.n_gpus_per_node=64", "free:"],
        ),
        (["actor_rollout_ref.rollout.name=sglang"], ConfigError, ["rollout.name=sglang", "native, hf, vllm or server"]),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], ConfigError, ["tensor_model_parallel_size=2"]),
        (["trainer.device=cuda"], ConfigError, ["trainer.device=cuda"]),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_1"],
            CheckpointError,
            ["/nowhere/global_step_1"],
        ),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_a_model_is_loaded(tiny_model, tiny_data, tmp_path, monkeypatch, words, kind, parts):
    def load(*arguments):
        raise Loaded

    monkeypatch.setattr(run_module, "build_roles", load)
    if "trainer.device=cuda" in words:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    unknown = tmp_path / "unknown.jsonl"
    row = {"data_source": "my/puzzles", "prompt": [{"role": "user", "content": "1+1="}]}
    unknown.write_text(json.dumps({**row, "reward_model": {"ground_truth": "2"}}) + "\n")
    words = [word.format(unknown=unknown) for word in words]
    with pytest.raises(UserError) as error:
        prepare(config(*overrides(tiny_model, tiny_data, tmp_path / "out", *words)), [])
    assert isinstance(error.value, kind)
    for part in parts:
        assert part in str(error.value)


def test_a_folder_in_use_is_found_before_a_model_is_loaded_and_free_after_a_failure(tiny_model, tiny_data, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    words = overrides(tiny_model, tiny_data, tmp_path, f"data.train_files={empty}")
    lock = FolderLock(tmp_path)
    with pytest.raises(UserError, match="another run is writing"):
        prepare(config(*words), [])
    lock.release()
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        prepare(config(*words), [])
    FolderLock(tmp_path).release()


def test_a_run_that_finds_its_folder_in_use_leaves_what_the_other_is_writing(tiny_model, tiny_data, tmp_path):
    other = FolderLock(tmp_path / "out")
    unfinished = CheckpointStore(tmp_path / "out").begin(4).folder
    with pytest.raises(UserError, match="another run is writing"):
        prepare(config(*overrides(tiny_model, tiny_data, tmp_path / "out")), [])
    assert unfinished.is_dir()
    other.release()


def test_the_plan_and_notices_are_printed_before_a_model_is_loaded(
    tiny_model, tiny_data, tmp_path, monkeypatch, capsys
):
    def load(*arguments):
        raise Loaded

    monkeypatch.setattr(run_module, "build_roles", load)
    with pytest.raises(Loaded):
        prepare(
            config(*overrides(tiny_model, tiny_data, tmp_path / "out", "data.max_prompt_length=6")), ["mind the gap"]
        )
    said = capsys.readouterr()
    assert "8 prompts x 5" in said.out
    assert "mind the gap" in said.err
    assert "longer than data.max_prompt_length=6" in said.err


@pytest.mark.parametrize(
    ("status", "step", "left"),
    [("finished", 3, False), ("finished", 4, False), ("finished", 2, True), ("running", 3, True)],
)
def test_a_finished_run_has_nothing_to_do(tiny_model, tiny_data, tmp_path, monkeypatch, status, step, left):
    def load(*arguments):
        raise Loaded

    monkeypatch.setattr(run_module, "build_roles", load)
    with CheckpointStore(tmp_path).writing(step):
        pass
    (tmp_path / "run.json").write_text(json.dumps({"status": status}))
    words = overrides(tiny_model, tiny_data, tmp_path, "trainer.total_training_steps=3")
    with pytest.raises(Loaded if left else NothingToDo) as said:
        prepare(config(*words), [])
    if not left:
        done = "all 3 steps are done" if step == 3 else "4 steps are done, and 3 are asked for"
        assert f"nothing to do: {done}, in {tmp_path}" in str(said.value)
        assert "trainer.total_training_steps" in str(said.value)
        with pytest.raises(Loaded):  # validation alone is something to do
            prepare(config(*words, "trainer.val_only=True"), [])


def test_kl_controller_of_the_config():
    assert kl_controller(config()) is None
    assert kl_controller(config("algorithm.use_kl_in_reward=False", "algorithm.kl_ctrl.kl_coef=0.1")) is None
    fixed = kl_controller(config("algorithm.kl_ctrl.kl_coef=0.1"))
    assert isinstance(fixed, FixedKLController)
    assert fixed.coef == 0.1
    adaptive = kl_controller(
        config(
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.target_kl=0.5",
            "algorithm.kl_ctrl.horizon=100",
        )
    )
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.coef, adaptive.target, adaptive.horizon) == (0.001, 0.5, 100)
