"""The GSM8K examples compose, and overrides after them win."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "estimator", "prompts", "samples"), [("grpo.sh", "grpo", 160, 8), ("ppo.sh", "gae", 256, 4)]
)
def test_composes(script, estimator, prompts, samples, tmp_path):
    python3 = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"MODEL": "some/model", "DATA": str(tmp_path), "PATH": python3}
    command = ["bash", str(ROOT / "examples/gsm8k" / script), "trainer.test_freq=3", "--cfg", "job"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["algorithm"]["adv_estimator"] == estimator
    assert (config["data"]["train_batch_size"], config["actor_rollout_ref"]["rollout"]["n"]) == (prompts, samples)
    assert config["data"]["train_files"] == f"{tmp_path}/train.parquet"
    assert config["actor_rollout_ref"]["model"]["path"] == "some/model"
    assert config["trainer"]["test_freq"] == 3
