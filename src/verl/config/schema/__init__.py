"""The one source of truth for options: typed dataclasses, each field with its default, help and limits."""

from verl.config.schema.actor import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    PolicyLossConfig,
    RefConfig,
)
from verl.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from verl.config.schema.async_training import AsyncTrainingConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.engine import CheckpointConfig, FSDPConfig, OptimConfig
from verl.config.schema.ray import RayConfig, RayInitConfig
from verl.config.schema.reward import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
)
from verl.config.schema.reward_model import JudgeConfig, RewardModelConfig
from verl.config.schema.rollout import RolloutConfig, RolloutServerConfig, ValSamplingConfig, WeightSyncConfig
from verl.config.schema.root import ActorRolloutRefConfig, PPOConfig
from verl.config.schema.serve import ServeConfig, ServeRolloutConfig
from verl.config.schema.sft import SFTConfig, SFTDataConfig
from verl.config.schema.tools import EvalConfig, GenerationConfig
from verl.config.schema.trainer import TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "AsyncTrainingConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CustomRewardConfig",
    "DataConfig",
    "EvalConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "GenerationConfig",
    "JudgeConfig",
    "KLControlConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PFPPOConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "RayConfig",
    "RayInitConfig",
    "RefConfig",
    "RewardConfig",
    "RewardKwargsConfig",
    "RewardManagerConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutServerConfig",
    "SFTConfig",
    "SFTDataConfig",
    "ServeConfig",
    "ServeRolloutConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "WeightSyncConfig",
]
