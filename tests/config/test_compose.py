"""Overrides to a config: values, types, and one message for all mistakes of a command line."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from verl.config.compose import compose, to_yaml
from verl.config.schema import OptimConfig, PPOConfig
from verl.config.schema.options import opt
from verl.errors import ConfigError


def quiet(*words: str) -> PPOConfig:
    return compose(list(words), notify=lambda text: None)


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        quiet(*words)
    return str(caught.value)


def test_defaults_are_dataclasses_with_references_resolved():
    config = quiet()
    assert isinstance(config, PPOConfig)
    assert isinstance(config.critic.optim, OptimConfig)
    assert config.critic.optim.lr == 1e-5
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is False


def test_a_reference_follows_the_value_given():
    config = quiet("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=77", "trainer.project_name=p")
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 77
    assert config.trainer.default_local_dir == "checkpoints/p/gsm8k"


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("trainer.total_epochs=3", "trainer.total_epochs", 3),
        ("++trainer.total_epochs=3", "trainer.total_epochs", 3),
        ("+trainer.total_epochs=3", "trainer.total_epochs", 3),
        ("trainer.save_freq=1e1", "trainer.save_freq", 10),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr", 1.0),
        ("trainer.val_before_train=False", "trainer.val_before_train", False),
        ("trainer.val_before_train=0", "trainer.val_before_train", False),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("trainer.logger=console", "trainer.logger", "console"),
        ("trainer.logger=['console','wandb']", "trainer.logger", ["console", "wandb"]),
        ('trainer.logger=["console", "wandb"]', "trainer.logger", ["console", "wandb"]),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files=~/data/a.parquet", "data.train_files", "~/data/a.parquet"),
        ("data.train_files=/x/lr=3/a.parquet", "data.train_files", "/x/lr=3/a.parquet"),
        ("trainer.experiment_name=2024_05", "trainer.experiment_name", "2024_05"),
        ("trainer.experiment_name=1e-6", "trainer.experiment_name", "1e-6"),
        ("trainer.experiment_name='a, b'", "trainer.experiment_name", "a, b"),
        ("trainer.experiment_name=", "trainer.experiment_name", ""),
        ("data.max_prompt_length=${data.max_response_length}", "data.max_prompt_length", 512),
        ("actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "actor_rollout_ref.actor.optim.betas", [0.9, 0.95]),
        ("actor_rollout_ref.actor.optim={lr:1e-3,eps:1e-4}", "actor_rollout_ref.actor.optim.eps", 1e-4),
        ("data.apply_chat_template_kwargs.x=1", "data.apply_chat_template_kwargs", {"x": 1}),
        ("+data.apply_chat_template_kwargs.x=1", "data.apply_chat_template_kwargs", {"x": 1}),
        (
            "actor_rollout_ref.model.override_config={a:{b:1}}",
            "actor_rollout_ref.model.override_config",
            {"a": {"b": 1}},
        ),
    ],
)
def test_values(word, path, value):
    found = quiet(word)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_the_last_word_wins_and_entries_can_be_taken_back():
    assert quiet("trainer.seed=1", "trainer.seed=2").trainer.seed == 2
    config = quiet(
        "data.apply_chat_template_kwargs.x=1",
        "data.apply_chat_template_kwargs.y=2",
        "~data.apply_chat_template_kwargs.x",
    )
    assert config.data.apply_chat_template_kwargs == {"y": 2}


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("actor_rollout_ref.actor.clip_ration=0.1", ["actor_rollout_ref.actor.clip_ration", "mean actor_rollout_ref.actor.clip_ratio,"]),
        ("actor.clip_ratio=0.1", ["Did you mean actor_rollout_ref.actor.clip_ratio?"]),
        ("trainer.epochs=3", ["trainer.epochs: there is no such key", "trainer.total_epochs"]),
        ("+trainer.total_epoch=3", ["Did you mean trainer.total_epochs?"]),
        ("foo.bar=3", ["foo.bar: there is no such key. See --help."]),
        ("actor_rollout_ref.actor.grad_clp=3", ["Did you mean actor_rollout_ref.actor.optim.clip_grad"]),
        ("trainer.total_epochs=abc", ["trainer.total_epochs=abc: takes a whole number."]),
        ("trainer.total_epochs=1.5", ["trainer.total_epochs=1.5: takes a whole number."]),
        ("trainer.total_epochs=null", ["trainer.total_epochs", "takes a whole number."]),
        ("trainer.total_epochs=True", ["takes a whole number."]),
        ("trainer.total_epochs=[1]", ["takes a whole number."]),
        ("trainer.total_epochs={a:1}", ["takes a whole number."]),
        ("trainer.total_training_steps=x", ["takes a whole number or null."]),
        ("trainer.val_only=7", ["trainer.val_only=7: takes True or False."]),
        ("trainer.val_only=perhaps", ["takes True or False."]),
        ("trainer.project_name=[a,b]", ["trainer.project_name", "takes text."]),
        ("actor_rollout_ref.actor.optim.betas=[1,x]", ["takes a list of numbers."]),
        ("trainer.resume_mode=autoo", ["takes auto, disable, resume_path.", "Did you mean auto?"]),
        ("data.train_batch_size=0", ["data.train_batch_size=0: has to be at least 1."]),
        ("algorithm.gamma=1.5", ["has to be at least 0 and at most 1."]),
        ("actor_rollout_ref.actor.optim.lr=0", ["has to be above 0."]),
        ("actor_rollout_ref.actor.optim.lr=nan", ["has to be above 0."]),
        ("critic=3", ["critic: is a section", "critic.ppo_mini_batch_size=VALUE"]),
        ("trainer.seed.x=3", ["trainer.seed is one option, which takes a whole number."]),
        ("~trainer.seed", ["~trainer.seed: an option cannot be taken away", "0"]),
        ("~trainer.total_training_steps", ["write trainer.total_training_steps=null"]),
        ("~data.apply_chat_template_kwargs.x", ["nothing to take away"]),
        ("trainer.logger=console,wandb", ['For a list write "trainer.logger=[console,wandb]"']),
        ("trainer.logger=[console", ["trainer.logger=[console: cannot be read.", "brackets do not match"]),
        ("data.train_files=(a/x.parquet,~/y.parquet)", ["For a list write \"data.train_files=['a/x.parquet','~/y.parquet']\"."]),
        ("data.train_files=[~/x.parquet]", ["For a list write \"data.train_files=['~/x.parquet']\"."]),
        ("data.train_files=~nobody-of-that-name/a", ["data.train_files=~nobody-of-that-name/a: ~nobody-of-that-name is"]),
        ("data.val_files=[a,'~nobody-of-that-name']", ["Write the path in full"]),
        ("trainer.project_name=it's", ["cannot be read", "escape the inner quotes"]),
        ("trainer.project_name=f(x)", ["\"trainer.project_name='f(x)'\""]),
        ("trainer.total_epochs", ["has no value", "trainer.total_epochs=VALUE"]),
        ("=3", ["not an override"]),
        (" ", ["an empty word", "backslash"]),
        ("--foo", ["--foo: not a flag"]),
        ("a@b=c", ["config groups"]),
        ("data.max_prompt_length=${data.max_respons_length}", ["refers to data.max_respons_length", "data.max_response_length?"]),
        ("data.max_prompt_length=${data.max_prompt_length}", ["data.max_prompt_length", "ecursive"]),
        ("trainer.seed=${trainer.project_name}", ["trainer.seed=${trainer.project_name}: takes a whole number."]),
        ("trainer.project_name=???", ["trainer.project_name=???"]),
        ("actor_rollout_ref.actor.strategy=megatron", ["Megatron is not in this version", "fsdp, fsdp2"]),
    ],
)  # fmt: skip
def test_one_mistake(word, parts):
    text = message(word)
    for part in parts:
        assert part in text
    assert "\n" not in text


def test_all_mistakes_are_reported_together():
    text = message("trainer.sed=1", "trainer.total_epochs=x", "algorithm.lam=2", "a=1,2", "trainer.resume_mode=autoo")
    lines = text.splitlines()
    assert lines[0] == "5 problems in the configuration:"
    assert len(lines) == 6
    assert {line.split("=")[0].split(":")[0] for line in lines[1:]} == {
        "  - trainer.sed",
        "  - trainer.total_epochs",
        "  - algorithm.lam",
        "  - a",
        "  - trainer.resume_mode",
    }


def test_a_wrong_value_is_reported_once_although_others_follow_it():
    assert message("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=0").count("has to be") == 1


def test_yaml_reads_back():
    import yaml

    config = quiet("trainer.seed=5")
    read = yaml.safe_load(to_yaml(config))
    assert read["trainer"]["seed"] == 5
    assert read["trainer"]["default_local_dir"] == "checkpoints/verl_examples/gsm8k"


def test_another_schema():
    @dataclass
    class Serve:
        port: int = opt(8000, "port", min=1)

    assert compose(["port=9"], Serve).port == 9
    with pytest.raises(ConfigError, match="at least 1"):
        compose(["port=0"], Serve)


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from verl.config.compose import compose; import verl.cli; compose([]); "
        "print([m for m in ('torch', 'transformers', 'ray', 'pyarrow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
