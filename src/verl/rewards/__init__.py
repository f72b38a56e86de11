"""Rewards: scorers by data_source, the user's own function, and the manager that runs them. Imports no torch."""

from verl.rewards.manager import RewardHandle, RewardManager
from verl.rewards.registry import check_data_sources, find_scorer, register_reward_manager, register_scorer
from verl.rewards.types import RewardInput, RewardResult

__all__ = [
    "RewardHandle",
    "RewardInput",
    "RewardManager",
    "RewardResult",
    "check_data_sources",
    "find_scorer",
    "register_reward_manager",
    "register_scorer",
]
