"""Pipelines in which generation and training overlap: they learn the same, lose nothing, and never hang."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.e2e.runs import comparable, curve, metrics, overrides, sevens_reward, start, train
from tests.e2e.test_resume import wait_until

from verl.trainer.pipelines import PIPELINES

pytestmark = pytest.mark.e2e
LR = {"actor_rollout_ref__actor__optim__lr": 3e-3}
ASYNC = ("one_step_off", "fully_async")

# The first sample that comes is never scored: its worker hangs, out of reach of the time limit within.
HUNG = """
import contextlib, pathlib, signal, time

def score(data_source, solution_str, ground_truth, extra_info):
    mine, first = f"{solution_str} {ground_truth}", pathlib.Path(__file__).with_suffix(".first")
    with contextlib.suppress(FileExistsError), open(first, "x") as file:
        file.write(mine)
    if first.read_text() == mine:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(1000)
    return solution_str.count("7") / 4
"""


def without_ages(lines: list[dict]) -> list[dict]:
    """Without what the synchronous pipeline does not report."""
    new = ("queue/", "training/staleness", "training/partial_samples")
    return [{k: v for k, v in line.items() if not k.startswith(new)} for line in lines]


def test_without_staleness_the_numbers_are_those_of_the_synchronous_pipeline(tiny_model, tiny_data, tmp_path):
    runs = {
        "sync": {},
        "async": {"trainer__pipeline": "fully_async", "async_training__staleness_threshold": 0},
    }
    shared = {
        **LR,
        **sevens_reward(tmp_path),
        "actor_rollout_ref__actor__shuffle": True,
        "algorithm__kl_ctrl__kl_coef": 0.05,
        "data__train_max_samples": 20,  # two batches an epoch
        "trainer__total_training_steps": 5,
        "trainer__test_freq": 2,
    }
    for name, changes in runs.items():
        assert train(overrides(tiny_model, tiny_data, tmp_path / name, **shared, **changes)) == 0
    lines = {name: metrics(tmp_path / name) for name in runs}
    assert [line["training/staleness_max"] for line in lines["async"][1:]] == [0] * 5
    assert comparable(without_ages(lines["async"])) == comparable(lines["sync"])
    assert len(set(comparable(lines["sync"]))) == 6


def test_pipelines_learn_the_same_and_say_how_stale_their_samples_are(tiny_model, tiny_data, tmp_path):
    scores = {}
    for name in PIPELINES:
        changes = {"trainer__pipeline": name, **LR, "trainer__total_training_steps": 16, **sevens_reward(tmp_path)}
        assert train(overrides(tiny_model, tiny_data, tmp_path / name, **changes)) == 0
        before, scores[name] = curve(tmp_path / name, "val/test_score/tiny/arithmetic")
        assert before < 0.2
        assert [line["step"] for line in metrics(tmp_path / name)] == list(range(17))
    assert min(scores.values()) > 0.9
    assert max(scores.values()) - min(scores.values()) < 0.08
    for name in ASYNC:
        ages = curve(tmp_path / name, "training/staleness_max")
        assert ages[0] == 0
        assert max(ages) >= 1
        assert sum(curve(tmp_path / name, "training/staleness_mean")) > 8
        assert min(curve(tmp_path / name, "rollout_corr/eff_sample_size")) < 0.999
    assert min(curve(tmp_path / "sync", "rollout_corr/eff_sample_size")) > 0.999
    assert curve(tmp_path / "one_step_off", "training/staleness_mean") == [0.0] + [1.0] * 15


def test_a_step_in_parts_weights_now_and_then_a_correction_and_a_critic(tiny_model, tiny_data, tmp_path):
    changes = {
        "trainer__pipeline": "fully_async",
        "async_training__require_batches": 1,
        "async_training__trigger_parameter_sync_step": 2,
        "async_training__staleness_threshold": 0.5,
        "algorithm__adv_estimator": "gae",
        "algorithm__rollout_correction__rollout_is": "token",
        "critic__optim__lr": 1e-2,
        "trainer__total_training_steps": 4,
        "data__val_files": "null",
        **LR,
        **sevens_reward(tmp_path),
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    lines = metrics(tmp_path / "run")
    # Weights move after the second step: the second trains on samples of the first policy.
    assert [line["training/staleness_max"] for line in lines[:2]] == [0, 1]
    assert all(0 < line["rollout_corr/rollout_is_eff_sample_size"] <= 1 for line in lines)
    assert all(line["perf/total_num_tokens"] > 8 * 4 * 2 for line in lines)  # both parts


@pytest.mark.parametrize("name", [pytest.param("one_step_off", marks=pytest.mark.slow), "fully_async"])
def test_a_killed_run_goes_on_with_what_it_had_generated(name, tiny_model, tiny_data, tmp_path):
    changes = {
        "trainer__pipeline": name,
        "trainer__total_training_steps": 6,
        "trainer__save_freq": 2,
        "data__val_files": "null",
        **LR,
        **sevens_reward(tmp_path),
    }
    words = overrides(tiny_model, tiny_data, tmp_path / "run", **changes)
    process = start(words, tmp_path)
    try:
        assert wait_until(lambda: (tmp_path / "run" / "global_step_2").is_dir(), 120), process.communicate(timeout=1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    ahead = torch.load(tmp_path / "run" / "global_step_2" / "ahead.pt", weights_only=True)
    held = ahead["queue"]["books"]["groups"]
    assert held
    assert all(group["order"] >= 16 for group in held)  # what two steps trained on is gone
    assert train(words) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 7))
    if name == "one_step_off":  # its batches do not depend on who is faster
        unbroken = overrides(tiny_model, tiny_data, tmp_path / "unbroken", **changes)
        assert train(unbroken) == 0
        lines = [without_ages(metrics(tmp_path / name)) for name in ("run", "unbroken")]
        assert comparable(lines[0]) == comparable(lines[1])
    last = torch.load(tmp_path / "run" / "global_step_6" / "ahead.pt", weights_only=True)
    assert (last["queue"]["books"]["groups"], last["prompts"]) == ([], [])


def test_a_reward_worker_that_hangs_costs_its_samples_alone(tiny_model, tiny_data, tmp_path):
    (tmp_path / "hung.py").write_text(HUNG)
    changes = {
        "trainer__pipeline": "fully_async",
        "custom_reward_function__path": tmp_path / "hung.py",
        "custom_reward_function__name": "score",
        "reward__timeout": 0.5,
        "reward__max_failure_ratio": 1,
        "reward__num_workers": 4,
        "data__val_files": "null",
        "data__train_batch_size": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
        "actor_rollout_ref__rollout__n": 2,
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert 1 <= sum(line["reward/failures"] for line in lines) < 8


def test_weights_that_diverge_end_the_run_from_the_generators_thread(tiny_model, tiny_data, tmp_path, capsys):
    changes = {
        "trainer__pipeline": "fully_async",
        "actor_rollout_ref__actor__optim__lr": 1e30,
        "actor_rollout_ref__actor__optim__clip_grad": 1e30,
        "data__val_files": "null",
        "trainer__total_training_steps": 50,
        **sevens_reward(tmp_path),
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 2
    err = capsys.readouterr().err
    assert "The policy's logits are not finite" in err
    assert "Traceback" not in err


def test_ctrl_c_saves_at_once_and_the_same_command_goes_on(tiny_model, tiny_data, tmp_path):
    changes = {"trainer__pipeline": "fully_async", "trainer__total_training_steps": 500, "data__val_files": "null"}
    words = overrides(tiny_model, tiny_data, tmp_path / "run", **changes, **sevens_reward(tmp_path))
    process = start(words, tmp_path)
    assert wait_until(lambda: len(metrics(tmp_path / "run")) >= 2, 120), process.communicate(timeout=1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    done = metrics(tmp_path / "run")[-1]["step"]
    newest = Path(tmp_path / "run" / f"global_step_{done}")
    assert json.loads((newest / "trainer.json").read_text())["step"] == done
    assert train([*words, f"trainer.total_training_steps={done + 1}"]) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, done + 2))
