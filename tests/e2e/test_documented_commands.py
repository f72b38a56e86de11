"""The commands of the guide that users come with, as printed there, on a small model and small files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.runs import metrics, overrides, train
from tests.tutorial_reward import TUTORIAL

from verl.config.command import handle_flags

pytestmark = pytest.mark.e2e

GRPO_ON_GSM8K = """
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=256 \\
    data.max_prompt_length=512 \\
    data.max_response_length=512 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.name=native \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    trainer.logger=console \\
    trainer.val_before_train=False \\
    trainer.n_gpus_per_node=1 \\
    trainer.nnodes=1 \\
    trainer.save_freq=10 \\
    trainer.test_freq=10 \\
    trainer.total_epochs=15 \\
    trainer.total_training_steps=2
"""

ON_TWO_NODES = """
algorithm.adv_estimator=grpo data.train_files=/root/data/gsm8k/train.parquet data.val_files=/root/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
actor_rollout_ref.model.path=Qwen/Qwen2.5-32B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 trainer.nnodes=2
custom_reward_function.path=/path/to/custom_reward.py custom_reward_function.name=compute_reward
actor_rollout_ref.actor.fsdp_config.param_offload=True
"""


def test_grpo_on_gsm8k_as_printed(terse_model, gsm8k_data, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k").symlink_to(gsm8k_data)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "MODEL": str(terse_model), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", GRPO_ON_GSM8K], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    steps = {line.split(" - ")[0]: line for line in done.stdout.splitlines() if line.startswith("step:")}
    assert list(steps) == ["step:1", "step:2"]
    for name in [
        "timing/gen",
        "actor/reward_kl_penalty",
        "response_length/mean",
        "actor/entropy_loss",
        "actor/pg_loss",
    ]:
        assert all(f" - {name}:" in line for line in steps.values()), name
    assert " - val/test_score/openai/gsm8k:" in steps["step:2"]
    assert "256 prompts x 5" in done.stdout
    folder = tmp_path / "checkpoints" / "verl_examples" / "gsm8k"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (folder / "global_step_2" / "actor" / "huggingface" / "config.json").is_file()
    first = metrics(folder)[0]
    assert 4 < first["response_length/mean"] < 9  # the end tokens of the generation config count
    # The policy is still the reference: the first step has no KL to pay for.
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert first["actor/reward_kl_penalty_coeff"] == 0.001


def test_keys_of_the_run_on_two_nodes_compose(capsys):
    with pytest.raises(SystemExit) as end:
        handle_flags(["--cfg", "job", *ON_TWO_NODES.split()])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for line in ("n_gpus_per_node: 8", "nnodes: 2", "name: vllm", "use_kl_loss: true", "param_offload: true"):
        assert line in printed


def test_the_custom_reward_word_for_word_on_gsm8k(byte_model, gsm8k_data, tmp_path):
    path = tmp_path / "custom_reward.py"
    path.write_text(TUTORIAL, encoding="utf-8")
    changes = {
        "data__max_prompt_length": 512,
        "data__max_response_length": 16,
        "data__val_max_samples": 8,
        "actor_rollout_ref__actor__use_kl_loss": True,
        "custom_reward_function__path": path,
        "custom_reward_function__name": "compute_reward",
        "trainer__total_training_steps": 3,
    }
    assert train(overrides(byte_model, gsm8k_data, tmp_path / "run", **changes)) == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["reward/failures"] == 0 for line in lines[1:])
    assert all(0 <= line["critic/score/mean"] <= 1 for line in lines[1:])
    assert lines[-1]["val/test_score/openai/gsm8k"] == 0  # a random model
    assert lines[-1]["prompt_length/mean"] > 100  # one token a byte of real text


def test_the_custom_reward_gives_the_point(tmp_path):
    from verl.config.schema import CustomRewardConfig, RewardConfig
    from verl.rewards.manager import RewardManager
    from verl.rewards.types import RewardInput

    path = tmp_path / "custom_reward.py"
    path.write_text(TUTORIAL, encoding="utf-8")
    manager = RewardManager(RewardConfig(num_workers=1), CustomRewardConfig(str(path), "compute_reward"))
    texts = ["6 * 7 = 42\n#### 42", "#### 1,042", "#### 41", "42"]
    try:
        manager.check({"openai/gsm8k"})
        scores = manager.score([RewardInput("openai/gsm8k", t, g) for t, g in zip(texts, ["42", "1042", "42", "42"])])
    finally:
        manager.close()
    assert scores.scores == [1.0, 1.0, 0.0, 0.0]
