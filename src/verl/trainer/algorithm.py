"""The algorithm that the config names, from the registries, checked against what it needs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from verl.algorithms.registry import AdvantageEstimator, PolicyLoss, get_advantage, get_policy_loss
from verl.config.derived import name_list
from verl.config.schema import PPOConfig
from verl.errors import ConfigError


def load_plugins(files: object) -> None:
    """Import the user's files, which may register advantages, losses and scorers.

    Raises:
        ConfigError: a file is missing or fails to import.
    """
    for number, name in enumerate(name_list(files)):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"trainer.plugins: {name} is not a file.")
        spec = importlib.util.spec_from_file_location(f"verl_plugin_{number}_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"trainer.plugins: {name} is not a Python file (its name must end in .py).")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as e:
            raise ConfigError(f"trainer.plugins: importing {name} failed: {type(e).__name__}: {e}") from e


def choose_algorithm(config: PPOConfig) -> tuple[AdvantageEstimator, PolicyLoss]:
    """Estimator and policy loss by name.

    Raises:
        ConfigError: an unknown name (the nearest is named), or a setting that the algorithm cannot work with.
    """
    load_plugins(config.trainer.plugins)
    try:
        estimator = get_advantage(config.algorithm.adv_estimator)
    except ValueError as e:
        raise ConfigError(f"algorithm.adv_estimator: {e}") from None
    try:
        loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    except ValueError as e:
        raise ConfigError(f"actor_rollout_ref.actor.policy_loss.loss_mode: {e}") from None
    n = config.actor_rollout_ref.rollout.n
    if n < estimator.needs.min_group_size and estimator.name != "grpo":
        raise ConfigError(
            f"algorithm.adv_estimator={estimator.name} compares the samples of a prompt and needs "
            f"actor_rollout_ref.rollout.n of at least {estimator.needs.min_group_size}; it is {n}."
        )
    return estimator, loss
