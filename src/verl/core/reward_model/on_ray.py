"""A reward model in a worker of its own, for runs on more than one device."""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.config.schema import PPOConfig, RewardModelConfig
from verl.core.controller.cluster import Cluster
from verl.core.controller.resources import reward_pool
from verl.core.controller.shared_paths import with_absolute_paths
from verl.core.reward_model.factory import build_reward_model, check_reward_model
from verl.errors import UserError, WorkerDied
from verl.rewards.types import Outcome, RewardInput, ScoringModel


class RayRewardModel:
    """Stands for the model in the trainer's process. notice: for the user, if its engine is not the one asked for."""

    def __init__(self, config: PPOConfig):
        """Start the worker, on a GPU where the trainer has them, and build the model there.

        Raises:
            ConfigError: the cluster has no device left for it, or the model cannot be loaded.
        """
        self._cluster = Cluster(config)  # the run's own, which is there already
        on_gpu = config.trainer.device != "cpu" and self._cluster.has_gpus()
        [pool] = reward_pool(config, "cuda" if on_gpu else "cpu")
        [[reserved]] = self._cluster.reserve([pool])
        self._worker = (
            ray.remote(_Host)
            .options(
                num_cpus=pool.per_worker["CPU"],
                num_gpus=pool.per_worker.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=0),
            )
            .remote()
        )
        self.notice: str | None = self._wait(
            self._worker.build.remote(with_absolute_paths(config).reward_model, on_gpu)
        )

    def score(self, samples: list[RewardInput]) -> list[Outcome]:
        """As the model itself. Raises WorkerDied when its process is gone."""
        return self._wait(self._worker.score.remote(samples))

    def close(self) -> None:
        """End the worker."""
        if ray.is_initialized():
            ray.kill(self._worker)
            self._cluster.give_back()

    def _wait(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayActorError as error:
            raise WorkerDied(f"the reward model's worker ended by itself. {str(error).splitlines()[0]}") from None
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise


class _Host:
    """Runs in the worker."""

    _model: ScoringModel

    def build(self, config: RewardModelConfig, on_gpu: bool) -> str | None:
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self._model, notice = build_reward_model(config, check_reward_model(config), device)
        return notice

    def score(self, samples: list[RewardInput]) -> list[Outcome]:
        return self._model.score(samples)
