"""Checks of a model that scores responses, part of `verl.config.validate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl.config.schema import PPOConfig

if TYPE_CHECKING:
    from verl.config.validate import Findings


def check_reward_model(config: PPOConfig, found: Findings) -> None:
    """Options of reward_model that contradict each other or the reward function's."""
    model, function = config.reward_model, config.custom_reward_function.path
    if not model.enable:
        found.notice(
            bool(model.model.path),
            f"reward_model.model.path={model.model.path} has no effect without reward_model.enable=True.",
        )
        return
    found.problem(not model.model.path, "reward_model.enable=True needs reward_model.model.path=FOLDER_OR_MODEL_ID.")
    found.problem(
        bool(function) and model.combine == "replace",
        f"custom_reward_function.path={function} has no effect with reward_model.combine=replace, where the model's score is "
        "the reward. Write reward_model.combine=add for the sum of both, or leave the function out.",
    )
    found.problem(
        not math.isfinite(model.weight), f"reward_model.weight={model.weight}: has to be a finite number, such as 1.0."
    )
    judge = model.judge
    found.problem(
        model.model_type == "discriminative" and judge.path is not None,
        f"reward_model.judge.path={judge.path} has no effect with reward_model.model_type=discriminative, which writes nothing.",
    )
    rollout = model.rollout
    found.notice(
        not rollout.do_sample and rollout.temperature not in (0.0, 1.0),
        f"the judge is greedy: reward_model.rollout.temperature={rollout.temperature} has no effect without "
        "reward_model.rollout.do_sample=True.",
    )
    found.notice(
        model.micro_batch_size_per_gpu is not None and model.model_type == "generative",
        "reward_model.micro_batch_size_per_gpu has no effect with reward_model.model_type=generative.",
    )
