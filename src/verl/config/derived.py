"""Values that follow from several options, computed in one place for all who need them."""

from __future__ import annotations

from typing import Any

from verl.config.schema import ActorConfig, AlgorithmConfig, PPOConfig, TrainerConfig

DEFAULT_KL_COEF = 0.001

# Estimators that need a value model, and those that compare the samples of one prompt.
CRITIC_ESTIMATORS = frozenset({"gae"})


def kl_in_reward_coef(algorithm: AlgorithmConfig) -> float:
    """First coefficient of the KL penalty in the reward; 0.0 where there is no penalty.

    use_kl_in_reward=null follows kl_ctrl.kl_coef; use_kl_in_reward=True without a kl_coef takes 0.001.
    """
    coef = algorithm.kl_ctrl.kl_coef
    if algorithm.use_kl_in_reward is None:
        return coef or 0.0
    if not algorithm.use_kl_in_reward:
        return 0.0
    return DEFAULT_KL_COEF if coef is None else coef


def needs_reference(config: PPOConfig) -> bool:
    """Whether a KL term needs the log-probs of the frozen reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or kl_in_reward_coef(config.algorithm) > 0


def needs_critic(config: PPOConfig) -> bool:
    """Whether the advantage estimator needs a value model."""
    return config.algorithm.adv_estimator in CRITIC_ESTIMATORS


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """PPO clip range (below, above): the ratio is kept in [1 - below, 1 + above]."""
    below = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    above = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return below, above


def num_devices(trainer: TrainerConfig) -> int:
    """Devices that train."""
    return trainer.nnodes * trainer.n_gpus_per_node


def rollout_devices(config: PPOConfig) -> int:
    """Devices that generate and do not train; 0 where generation shares the trainer's."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.nnodes * rollout.n_gpus_per_node


def critic_devices(config: PPOConfig) -> int:
    """Devices that hold the critic and nothing else; 0 where it shares the trainer's."""
    return config.critic.nnodes * config.critic.n_gpus_per_node


def reference_devices(config: PPOConfig) -> int:
    """Devices that hold the reference and nothing else; 0 where it shares the trainer's."""
    ref = config.actor_rollout_ref.ref
    return ref.nnodes * ref.n_gpus_per_node


def all_devices(config: PPOConfig) -> int:
    """Devices of the pools of the whole run; the reward model's, where it has one, is not counted."""
    return num_devices(config.trainer) + rollout_devices(config) + critic_devices(config) + reference_devices(config)


def name_list(value: Any) -> list[str]:
    """Files or names given as one text or a list of texts; null is none.

    Raises:
        TypeError: for anything else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return list(value)
    raise TypeError(f"{value!r} is neither a text nor a list of texts")
