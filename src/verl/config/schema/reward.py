"""Options of the reward."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.options import opt


@dataclass
class RewardManagerConfig:
    name: str = opt("naive", "how scores become rewards: naive, dapo, or a name of your own in the registry")


@dataclass
class OverlongBufferConfig:
    enable: bool = opt(False, "dapo: take points off responses that come near the length limit")
    len: int = opt(0, "over so many tokens before the limit, in a line", min=0)
    penalty_factor: float = opt(1.0, "points off at the limit", min=0)
    log: bool = opt(False, "log them, as reward/overlong_reward, and the share of such responses, reward/overlong")


@dataclass
class RewardKwargsConfig:
    overlong_buffer_cfg: OverlongBufferConfig = opt(OverlongBufferConfig, "soft punishment of overlong responses")
    max_resp_len: int = opt("${data.max_response_length}", "dapo: the length limit, in tokens", min=1)  # type: ignore[assignment]


@dataclass
class RewardConfig:
    reward_manager: RewardManagerConfig = opt(RewardManagerConfig, "reward manager")
    reward_kwargs: RewardKwargsConfig = opt(RewardKwargsConfig, "options of the reward manager")
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
