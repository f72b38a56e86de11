"""Old key names, and the commands and scripts that use them."""

import shlex
from pathlib import Path

import pytest

from verl.config.compose import compose
from verl.config.keys import holder, options, schema_keys
from verl.config.old_keys import PER_DEVICE, RENAMED, RETIRED
from verl.config.rename import new_name, retirement
from verl.config.validate import kl_in_reward_coef, validate
from verl.errors import ConfigError

GSM8K_32B = """
    algorithm.adv_estimator=grpo
    data.train_files=$HOME/data/gsm8k/train.parquet
    data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5
    trainer.n_gpus_per_node=8
    trainer.nnodes=2
    custom_reward_function.path=/path/to/custom_reward.py
    custom_reward_function.name=compute_reward
"""

GSM8K_SMALL = """
    data.train_files=$HOME/data/gsm8k/train.parquet
    data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=256
    data.max_prompt_length=512
    data.max_response_length=512
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
    algorithm.kl_ctrl.kl_coef=0.001
    trainer.logger=console
    trainer.val_before_train=False
    trainer.n_gpus_per_node=1
    trainer.nnodes=1
    trainer.save_freq=10
    trainer.test_freq=10
    trainer.total_epochs=15
"""


def words(command: str) -> list[str]:
    return shlex.split(command.replace("$HOME", "/root"))


def composed(*overrides: str):
    notices: list[str] = []
    return compose(list(overrides), notify=notices.append), notices


def test_the_command_for_many_gpus():
    config, notices = composed(*words(GSM8K_32B))
    assert notices == []
    assert validate(config) == []
    assert config.data.train_files == "/root/data/gsm8k/train.parquet"
    assert config.actor_rollout_ref.actor.use_kl_loss is True
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert config.custom_reward_function.name == "compute_reward"
    assert kl_in_reward_coef(config.algorithm) == 0.0


def test_the_command_for_one_gpu():
    config, notices = composed(*words(GSM8K_SMALL))
    assert notices == []
    assert [n for n in validate(config) if "kl_coef" not in n] == []
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert config.trainer.logger == "console"
    assert kl_in_reward_coef(config.algorithm) == 0.001


def test_every_key_that_scripts_set_is_accepted():
    lines = (Path(__file__).parent / "script_words.txt").read_text().split()
    assert len(lines) > 150
    config, notices = composed(*lines)
    validate(config)
    known = {line.split("=")[0] for line in lines if line.split("=")[0] in options()}
    unknown = {key for line in lines if (key := line.split("=")[0]) not in known and holder(key) is None}
    text = "\n".join(notices)
    assert unknown
    assert [key for key in unknown if key not in text] == []  # each old key gets its notice


def test_tables_lead_to_keys_that_exist():
    for old, new in RENAMED.items():
        assert new.removesuffix(".*") in schema_keys(), new
        assert old not in schema_keys(), old
    assert PER_DEVICE
    assert all(new_name(old).endswith("_per_gpu") for old in PER_DEVICE)
    for entry in RETIRED:
        assert entry.allowed is None or entry.instead, entry.pattern


def test_renamed_keys_with_every_sign():
    for sign in ("", "+", "++"):
        config, notices = composed(f"{sign}actor_rollout_ref.actor.grad_clip=0.3")
        assert config.actor_rollout_ref.actor.optim.clip_grad == 0.3
        assert notices == ["`actor_rollout_ref.actor.grad_clip` is now `actor_rollout_ref.actor.optim.clip_grad`."]


def test_renamed_sections_and_values():
    config, _ = composed(
        "critic.model.fsdp_config.param_offload=True",
        "reward.custom_reward_function.path=r.py",
        "+reward.custom_reward_function.reward_kwargs.bonus=2",
        "reward_model.num_workers=7",
        "reward_model.reward_manager=naive",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
        "actor_rollout_ref.rollout.dtype=auto",
        "data.trust_remote_code=True",
    )
    assert config.critic.fsdp_config.param_offload is True
    assert config.custom_reward_function.path == "r.py"
    assert config.custom_reward_function.reward_kwargs == {"bonus": 2}
    assert config.reward.num_workers == 7
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "bf16"
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == "bf16"
    assert config.actor_rollout_ref.rollout.dtype is None
    assert config.actor_rollout_ref.model.trust_remote_code is True


def test_global_micro_batches_are_divided_by_the_devices():
    config, notices = composed("actor_rollout_ref.actor.ppo_micro_batch_size=16", "trainer.n_gpus_per_node=8")
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    assert "16 on all devices is 2 on each" in notices[0]
    with pytest.raises(ConfigError, match=r"ppo_micro_batch_size=3.*8 devices.*ppo_micro_batch_size_per_gpu"):
        composed("critic.ppo_micro_batch_size=3", "trainer.nnodes=2", "trainer.n_gpus_per_node=4")


def test_an_old_null_does_not_undo_the_new_key():
    config, _ = composed(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.ppo_micro_batch_size=null"
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4


def test_old_and_new_with_different_values():
    config, notices = composed("trainer.max_actor_ckpt_to_keep=5", "trainer.max_critic_ckpt_to_keep=2")
    assert config.trainer.max_actor_ckpt_to_keep == 2
    assert "the last one counts" in notices[0]


def test_references_to_old_names():
    config, _ = composed(
        "actor_rollout_ref.rollout.response_length=64",
        "data.max_prompt_length=${actor_rollout_ref.rollout.response_length}",
        "actor_rollout_ref.rollout.prompt_length=${data.max_prompt_length}",
    )
    assert (config.data.max_prompt_length, config.data.max_response_length) == (64, 64)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("reward_model.sandbox_fusion.url=http://box", "custom_reward_function.path=FILE"),
        ("reward_model.enable_resource_pool=True", "one of its own"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", "multi-turn"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "multi-turn"),
        ("critic.model.lora_rank=8", "LoRA trains the policy's model alone"),
        ("actor_rollout_ref.model.external_lib=x", "trainer.plugins"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "strategy=fsdp"),
        ("critic.strategy=megatron", "strategy=fsdp"),
        ("algorithm.rollout_correction.rollout_rs_threshold_lower=0.5", "rollout_rs_threshold=LOW_HIGH"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=0.5", "rollout_rs"),
        ("global_profiler.tool=nsys", "profiler"),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", "AdamW"),
        ("data.sampler.class_path=s.py", "data.shuffle"),
    ],
)
def test_what_this_version_does_not_do_is_an_error(word, part):
    with pytest.raises(ConfigError) as caught:
        composed(word)
    assert str(caught.value).startswith(f"{word}: ")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        "reward_model.enable_resource_pool=False",
        "reward_model.strategy=fsdp",
        "critic.model.lora_rank=0",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
        "actor_rollout_ref.rollout.engine_kwargs={vllm:{x:1}}",
        "hydra.run.dir=out",
        "+ray_kwargs.timeline_json_file=t.json",
        "actor_rollout_ref.hybrid_engine=True",
        "ref.strategy=fsdp2",
    ],
)
def test_retired_keys_change_nothing_and_say_so(word):
    if word.startswith("ref."):
        word = f"actor_rollout_ref.{word}"
    config, notices = composed(word)
    assert config == composed()[0]
    assert len(notices) == 1
    assert notices[0].startswith("not read: ")


def test_a_retired_key_that_follows_another_is_judged_by_its_value():
    with pytest.raises(ConfigError, match=r"critic\.model\.external_lib"):
        composed(
            "actor_rollout_ref.model.external_lib=x",
            "critic.model.external_lib=${actor_rollout_ref.model.external_lib}",
        )


def test_sequence_parallelism_of_the_actor_is_the_references_too():
    old = "ulysses_sequence_parallel_size"
    config, notices = composed(
        f"actor_rollout_ref.actor.{old}=2", f"actor_rollout_ref.ref.{old}=${{actor_rollout_ref.actor.{old}}}"
    )
    root = config.actor_rollout_ref
    assert root.actor.fsdp_config.ulysses_sequence_parallel_size == 2
    assert root.ref.fsdp_config.ulysses_sequence_parallel_size == 2
    assert config.critic.fsdp_config.ulysses_sequence_parallel_size == 1
    assert len(notices) == 2
    assert composed(f"actor_rollout_ref.actor.{old}=2")[0] == config


def test_no_option_of_the_schema_is_renamed_away():
    assert [name for name in options() if new_name(name)] == []
    assert retirement("actor_rollout_ref.actor.megatron.x") is not None
    assert retirement("trainer.sed") is None
