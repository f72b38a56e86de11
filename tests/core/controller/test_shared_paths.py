from pathlib import Path

import pytest
import ray
from tests.core.controller.test_resources import config_of

from verl.core.controller.shared_paths import (
    CRITIC,
    POLICY,
    REWARD_MODEL,
    _ask,
    check_seen,
    local_paths,
    with_absolute_paths,
)
from verl.errors import ConfigError


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Relative paths of the critic and the judge, an absolute one of the reward model, an id for the policy."""
    monkeypatch.chdir(tmp_path)
    for name in ("critic", "scorer"):
        (tmp_path / name).mkdir()
    (tmp_path / "judge.py").touch()
    words = ["actor_rollout_ref.model.path=some/id", "critic.model.path=./critic", "algorithm.adv_estimator=gae"]
    words += ["reward_model.enable=True", f"reward_model.model.path={tmp_path}/scorer"]
    return config_of(*words, "reward_model.judge.path=judge.py")


def test_local_paths_are_absolute_and_ids_are_none(config, tmp_path):
    assert local_paths(config, POLICY) == {}
    assert local_paths(config, CRITIC) == {"critic.model.path": tmp_path / "critic"}
    expected = {"reward_model.model.path": tmp_path / "scorer", "reward_model.judge.path": tmp_path / "judge.py"}
    assert local_paths(config, REWARD_MODEL) == expected


def test_a_worker_in_another_folder_finds_them(config, tmp_path):
    there = with_absolute_paths(config)
    assert there.critic.model.path == f"{tmp_path}/critic"
    assert there.reward_model.judge.path == f"{tmp_path}/judge.py"
    assert there.actor_rollout_ref.model.path == "some/id"
    assert there.actor_rollout_ref.model.tokenizer_path is None
    assert config.critic.model.path == "./critic"


def test_a_machine_that_lacks_one_is_named():
    paths = {"critic.model.path": Path("/a/critic"), "reward_model.model.path": Path("/a/scorer")}
    seen = {"n1": [True, True], "n2": [True, False]}
    check_seen(paths, {"n1": "10.0.0.1"}, lambda node, asked: seen[node])
    with pytest.raises(ConfigError) as error:
        check_seen(paths, {"n1": "10.0.0.1", "n2": "10.0.0.2"}, lambda node, asked: seen[node])
    assert str(error.value) == (
        "reward_model.model.path=/a/scorer is not there on 10.0.0.2. It has to be on a file system that all machines share, "
        "at the same path."
    )


@pytest.mark.e2e
def test_ray_asks_the_machine(tmp_path):
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert _ask(ray.get_runtime_context().get_node_id(), [tmp_path, tmp_path / "none"]) == [True, False]
    finally:
        ray.shutdown()
