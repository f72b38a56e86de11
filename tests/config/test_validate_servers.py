"""What the config alone tells of a run with rollout servers."""

import pytest

from verl.config.compose import compose
from verl.config.validate import validate
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"


def check(*words: str) -> list[str]:
    return validate(compose(["data.train_files=t", "data.val_files=null", *words], notify=lambda text: None))


def test_two_servers_are_fine():
    words = f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a:1,https://b:2]"
    assert check(*words) == check()
    for apart in ("trainer.n_gpus_per_node=2", "trainer.nnodes=2", "critic.nnodes=1"):
        for pipeline in ("sync", "one_step_off", "fully_async"):
            more = "algorithm.adv_estimator=gae", apart, f"trainer.pipeline={pipeline}"
            assert check(*words, *more) == check("algorithm.adv_estimator=gae")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([f"{ROLLOUT}.name=server"], "names no server"),
        ([f"{ROLLOUT}.server.urls=[http://a:1]"], "read with actor_rollout_ref.rollout.name=server; it is native"),
        ([f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[a:1]"], "a:1 is not an address"),
        ([f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=['http://a:x']"], "http://a:x is not an address"),
        ([f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=['http://a:1/v1']"], "http://a:1/v1 has a path"),
        ([f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a:1,http://a:1]"], "names a server twice"),
        (
            [f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a:1]", f"{ROLLOUT}.nnodes=1"],
            "rollout.nnodes=1 sets devices apart for generation, and with rollout.name=server the servers generate",
        ),
        (
            [f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a:1]", f"{ROLLOUT}.checkpoint_engine.verify=True"],
            "cannot be read back",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named(words, problem):
    with pytest.raises(ConfigError) as error:
        check(*words)
    assert problem in str(error.value)
