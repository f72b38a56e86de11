"""Checks of trainer.pipeline and async_training, from the config alone."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from verl.config.derived import needs_critic, num_devices, rollout_devices
from verl.config.schema import AsyncTrainingConfig, PPOConfig

if TYPE_CHECKING:
    from verl.config.validate import Findings

ALWAYS_READ = ("watchdog_seconds",)


def check_pipeline(config: PPOConfig, found: Findings) -> None:
    """What the asynchronous pipelines cannot do is a problem; a knob without effect is a notice."""
    name, knobs = config.trainer.pipeline, config.async_training
    unread = [
        f"{field.name}={getattr(knobs, field.name)}"
        for field in dataclasses.fields(AsyncTrainingConfig)
        if getattr(knobs, field.name) != field.default and not (name == "one_step_off" and field.name in ALWAYS_READ)
    ]
    found.notice(
        name != "fully_async" and bool(unread),
        f"of async_training, {', '.join(unread)}: no effect with trainer.pipeline={name}; fully_async reads it.",
    )
    if name != "sync":
        _check_algorithm(config, found)
        _check_engines(config, found)
    if name == "fully_async":
        _check_knobs(config, found)


def _check_algorithm(config: PPOConfig, found: Findings) -> None:
    name = config.trainer.pipeline
    found.problem(
        config.algorithm.filter_groups.enable,
        f"algorithm.filter_groups.enable=True draws prompts until a step is full, which trainer.pipeline={name} does ahead of "
        "knowing the rewards. Set trainer.pipeline=sync, or leave filter_groups out.",
    )
    found.problem(
        config.algorithm.adv_estimator == "remax",
        f"algorithm.adv_estimator=remax needs the greedy response of the very policy that samples, which trainer.pipeline={name} "
        "does not draw. Set trainer.pipeline=sync, or an estimator that compares samples, such as rloo.",
    )


def _check_engines(config: PPOConfig, found: Findings) -> None:
    name = config.trainer.pipeline
    devices = num_devices(config.trainer)
    found.problem(
        devices > 1 and rollout_devices(config) == 0 and config.actor_rollout_ref.rollout.name != "server",
        f"trainer.pipeline={name} on {devices} devices needs devices for generation alone: set actor_rollout_ref.rollout.nnodes=1 "
        "actor_rollout_ref.rollout.n_gpus_per_node=N (in addition to trainer.n_gpus_per_node), or trainer.pipeline=sync.",
    )


def _check_knobs(config: PPOConfig, found: Findings) -> None:
    knobs, data = config.async_training, config.data
    found.problem(
        not math.isfinite(knobs.staleness_threshold),
        f"async_training.staleness_threshold={knobs.staleness_threshold}: takes a finite number, such as 1.",
    )
    if knobs.require_batches is not None:
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
        prompts = knobs.require_batches * mini
        found.problem(
            data.train_batch_size % prompts != 0,
            f"async_training.require_batches={knobs.require_batches} x ppo_mini_batch_size={mini} is {prompts} prompts, which do not "
            f"divide data.train_batch_size={data.train_batch_size}.",
        )
        found.problem(
            config.actor_rollout_ref.actor.ppo_epochs > 1,
            f"async_training.require_batches={knobs.require_batches} trains on parts of a step as they come, and "
            f"ppo_epochs={config.actor_rollout_ref.actor.ppo_epochs} goes over a whole step again. Leave one of them out.",
        )
        if needs_critic(config):
            _check_critic_of_parts(config, prompts, found)


def _check_critic_of_parts(config: PPOConfig, prompts: int, found: Findings) -> None:
    """The critic trains on the same parts of a step as the actor. prompts: of a part."""
    critic, asked = config.critic, f"async_training.require_batches={config.async_training.require_batches}"
    found.problem(
        prompts % critic.ppo_mini_batch_size != 0,
        f"{asked} trains on {prompts} prompts at a time, which critic.ppo_mini_batch_size={critic.ppo_mini_batch_size} does not "
        "divide. Lower it, or raise require_batches.",
    )
    found.problem(
        critic.ppo_epochs > 1,
        f"{asked} trains on parts of a step as they come, and critic.ppo_epochs={critic.ppo_epochs} goes over a whole step "
        "again. Leave one of them out.",
    )
