"""Choosing estimator and loss by name, and registering one's own from a file."""

import pytest
from tests.trainer.fakes import config

from verl.algorithms.kl import KINDS
from verl.algorithms.registry import ADVANTAGES, POLICY_LOSSES, Needs, PolicyLoss, get_advantage, get_policy_loss
from verl.config import keys
from verl.errors import ConfigError
from verl.trainer.algorithm import (
    advantage_options,
    aggregation,
    choose_algorithm,
    loss_options,
    needs_reference_model,
    notices,
)
from verl.trainer.algorithm_index import builtin_advantages, builtin_policy_losses

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
        ("algorithm.adv_estimator=grppo", ["algorithm.adv_estimator", "'grppo'", "Did you mean 'grpo'", "remax"]),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanila",
            ["policy_loss.loss_mode", "'vanila'", "Did you mean 'vanilla'", "gspo"],
        ),
        (
            "algorithm.adv_estimator=ppo",
            ["algorithm.adv_estimator=ppo: Did you mean algorithm.adv_estimator=gae?", "critic."],
        ),
        (
            "algorithm.adv_estimator=DAPO",
            ["adv_estimator=DAPO: Did", "=grpo", "filter_groups.enable", "clip_ratio_high"],
        ),
        ("algorithm.adv_estimator=drgrpo", ["adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False"]),
        ("algorithm.adv_estimator=dr_grpo", ["adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False"]),
        ("algorithm.adv_estimator=reinforce++", ["=reinforce_plus_plus?"]),
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
    path.write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"broken\.py failed: SystemExit: 0"):
        choose_algorithm(config(f"trainer.plugins={path}"))
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ConfigError, match=r"text\.txt is not a Python file"):
        choose_algorithm(config(f"trainer.plugins={tmp_path / 'text.txt'}"))


LOSS = "actor_rollout_ref.actor.policy_loss"


def options_of(*words):
    cfg = config(*words)
    estimator, loss = choose_algorithm(cfg)
    return advantage_options(cfg, estimator), loss_options(cfg, loss)


def test_options_of_a_loss_come_from_their_keys_and_its_defaults():
    words = [f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_lb=0.5", "actor_rollout_ref.actor.clip_ratio_high=0.3"]
    _, loss = options_of(*words)
    assert loss.extra == {"clip_cov_ratio": 0.0002, "clip_cov_lb": 0.5, "clip_cov_ub": 5.0}
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.3)
    assert options_of(f"{LOSS}.loss_mode=sapo", "actor_rollout_ref.actor.tau_neg=2.0")[1].extra["tau_neg"] == 2.0


def test_every_option_of_a_built_in_algorithm_has_a_key():
    known = keys.options()
    for name in builtin_policy_losses():
        assert all(f"{LOSS}.{option}" in known for option in get_policy_loss(name).extra)
    for name in builtin_advantages():
        assert all(f"algorithm.{option}" in known for option in get_advantage(name).extra)


def test_kl_choices_are_the_estimators():
    for key in ("actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_penalty"):
        assert set(keys.options()[key].choices) == set(KINDS)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([f"{LOSS}.tau_pos=1"], ["policy_loss.tau_pos=1", "loss_mode=vanilla has no such option", "loss_mode=sapo"]),
        ([f"{LOSS}.options.tua=1"], ["policy_loss.options: unknown option of 'vanilla': 'tua'"]),
        (["algorithm.adv_options.k=1"], ["algorithm.adv_options: unknown option of 'grpo': 'k'"]),
        (["algorithm.gdpo_reward_keys=[acc]"], ["options of adv_estimator=gdpo; grpo does not read them"]),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"],
            ["1 numbers for 2 names"],
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_weights=much"],
            ["gdpo_reward_weights=much: takes numbers"],
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_weights={b: 1}"],
            ["names b, which gdpo_reward_keys leaves out"],
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=token_k1"],
            ["algorithm.rollout_correction.rollout_rs_threshold"],
        ),
    ],
)
def test_options_that_nothing_reads_are_errors(words, parts):
    with pytest.raises(ConfigError) as error:
        choose_algorithm(config(*words))
    for part in parts:
        assert part in str(error.value)


def test_users_options_reach_users_functions(tmp_path, registries):
    path = tmp_path / "mine.py"
    path.write_text(
        PLUGIN.format(name="own")
        .replace('"own_advantage"', '"own_advantage", extra={"k": 1}')
        .replace('"own_loss"', '"own_loss", extra={"tau": 1.0, "steps": 3}')
    )
    names = ["algorithm.adv_estimator=own_advantage", f"{LOSS}.loss_mode=own_loss", f"trainer.plugins={path}"]
    advantage, loss = options_of(*names, "algorithm.adv_options.k=4", f"{LOSS}.options.tau=0.5")
    assert advantage.extra == {"k": 4}
    assert loss.extra == {"tau": 0.5, "steps": 3}


@pytest.mark.parametrize(
    ("loss_mode", "given", "mode", "words"),
    [
        ("vanilla", "null", "token-mean", []),
        ("vanilla", "seq-mean-token-sum", "seq-mean-token-sum", []),
        ("gspo", "null", "seq-mean-token-mean", ["is seq-mean-token-mean, as gspo's paper has it"]),
        ("gspo", "seq-mean-token-mean", "seq-mean-token-mean", []),
        ("gspo", "token-mean", "token-mean", ["token-mean decides, although gspo's paper"]),
    ],
)
def test_aggregation_follows_the_key_then_the_paper(loss_mode, given, mode, words):
    cfg = config(f"{LOSS}.loss_mode={loss_mode}", f"actor_rollout_ref.actor.loss_agg_mode={given}")
    loss = choose_algorithm(cfg)[1]
    assert aggregation(cfg, loss) == mode
    told = notices(cfg, loss)
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told))


def test_who_needs_a_reference():
    estimator, loss = choose_algorithm(config())
    asks = PolicyLoss("mine", loss.function, Needs(reference=True))
    assert not needs_reference_model(config(), estimator, loss)
    assert needs_reference_model(config(), estimator, asks)
    assert needs_reference_model(config("actor_rollout_ref.actor.use_kl_loss=True"), estimator, loss)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("algorithm.rollout_correction.rollout_is=token", "rollout_correction.rollout_is compares"),
        (f"{LOSS}.loss_mode=dppo_kl", "dppo_kl compares"),
        ("algorithm.rollout_correction.bypass_mode=True", "bypass_mode=True compares"),
    ],
)
def test_ratios_to_a_cut_distribution_are_refused(word, told):
    cut = "actor_rollout_ref.rollout.top_p=0.9"
    with pytest.raises(ConfigError, match=told):
        choose_algorithm(config(word, cut, "actor_rollout_ref.rollout.name=vllm"))
    choose_algorithm(config(word, cut))  # the native engine's are of the whole distribution
    choose_algorithm(config(word, "actor_rollout_ref.rollout.name=vllm"))
    choose_algorithm(config(cut, "actor_rollout_ref.rollout.name=vllm"))
