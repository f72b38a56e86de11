"""The whole config of `verl.trainer.main_ppo`."""

from dataclasses import dataclass

from verl.config.schema.actor import ActorConfig, CriticConfig, ModelConfig, RefConfig
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.schema.async_training import AsyncTrainingConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.options import opt
from verl.config.schema.ray import RayConfig
from verl.config.schema.reward import CustomRewardConfig, RewardConfig
from verl.config.schema.reward_model import RewardModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import TrainerConfig


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = opt(ModelConfig, "the model that learns")
    actor: ActorConfig = opt(ActorConfig, "its training")
    ref: RefConfig = opt(RefConfig, "the frozen reference")
    rollout: RolloutConfig = opt(RolloutConfig, "its generation")
    nccl_timeout: int = opt(600, "seconds a collective may wait", min=1)


@dataclass
class PPOConfig:
    data: DataConfig = opt(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = opt(
        ActorRolloutRefConfig, "actor, rollout and reference: one model in three roles"
    )
    critic: CriticConfig = opt(CriticConfig, "value model (used when the estimator needs one)")
    algorithm: AlgorithmConfig = opt(AlgorithmConfig, "algorithm")
    reward: RewardConfig = opt(RewardConfig, "rewards")
    custom_reward_function: CustomRewardConfig = opt(CustomRewardConfig, "your own reward function")
    reward_model: RewardModelConfig = opt(RewardModelConfig, "a model that scores responses")
    trainer: TrainerConfig = opt(TrainerConfig, "the run")
    async_training: AsyncTrainingConfig = opt(
        AsyncTrainingConfig, "generation beside training (trainer.pipeline=one_step_off or fully_async)"
    )
    ray_kwargs: RayConfig = opt(RayConfig, "Ray (used on more than one device)")
