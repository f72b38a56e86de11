"""What the config alone tells of a run with rollout servers."""

import pytest

from verl.config.compose import compose
from verl.config.validate import validate
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"


def check(*words: str) -> list[str]:
    return validate(compose(["data.train_files=t", "data.val_files=null", *words], notify=lambda text: None))


def test_two_servers_are_fine():
    assert check(f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a:1,https://b:2]") == check()


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
            [f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a:1]", "trainer.n_gpus_per_node=2"],
            "trains on one device; this run asks for 2",
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
