"""Starting runs of the trainer, in this process or in one of their own, and reading what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path

from verl.config.command import run_main
from verl.tracking.files import METRICS, read_lines
from verl.trainer.main_ppo import main

SEVENS = '''
def sevens(data_source, solution_str, ground_truth, extra_info):
    """Share of sevens among four characters: learned from scratch in seconds."""
    return min(solution_str.count("7"), 4) / 4
'''


def overrides(model: Path, data: Path, out: Path, **changes) -> list[str]:
    """A run of seconds. changes: further keys, with "__" for the dot (trainer__save_freq=1); None leaves one out."""
    words = {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "test.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 4,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 4,
        "reward.num_workers": 1,  # each costs its start
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": out,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [f"{name}={value}" for name, value in words.items() if value is not None]


def sevens_reward(folder: Path) -> dict[str, object]:
    """Overrides that choose the reward above; its file is written into `folder`."""
    path = folder / "sevens.py"
    path.write_text(SEVENS)
    return {"custom_reward_function__path": path, "custom_reward_function__name": "sevens"}


def train(arguments: list[str]) -> int:
    """The command in this process; its exit status."""
    return run_main(main, arguments)


def start(arguments: list[str], folder: Path) -> subprocess.Popen:
    """The command in a process group of its own, as a terminal starts it; working directory `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(arguments: list[str], folder: Path, seconds: float = 180) -> tuple[int, str, str]:
    """The command to its end: (exit status, stdout, stderr)."""
    process = start(arguments, folder)
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return read_lines(folder / METRICS)


def comparable(lines: list[dict]) -> list[str]:
    """Lines as JSON without what measures time or memory: equal texts are equal bits."""
    return [
        json.dumps({k: v for k, v in line.items() if not k.startswith(("timing", "perf/"))}, sort_keys=True)
        for line in lines
    ]


def curve(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(folder) if name in line]
