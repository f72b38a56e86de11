"""Choosing estimator and loss by name, and registering one's own from a file."""

import pytest
from tests.trainer.fakes import config

from verl.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from verl.errors import ConfigError
from verl.trainer.algorithm import choose_algorithm

PLUGIN = """
from verl.algorithms.registry import register_advantage, register_policy_loss

@register_advantage("{name}_advantage")
def advantage(inputs, options):
    return inputs.token_rewards, inputs.token_rewards

@register_policy_loss("{name}_loss")
def loss(inputs, options):
    return -inputs.advantages * inputs.log_probs, {{}}
"""


@pytest.fixture
def registries(monkeypatch):
    """What a test registers is gone after it."""
    for registry in (ADVANTAGES, POLICY_LOSSES):
        registry.names()  # loads the built-in ones
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def test_names_of_the_config_are_looked_up():
    estimator, loss = choose_algorithm(
        config("algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.policy_loss.loss_mode=cispo")
    )
    assert (estimator.name, loss.name) == ("rloo", "cispo")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.adv_estimator=grppo", ["algorithm.adv_estimator", "'grppo'", "did you mean 'grpo'", "remax"]),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanila",
            ["policy_loss.loss_mode", "'vanila'", "did you mean 'vanilla'", "gspo"],
        ),
        ("trainer.plugins=nowhere.py", ["trainer.plugins", "nowhere.py", "not a file"]),
    ],
)
def test_unknown_names_are_explained(override, parts):
    with pytest.raises(ConfigError) as error:
        choose_algorithm(config(override))
    for part in parts:
        assert part in str(error.value)


def test_estimators_that_compare_samples_need_several():
    with pytest.raises(ConfigError, match=r"rloo compares .*rollout\.n of at least 2; it is 1"):
        choose_algorithm(config("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"))
    assert choose_algorithm(config("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"))


def test_users_file_registers_an_advantage_and_a_loss(tmp_path, registries):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.format(name="mine"))
    overrides = [
        f"trainer.plugins={path}",
        "algorithm.adv_estimator=mine_advantage",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine_loss",
    ]
    for _ in range(2):  # a second run in the same process imports the file again
        estimator, loss = choose_algorithm(config(*overrides))
        assert (estimator.name, loss.name) == ("mine_advantage", "mine_loss")


def test_several_files_of_one_name(tmp_path, registries):
    files = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "plugin.py")
        files[-1].write_text(PLUGIN.format(name=name))
    names = ["algorithm.adv_estimator=first_advantage", "actor_rollout_ref.actor.policy_loss.loss_mode=second_loss"]
    estimator, loss = choose_algorithm(config(f"trainer.plugins=[{files[0]},{files[1]}]", *names))
    assert (estimator.name, loss.name) == ("first_advantage", "second_loss")


def test_a_file_that_fails_is_named_with_its_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import json\nraise KeyError('seven')\n")
    with pytest.raises(ConfigError, match=r"broken\.py failed: KeyError: 'seven'"):
        choose_algorithm(config(f"trainer.plugins={path}"))
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ConfigError, match=r"text\.txt is not a Python file"):
        choose_algorithm(config(f"trainer.plugins={tmp_path / 'text.txt'}"))
