"""What the asynchronous pipelines refuse, and knobs without effect."""

import pytest

from verl.config.compose import compose
from verl.config.validate import validate
from verl.errors import ConfigError

ASYNC = "trainer.pipeline=fully_async"
ROLLOUT = "actor_rollout_ref.rollout"
MINI = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]

GAE = ["algorithm.adv_estimator=gae", "async_training.require_batches=1"]


def checked(*words):
    return validate(compose(list(words), notify=lambda text: None))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["algorithm.filter_groups.enable=True"], ["filter_groups", "trainer.pipeline=sync"]),
        (["algorithm.adv_estimator=remax"], ["remax", "trainer.pipeline=sync", "rloo"]),
        (["trainer.n_gpus_per_node=2"], ["on 2 devices", f"{ROLLOUT}.nnodes=1"]),
        (["async_training.staleness_threshold=inf"], ["staleness_threshold=inf", "finite"]),
        ([*MINI, "async_training.require_batches=3"], ["require_batches=3 x ppo_mini_batch_size=16 is 48", "64"]),
        ([*MINI, "async_training.require_batches=2", "actor_rollout_ref.actor.ppo_epochs=2"], ["ppo_epochs=2"]),
        ([*MINI, *GAE, "critic.ppo_mini_batch_size=32"], ["16 prompts at a time", "critic.ppo_mini_batch_size=32"]),
        ([*MINI, *GAE, "critic.ppo_epochs=2"], ["critic.ppo_epochs=2"]),
    ],
)
def test_problems(words, parts):
    with pytest.raises(ConfigError) as raised:
        checked(ASYNC, *words)
    assert [part for part in parts if part not in str(raised.value)] == []


@pytest.mark.parametrize(
    "words",
    [
        [ASYNC],
        ["trainer.pipeline=one_step_off", "async_training.watchdog_seconds=5"],
        [ASYNC, *MINI, "async_training.require_batches=2", "async_training.staleness_threshold=0.5"],
        [ASYNC, f"{ROLLOUT}.name=vllm"],
        [ASYNC, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2"],
        [ASYNC, "algorithm.adv_estimator=gae"],
        [ASYNC, *MINI, *GAE],
    ],
)
def test_what_is_fine_needs_no_notice(words):
    assert checked(*words) == []


def test_knobs_that_a_pipeline_does_not_read():
    (notice,) = checked("async_training.staleness_threshold=2", "async_training.watchdog_seconds=5")
    assert "staleness_threshold=2.0, watchdog_seconds=5.0: no effect with trainer.pipeline=sync" in notice
    (notice,) = checked("trainer.pipeline=one_step_off", "async_training.partial_rollout=False")
    assert "partial_rollout=False: no effect with trainer.pipeline=one_step_off" in notice
