"""Runs on several CPU workers of Ray, held to the same run in one process."""

import os
import signal
import threading
import time

import psutil
import pytest
import ray
from tests.e2e.runs import curve, metrics, overrides, sevens_reward, train

from verl.config.compose import compose
from verl.core.checkpoint_engine.disk import read_full
from verl.core.controller.cluster import Cluster
from verl.errors import ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("cluster")]

ROLLOUT = "actor_rollout_ref__rollout"
SEPARATE = {f"{ROLLOUT}__nnodes": 1, f"{ROLLOUT}__n_gpus_per_node": 1}
APART = {
    "critic__nnodes": 1,
    "critic__n_gpus_per_node": 2,
    "critic__checkpoint__async_save": True,
    "actor_rollout_ref__ref__nnodes": 1,
    "actor_rollout_ref__ref__n_gpus_per_node": 1,
}
SHARED = {"trainer__n_gpus_per_node": 2}
COMPARED = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "response_length/mean")


@pytest.fixture
def words(tiny_model, tiny_data, tmp_path):
    """Command lines of runs in folders of their own: words("two", **changes)."""

    def make(name, **changes):
        settings = {
            "data__val_files": "null",
            "actor_rollout_ref__actor__optim__lr": 1e-2,
            "trainer__total_training_steps": 3,
            "trainer__save_freq": 1,
            **sevens_reward(tmp_path),
            **changes,
        }
        return overrides(tiny_model, tiny_data, tmp_path / name, **settings)

    return make


def assert_alike(one, other, steps=3):
    for name in COMPARED:
        first, second = curve(one, name), curve(other, name)
        assert len(first) == len(second) == steps, name
        assert second == pytest.approx(first, rel=2e-3, abs=1e-5), name
    assert max(curve(one, "actor/grad_norm")) > 0.01  # or nothing was learned, and equal numbers say little


def test_shared_and_separate_devices_train_as_one_process_does(words, tmp_path, capsys):
    extras = {
        "algorithm__adv_estimator": "gae",
        "critic__optim__lr": 1e-2,
        "actor_rollout_ref__actor__use_kl_loss": True,
    }
    verify = {f"{ROLLOUT}__checkpoint_engine__verify": True}
    assert train(words("one", **extras)) == 0
    assert train(words("shared", **extras, **SHARED, **verify)) == 0
    assert train(words("separate", **extras, **SHARED, **SEPARATE, **verify)) == 0
    assert train(words("apart", **extras, **APART, trainer__total_training_steps=2)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 CPU process for actor, rollout; 2 CPU processes for critic; 1 CPU process for ref." in shown
    assert train(words("apart", **extras)) == 0  # goes on with the checkpoint in one process
    for other in ("shared", "separate", "apart"):
        assert_alike(tmp_path / "one", tmp_path / other)
        assert curve(tmp_path / other, "critic/vf_loss") == pytest.approx(
            curve(tmp_path / "one", "critic/vf_loss"), rel=2e-3
        )
    received, received_apart = (metrics(tmp_path / n)[-1]["perf/weights_received_gb"] for n in ("shared", "separate"))
    whole = sum(t.nbytes for t in read_full(tmp_path / "shared/global_step_3/actor/model").values()) / 2**30
    assert received == pytest.approx(whole / 2, rel=0.05)
    assert received_apart == pytest.approx(whole, rel=0.05)  # of the rollout worker: more than any trainer's


@pytest.mark.slow
def test_two_workers_that_share_the_tokens_train_alike_and_their_checkpoint_goes_on_in_one_process(words, tmp_path):
    extras = {"actor_rollout_ref__actor__use_kl_loss": True}
    sequences = {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2, **SHARED}
    sequences["actor_rollout_ref__actor__checkpoint__async_save"] = True
    assert train(words("one", **extras)) == 0
    assert train(words("mixed", **extras, **sequences, trainer__total_training_steps=2)) == 0
    assert train(words("mixed", **extras)) == 0
    assert_alike(tmp_path / "one", tmp_path / "mixed")
    assert metrics(tmp_path / "mixed")[-1]["training/global_step"] == 3


def test_heads_that_devices_cannot_share_are_told_before_workers_start(words, capsys):
    odd = {"trainer__n_gpus_per_node": 3, "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 3}
    more = {"data__train_batch_size": 3, "actor_rollout_ref__actor__ppo_mini_batch_size": 3}
    assert train(words("odd", **odd, **more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "ulysses_sequence_parallel_size=3 does not divide the 4 attention heads of the model" in error
    assert error.endswith("Sizes that do: 1, 2, 4.")


def kill_a_worker_after(folder, *steps):
    """In a thread: SIGKILL to one worker each time the run has logged one of these steps."""

    def watch():
        for step in steps:
            while not (curve(folder, "training/global_step") or [0])[-1] >= step:
                time.sleep(0.05)
            mine = psutil.Process().children(recursive=True)  # other runs of this machine have workers too
            os.kill([p.pid for p in mine if "ray::Worker" in " ".join(p.cmdline())][-1], signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def test_a_killed_worker_is_one_restart_and_another_the_end_with_the_last_checkpoint_named(words, tmp_path, capsys):
    run = tmp_path / "killed"
    kill_a_worker_after(run, 1, 4)
    changes = {"trainer__total_training_steps": 500, "trainer__max_restarts": 1}
    status = train(words("killed", **SHARED, **changes))
    error = capsys.readouterr().err
    assert status == 1, error
    assert "restart 1 of trainer.max_restarts=1" in error
    last = error.splitlines()[-1]
    assert last.startswith("error: worker ")
    assert "(actor, rollout), process" in last
    assert "ended by itself" in last
    saved = sorted(run.glob("global_step_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    assert f"The last checkpoint is {saved[-1]}" in last
    assert "Traceback" not in error
    assert train(words("unbroken", trainer__total_training_steps=4)) == 0
    for name in COMPARED:  # nothing that was saved is lost or done twice
        assert curve(run, name)[:4] == pytest.approx(curve(tmp_path / "unbroken", name), rel=2e-3, abs=1e-5)


ASYNC = {
    "trainer__pipeline": "fully_async",
    f"{ROLLOUT}__nnodes": 1,
    f"{ROLLOUT}__n_gpus_per_node": 2,
    "trainer__total_training_steps": 8,
}


@pytest.mark.slow
def test_a_worker_killed_while_it_generates_is_one_restart_and_nothing_is_lost(words, tmp_path, capsys):
    run = tmp_path / "killed"
    kill_a_worker_after(run, 2)
    status = train(words("killed", **ASYNC, trainer__max_restarts=1))
    error = capsys.readouterr().err
    assert status == 0, error
    assert "restart 1 of trainer.max_restarts=1" in error
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    scores, ages = (curve(run, name) for name in ("critic/score/mean", "training/staleness_max"))
    assert scores[-1] > scores[0] + 0.2
    assert {0, 1} <= set(ages)


def test_what_a_worker_finds_wrong_is_the_users_message(words, capsys):
    too_long = {"data__max_prompt_length": 100_000, "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 200_000}
    assert train(words("long", **SHARED, **too_long)) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert "max_position_embeddings" in error


def test_devices_that_another_run_holds_are_said_to_be_missing(words, capsys):
    @ray.remote(num_cpus=1.5)
    class Other:
        def here(self):
            return True

    other = Other.remote()
    assert ray.get(other.here.remote())
    started = time.monotonic()
    assert train(words("late", **SHARED)) == 2
    error = capsys.readouterr().err
    assert "less than this run asks for" in error
    assert "asked: trainer (actor, rollout)" in error
    assert time.monotonic() - started < 30
    ray.kill(other)


def test_an_address_without_a_cluster(monkeypatch):
    ray.shutdown()
    config = compose(["data.train_files=t", "ray_kwargs.ray_init.address=127.0.0.1:1"], notify=lambda text: None)
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:1.*ray start --head"):
        Cluster(config)


@pytest.mark.slow
def test_a_reward_model_has_a_worker_of_its_own(words, tmp_path, tiny_classifier):
    changes = {
        "reward_model__enable": True,
        "reward_model__model__path": tiny_classifier,
        "trainer__total_training_steps": 1,
        "custom_reward_function__path": None,
        "custom_reward_function__name": None,
    }
    assert train(words("one", **changes)) == 0
    assert train(words("two", **changes, **SHARED)) == 0
    [one], [two] = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert two["reward/rm_score"] == pytest.approx(one["reward/rm_score"], rel=1e-3)
    assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=2e-3)
