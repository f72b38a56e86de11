"""Options of the reward."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.options import opt


@dataclass
class RewardManagerConfig:
    name: str = opt("naive", "how scores become rewards, a name in the registry")


@dataclass
class RewardConfig:
    reward_manager: RewardManagerConfig = opt(RewardManagerConfig, "reward manager")
    num_workers: int = opt(2, "processes that run reward functions", min=1)
    timeout: float = opt(30.0, "seconds one sample's reward may take", above=0)
    failure_score: float = opt(
        0.0, "score of a sample whose reward function failed or timed out (each is counted in reward/failures)"
    )
    max_failure_ratio: float = opt(
        0.5, "stop the run when more than this share of a batch's rewards failed", min=0, max=1
    )


@dataclass
class CustomRewardConfig:
    path: str | None = opt(None, "Python file with your reward function")
    name: str = opt("compute_score", "the function's name in that file")
    reward_kwargs: dict[str, Any] = opt({}, "further keyword arguments for it")
