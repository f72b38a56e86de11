"""The batch plan: counts worked out by hand, and errors with every number."""

import io

import pytest

from verl.config.batch_plan import BatchPlan
from verl.config.compose import compose
from verl.errors import ConfigError

A = "actor_rollout_ref.actor"
SMALL = (
    "data.train_batch_size=8",
    f"{A}.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=3",
    "trainer.total_epochs=2",
)


def plan(*words: str, prompts: int = 100, world_size: int = 1) -> BatchPlan:
    return BatchPlan.make(compose([*SMALL, *words], notify=lambda text: None), prompts, world_size)


def message(*words: str, **more: int) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*words, **more)
    return str(caught.value)


def test_counts():
    # 8 prompts x 3 = 24 samples; 2 mini-batches of 4 prompts = 12 samples; 100 // 8 = 12 steps an epoch.
    p = plan()
    assert (p.prompts_per_step, p.samples_per_prompt, p.samples_per_step, p.samples_per_rank) == (8, 3, 24, 24)
    assert (p.steps_per_epoch, p.unused_prompts, p.total_steps, p.epochs) == (12, 4, 24, 2)
    assert (p.actor.mini_batches, p.actor.mini_batch_prompts, p.actor.mini_batch_samples) == (2, 4, 12)
    assert (p.actor.passes, p.actor.updates_per_step, p.actor.total_updates) == (1, 2, 48)
    assert (p.actor.micro_batch_samples, p.actor.micro_batches, p.actor.micro_batch_tokens) == (None, None, 16384)
    assert p.critic is None
    assert any("4 of the 100 prompts" in n for n in p.notices)


def test_fixed_micro_batches_and_devices():
    # 12 samples an update on 2 devices: 6 each, as 4 + 2.
    p = plan(f"{A}.ppo_micro_batch_size_per_gpu=4", world_size=2)
    assert (p.samples_per_rank, p.actor.samples_per_rank) == (12, 6)
    assert (p.actor.micro_batch_samples, p.actor.micro_batches) == (4, 2)
    # A micro-batch is never larger than what there is.
    p = plan(f"{A}.ppo_micro_batch_size_per_gpu=50", world_size=2)
    assert (p.actor.micro_batch_samples, p.actor.micro_batches) == (6, 1)
    p = plan(f"{A}.ppo_micro_batch_size_per_gpu=4", f"{A}.use_dynamic_bsz=True")
    assert p.actor.micro_batch_samples is None


def test_devices_that_share_the_tokens_of_a_sample():
    # 12 samples an update on 4 devices, two by two: 6 for each two, of which each holds up to 100 tokens at once.
    size = f"{A}.fsdp_config.ulysses_sequence_parallel_size=2"
    p = plan(size, f"{A}.ppo_max_token_len_per_gpu=100", "data.max_response_length=200", world_size=4)
    assert (p.samples_per_rank, p.actor.samples_per_rank, p.actor.micro_batch_tokens) == (6, 6, 200)
    assert "up to 200 tokens each, an update on 2 devices that share its tokens" in p.table()
    assert any("ppo_max_token_len_per_gpu=100 x 2 devices is less than the longest sample" in n for n in p.notices)
    p = plan(size, f"{A}.ppo_micro_batch_size_per_gpu=4", world_size=4)
    assert (p.actor.micro_batch_samples, p.actor.micro_batches) == (4, 2)
    # 4 prompts x 3 samples over 8 groups: 8 and 16 are the nearest numbers of prompts that divide.
    text = message(size, world_size=16)
    assert "12 samples, which cannot be divided evenly over 8 groups of 2 devices (fsdp_config.ulysses" in text
    assert "Set ppo_mini_batch_size to 8 (" in text


def test_epochs_warmup_and_steps():
    p = plan(f"{A}.ppo_epochs=3", f"{A}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=5")
    assert (p.total_steps, p.epochs) == (5, 1)
    assert (p.actor.updates_per_step, p.actor.total_updates, p.actor.warmup_updates) == (6, 30, 3)
    assert plan(f"{A}.optim.lr_warmup_steps=7", f"{A}.optim.lr_warmup_steps_ratio=0.1").actor.warmup_updates == 7
    p = plan("trainer.total_training_steps=30")
    assert (p.total_steps, p.epochs) == (30, 3)
    assert any("total_training_steps=30 decides" in n and "24 steps" in n for n in p.notices)


def test_critic():
    # The actor rests for 4 of 24 steps; the critic has mini-batches of its own: 8 / 8 = 1 update a step.
    p = plan(
        "algorithm.adv_estimator=gae", "trainer.critic_warmup=4", "critic.ppo_mini_batch_size=8", "critic.ppo_epochs=2"
    )
    assert p.actor.total_updates == 20 * 2
    assert p.critic is not None
    assert (p.critic.mini_batches, p.critic.mini_batch_samples, p.critic.updates_per_step) == (1, 24, 2)
    assert p.critic.total_updates == 48
    assert any("not trained" in n for n in plan("trainer.critic_warmup=24").notices)
    text = message("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=3")
    assert text.startswith("critic.ppo_mini_batch_size=3 does not divide data.train_batch_size=8")


def test_mini_batches_that_do_not_divide():
    text = message("data.train_batch_size=256", f"{A}.ppo_mini_batch_size=60", prompts=1000)
    for part in ("=60", "=256", "4 mini-batches leave 16 prompts over", "to 32 or 64", "to 240 or 300"):
        assert part in text
    text = message(f"{A}.ppo_mini_batch_size=16")
    assert "ppo_mini_batch_size=16 is more than data.train_batch_size=8" in text
    assert f"Set {A}.ppo_mini_batch_size to 8, or data.train_batch_size to 16." in text


def test_too_few_prompts():
    text = message(prompts=7)
    assert "data.train_batch_size=8 is more than the 7 training prompts" in text
    assert "at most 7" in text
    assert plan(prompts=8).steps_per_epoch == 1


def test_devices_that_do_not_divide():
    # 4 prompts x 3 = 12 samples on 8 devices; 8 / gcd(3, 8) = 8 prompts would do.
    text = message(world_size=8)
    for part in (
        "ppo_mini_batch_size=4 prompts",
        "rollout.n=3",
        "12 samples",
        "8 devices",
        "Set ppo_mini_batch_size to 8",
    ):
        assert part in text
    assert plan(f"{A}.ppo_mini_batch_size=8", world_size=8).actor.samples_per_rank == 3


def test_a_critic_on_devices_of_its_own_divides_its_mini_batches_over_those():
    # 24 samples in two mini-batches: the actor's 12 on 2 devices, the critic's on 3; on 8 they do not divide.
    words = "algorithm.adv_estimator=gae", "critic.nnodes=1"
    apart = plan(*words, "critic.n_gpus_per_node=3", world_size=2)
    assert (apart.actor.samples_per_rank, apart.critic.samples_per_rank) == (6, 4)
    text = message(*words, "critic.n_gpus_per_node=8", world_size=2)
    assert "critic.ppo_mini_batch_size=4 prompts" in text
    assert "8 devices" in text


def test_a_sample_longer_than_the_token_budget_is_noticed():
    notices = plan(f"{A}.ppo_max_token_len_per_gpu=1000").notices
    assert any("ppo_max_token_len_per_gpu=1000" in n and "1024 tokens" in n for n in notices)
    assert not any("1024" in n for n in plan(f"{A}.ppo_max_token_len_per_gpu=1024").notices)
    fixed = plan(f"{A}.ppo_max_token_len_per_gpu=1000", f"{A}.ppo_micro_batch_size_per_gpu=1").notices
    assert not any("1024" in n for n in fixed)


def test_a_warmup_longer_than_the_run_is_noticed():
    assert any("longer than the run" in n for n in plan(f"{A}.optim.lr_warmup_steps=49").notices)
    assert not any("longer" in n for n in plan(f"{A}.optim.lr_warmup_steps=48").notices)


def test_display():
    from rich.console import Console

    p = plan("algorithm.adv_estimator=gae", f"{A}.ppo_micro_batch_size_per_gpu=5")
    lines = p.table().splitlines()
    assert len(lines) == len(p.rows())
    assert any(line.split()[:4] == ["samples", "a", "step", "24"] for line in lines)
    assert any(line.startswith("actor: micro-batches") and " 3 " in line and "5 samples each" in line for line in lines)
    assert any(line.startswith("critic: micro-batches") and "packed" in line for line in lines)
    assert any("2 mini-batches x 1 pass" in line for line in lines)
    out = io.StringIO()
    Console(file=out, width=120).print(p)
    assert "samples a step" in out.getvalue()
