"""Runs that are killed, interrupted and resumed: the same numbers as the run that was left alone."""

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.e2e.runs import comparable, metrics, overrides, run, sevens_reward, start, train

from verl.tracking.files import METRICS

pytestmark = pytest.mark.e2e
TRACKER = "latest_checkpointed_iteration.txt"

# Everything that a step's numbers could depend on: shuffled prompts and mini-batches, a moving KL coefficient, a
# learning rate that decays, several epochs of a few prompts.
STATEFUL = {
    "actor_rollout_ref__actor__optim__lr": 3e-3,
    "actor_rollout_ref__actor__optim__lr_scheduler_type": "cosine",
    "actor_rollout_ref__actor__shuffle": True,
    "algorithm__kl_ctrl__kl_coef": 0.05,
    "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__kl_ctrl__horizon": 100,
    "data__train_max_samples": 20,
    "trainer__total_epochs": 9,
}
CRITIC = {**STATEFUL, "algorithm__adv_estimator": "gae", "critic__optim__lr": 1e-2, "actor_rollout_ref__rollout__n": 2}


@pytest.mark.parametrize("changes", [STATEFUL, CRITIC], ids=["grpo", "ppo"])
def test_a_run_goes_on_from_any_step_to_the_same_bits(changes, tiny_model, tiny_data, tmp_path):
    changes = {**changes, "trainer__total_training_steps": 4, "trainer__save_freq": 1, "trainer__test_freq": 2}
    whole = tmp_path / "whole"
    assert train(overrides(tiny_model, tiny_data, whole, **changes, **sevens_reward(tmp_path))) == 0
    expected = comparable(metrics(whole))
    assert len(set(expected)) == 5  # validation before, and four steps
    for step in (1, 3):
        resumed = tmp_path / f"from_{step}"
        words = overrides(tiny_model, tiny_data, resumed, **changes, **sevens_reward(tmp_path))
        path = whole / f"global_step_{step}"
        assert train([*words, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}/"]) == 0
        assert comparable(metrics(resumed)) == expected[step + 1 :]


def test_a_line_lost_between_checkpoint_and_log_comes_back(tiny_model, tiny_data, tmp_path):
    changes = {**STATEFUL, "trainer__save_freq": 1, **sevens_reward(tmp_path)}
    words = overrides(tiny_model, tiny_data, tmp_path / "run", **changes)
    assert train(words) == 0
    expected = comparable(metrics(tmp_path / "run"))
    # The state of a run that was killed after it wrote global_step_1 and before it logged the step.
    shutil.rmtree(tmp_path / "run" / "global_step_2")
    (tmp_path / "run" / TRACKER).write_text("1")
    path = tmp_path / "run" / METRICS
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert train(words) == 0
    assert comparable(metrics(tmp_path / "run")) == expected


def kill_while_writing(process, folder: Path) -> None:
    """SIGKILL `process` once it is writing `folder`: it is held still first, to be sure that it has not finished."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if folder.is_dir():
            process.send_signal(signal.SIGSTOP)
            if folder.is_dir():
                process.kill()
                process.wait()
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.002)
    raise AssertionError(f"{folder} was never seen: {process.communicate(timeout=5)}")


def wait_until(true, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("in_a_thread", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_to_the_same_bits(
    in_a_thread, tiny_model, tiny_data, tmp_path
):
    changes = {**STATEFUL, "trainer__total_training_steps": 6, "trainer__save_freq": 2, "trainer__test_freq": 3}
    changes["actor_rollout_ref__actor__checkpoint__async_save"] = in_a_thread
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = {f: overrides(tiny_model, tiny_data, f, **changes, **sevens_reward(tmp_path)) for f in (whole, broken)}
    killed = start(words[broken], tmp_path)
    workers = []

    def find_workers():
        workers[:] = psutil.Process(killed.pid).children(recursive=True)
        return len(workers) > 1

    assert wait_until(find_workers)
    kill_while_writing(killed, broken / ".writing_global_step_4")
    assert (broken / ".writing_global_step_4").is_dir()
    assert not (broken / "global_step_4").exists()
    assert (broken / TRACKER).read_text() == "2"
    assert wait_until(lambda: not any(worker.is_running() for worker in workers), 20)  # none is left behind

    status, out, err = run(words[broken], tmp_path)
    assert status == 0, err
    assert f"resumed from {broken}/global_step_2: 2 steps are done" in out
    assert "not written to the end" in err
    assert train(words[whole]) == 0
    assert comparable(metrics(broken)) == comparable(metrics(whole))
    assert [line["step"] for line in metrics(broken)] == list(range(7))
    assert [path.name for path in broken.glob(".*")] == [".lock"]


def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_goes_on(tiny_model, tiny_data, tmp_path):
    changes = {"trainer__total_training_steps": 500, "data__val_files": "null", **sevens_reward(tmp_path)}
    words = overrides(tiny_model, tiny_data, tmp_path / "run", **changes)
    process = start(words, tmp_path)
    assert wait_until(lambda: len(metrics(tmp_path / "run")) >= 2, 120), process.communicate(timeout=1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: reward workers get it too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finishing this step and saving" in err
    assert "Traceback" not in err
    done = metrics(tmp_path / "run")[-1]["step"]
    assert f"run the same command again to go on from the newest checkpoint, {tmp_path}/run/global_step_{done}" in out
    assert (tmp_path / "run" / TRACKER).read_text() == str(done)
    assert all(line["reward/failures"] == 0 for line in metrics(tmp_path / "run"))

    assert train([*words, f"trainer.total_training_steps={done + 1}"]) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, done + 2))


def test_ctrl_c_in_the_last_validation_leaves_it_saved_and_the_same_command_makes_it(tiny_model, tiny_data, tmp_path):
    """Each validation reward takes a minute until the file `quick` is there."""
    (tmp_path / "slow.py").write_text(SLOW_TO_VALIDATE.format(folder=tmp_path))
    reward = {"custom_reward_function__path": tmp_path / "slow.py", "custom_reward_function__name": "slow"}
    words = overrides(tiny_model, tiny_data, tmp_path / "run", trainer__val_before_train=False, **reward)
    process = start(words, tmp_path)
    assert wait_until((tmp_path / "validating").exists, 120), process.communicate(timeout=1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "leaving the validation" in err
    assert "Traceback" not in err
    assert f"the newest checkpoint, {tmp_path}/run/global_step_2" in out
    *_, last = metrics(tmp_path / "run")
    assert last["step"] == 2
    assert "val/response_length/mean" not in last

    (tmp_path / "quick").touch()
    assert train(words) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert metrics(tmp_path / "run")[-1].items() > last.items()
    assert metrics(tmp_path / "run")[-1]["val/response_length/mean"] > 0


SLOW_TO_VALIDATE = """
import time
from pathlib import Path

def slow(data_source, solution_str, ground_truth, extra_info):
    if extra_info["split"] == "test" and not Path("{folder}/quick").exists():
        Path("{folder}/validating").touch()
        time.sleep(60)
    return 0.0
"""
