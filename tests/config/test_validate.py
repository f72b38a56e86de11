"""Combinations of options: errors and notices."""

import pytest

from verl.config.compose import compose
from verl.config.derived import clip_range, name_list, needs_critic, needs_reference
from verl.config.validate import kl_in_reward_coef, validate
from verl.errors import ConfigError

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def make():
    return lambda *words: compose(list(words), notify=lambda text: None)


def test_defaults_are_fine(make):
    assert validate(make()) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trainer.resume_mode=resume_path"], ["needs trainer.resume_from_path"]),
        (["trainer.resume_from_path=x/global_step_3"], ["only read with trainer.resume_mode=resume_path", "auto"]),
        ([f"{R}.top_k=0"], [f"{R}.top_k=0", "-1 keeps all"]),
        ([f"{R}.val_kwargs.top_k=0"], [f"{R}.val_kwargs.top_k=0"]),
        (["trainer.logger=wandbb"], ["trainer.logger=wandbb", "tensorboard", "Did you mean wandb?"]),
        (["trainer.logger=[console,file]"], ["trainer.logger=file", "metrics.jsonl is always written"]),
        (
            [f"{A}.ulysses_sequence_parallel_size=3", "trainer.n_gpus_per_node=4"],
            [f"{A}.fsdp_config.ulysses_sequence_parallel_size=3", "the 4 training devices", "trainer.nnodes=1"],
        ),
        (["trainer.logger=3"], ["trainer.logger=3", "a name or a list of names"]),
        ([f"{A}.clip_ratio_high=2.5", f"{A}.clip_ratio_c=3"], ["clip_ratio_c=3.0", "1 + 2.5"]),
        (["data.train_files=null"], ["data.train_files names no file"]),
        (["data.train_files=[]"], ["data.train_files names no file"]),
        (["data.train_files=[1]"], ["data.train_files=[1]", "one file or a list of files"]),
        (["data.train_files={a:1}"], ["one file or a list of files"]),
        (["data.train_files=''"], ["a file's name is empty"]),
        (["data.train_max_samples=0"], ["-1 takes all"]),
        (["data.val_max_samples=0"], ["data.val_files=null"]),
        (["algorithm.adv_estimator=rloo", f"{R}.n=1"], ["rloo", f"{R}.n=2"]),
        (["algorithm.filter_groups.enable=True", f"{R}.n=1"], ["filter_groups", f"{R}.n=2"]),
        (["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=remax"], ["filter_groups", "remax"]),
        (["data.gen_batch_size=64"], ["data.gen_batch_size=64", "filter_groups.enable=True", "train_batch_size=1024"]),
        (["reward.reward_kwargs.overlong_buffer_cfg.enable=True"], ["reward.reward_manager.name=dapo", "it is naive"]),
        (
            ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=True"],
            ["overlong_buffer_cfg.len=0: takes 1 to 512"],
        ),
        ([f"{R}.tensor_model_parallel_size=2"], ["tensor_model_parallel_size=2 does not divide the 1 devices"]),
        ([f"{A}.optim.betas=[0.9]"], [f"{A}.optim.betas=[0.9]", "two numbers"]),
        ([f"{A}.optim.betas=[0.9,1.0]"], ["below 1"]),
        (["critic.optim.betas=[0.9]", "algorithm.adv_estimator=gae"], ["critic.optim.betas"]),
        ([f"{A}.checkpoint.save_contents=[model,optimiser]"], ["optimiser", "Did you mean optimizer?"]),
        ([f"{A}.checkpoint.load_contents=[optimizer]"], ["is without model", f"{A}.checkpoint.load_contents=[model]"]),
        ([f"{A}.optim.lr=inf"], [f"{A}.optim.lr=inf", "finite"]),
        (["trainer.val_only=True", "data.val_files=null"], ["needs data.val_files"]),
        (["reward_model.enable=True"], ["needs reward_model.model.path"]),
        (
            ["reward_model.enable=True", "reward_model.model.path=m", "custom_reward_function.path=r.py"],
            ["custom_reward_function.path=r.py has no effect", "reward_model.combine=add"],
        ),
        (
            ["reward_model.enable=True", "reward_model.model.path=m", "reward_model.weight=inf"],
            ["reward_model.weight=inf", "finite"],
        ),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=m",
                "reward_model.model_type=discriminative",
                "reward_model.judge.path=j.py",
            ],
            ["reward_model.judge.path=j.py has no effect"],
        ),
    ],
)
def test_errors(make, words, parts):
    with pytest.raises(ConfigError) as caught:
        validate(make(*words))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["algorithm.kl_ctrl.kl_coef=0.01"], "turns the KL penalty in the reward on"),
        (["algorithm.kl_ctrl.kl_coef=0.01", "algorithm.use_kl_in_reward=False"], "kl_coef=0.01 has no effect"),
        (["algorithm.use_kl_in_reward=True"], "has coefficient 0.001"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0"], "use_kl_in_reward=True has no effect"),
        (["algorithm.kl_ctrl.type=adaptive"], "adaptive has no effect"),
        ([f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0"], "kl_loss_coef=0"),
        ([f"{R}.n=1"], "every advantage is 0"),
        (["trainer.critic_warmup=3"], "has no critic"),
        ([f"{A}.clip_ratio=0.3", f"{A}.clip_ratio_low=0.1", f"{A}.clip_ratio_high=0.1"], "clip_ratio=0.3 has no effect"),
        ([f"{A}.loss_scale_factor=8"], "loss_scale_factor has an effect with loss_agg_mode=seq-mean-token-sum-norm alone"),
        ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_micro_batch_size_per_gpu=4"], "ppo_micro_batch_size_per_gpu: no effect"),
        ([f"{A}.optim.lr_warmup_steps=3", f"{A}.optim.lr_warmup_steps_ratio=0.1"], "lr_warmup_steps_ratio=0.1"),
        ([f"{A}.optim.min_lr_ratio=0.1"], "min_lr_ratio=0.1 has no effect"),
        ([f"{A}.checkpoint.save_contents=[model]"], "without optimizer, extra"),
        ([f"{A}.checkpoint.load_contents=[model]"], "load_contents is without optimizer, extra"),
        (["algorithm.filter_groups.max_num_gen_batches=3"], "filter_groups has no effect"),
        (["trainer.test_freq=3", "data.val_files=null"], "test_freq=3 has no effect"),
        ([f"{R}.val_kwargs.temperature=0.7"], "validation is greedy"),
        ([f"{R}.val_kwargs.n=4"], "n=4 samples of a prompt are equal"),
        ([f"{R}.val_kwargs.do_sample=True"], "at temperature 0 is greedy"),
    ],
)  # fmt: skip
def test_notices(make, words, part):
    notices = validate(make(*words))
    assert len(notices) == 1
    assert part in notices[0]


def test_all_errors_together(make):
    with pytest.raises(ConfigError) as caught:
        validate(make("trainer.logger=x", f"{R}.top_k=0", "trainer.resume_mode=resume_path"))
    assert str(caught.value).startswith("3 problems in the configuration:\n")


@pytest.mark.parametrize(
    ("asked", "coef", "expected"),
    [
        ("null", "null", 0.0),
        ("null", "0", 0.0),
        ("null", "0.01", 0.01),
        ("True", "null", 0.001),
        ("True", "0", 0.0),
        ("True", "0.02", 0.02),
        ("False", "null", 0.0),
        ("False", "0.02", 0.0),
    ],
)
def test_kl_in_reward(make, asked, coef, expected):
    config = make(f"algorithm.use_kl_in_reward={asked}", f"algorithm.kl_ctrl.kl_coef={coef}")
    assert kl_in_reward_coef(config.algorithm) == expected
    assert needs_reference(config) is (expected > 0)


def test_derived_values(make):
    config = make(
        f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_high=0.3", f"{A}.use_kl_loss=True", "algorithm.adv_estimator=gae"
    )
    assert clip_range(config.actor_rollout_ref.actor) == (0.1, 0.3)
    assert needs_reference(config)
    assert needs_critic(config)
    assert not needs_critic(make())
    assert name_list(None) == []
    assert name_list("a") == ["a"]
    assert name_list(["a", "b"]) == ["a", "b"]
    with pytest.raises(TypeError):
        name_list({"a": 1})


@pytest.mark.parametrize("key", ["trainer.seed", "data.seed", f"{R}.seed", f"{A}.data_loader_seed"])
def test_a_seed_has_to_fit_into_64_bits(make, key):
    assert validate(make(f"{key}={2**63 - 1}")) == []
    with pytest.raises(ConfigError, match=f"{key}={2**63}: has to be at least 0 and at most {2**63 - 1}"):
        make(f"{key}={2**63}")
