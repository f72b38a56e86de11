"""Files and folders that workers read or write, which every machine has to have at the same path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.schema import PPOConfig
from verl.errors import ConfigError

POLICY = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path")
CRITIC = ("critic.model.path",)
REWARD_MODEL = ("reward_model.model.path", "reward_model.model.tokenizer_path", "reward_model.judge.path")


def local_paths(config: PPOConfig, keys: Sequence[str]) -> dict[str, Path]:
    """The absolute path of each key that names a file or folder of this machine; the others are ids, or not set."""
    given = {key: attrgetter(key)(config) for key in keys}
    paths = {key: Path(value).expanduser().absolute() for key, value in given.items() if value}
    return {key: path for key, path in paths.items() if path.exists()}


def with_absolute_paths(config: PPOConfig) -> PPOConfig:
    """A copy in which local paths mean the same in a worker, which runs in a folder of its own."""
    config = copy.deepcopy(config)
    for key, path in local_paths(config, (*POLICY, *CRITIC, *REWARD_MODEL)).items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config), name, str(path))
    return config


def _ask(node: str, paths: Sequence[Path]) -> list[bool]:
    """Whether the machine with Ray's id `node` has each path."""
    there = ray.remote(num_cpus=0)(_exist).options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
    return ray.get(there.remote([str(path) for path in paths]))


def _exist(paths: list[str]) -> list[bool]:
    """Runs on the machine."""
    return [Path(path).exists() for path in paths]


def check_seen(
    paths: Mapping[str, Path],
    machines: Mapping[str, str],
    ask: Callable[[str, Sequence[Path]], list[bool]] = _ask,
) -> None:
    """ConfigError if a machine lacks a path.

    paths: by config key. machines: addresses by Ray's id, those other than this one. ask: see `_ask`.
    """
    for node, address in machines.items():
        for (key, path), seen in zip(paths.items(), ask(node, list(paths.values())), strict=True):
            if not seen:
                raise ConfigError(
                    f"{key}={path} is not there on {address}. It has to be on a file system that all machines share, at the "
                    "same path."
                )
