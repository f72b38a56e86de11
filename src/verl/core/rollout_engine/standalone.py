"""A rollout engine around a model that nothing trains: for files of prompts, and for a judge."""

from __future__ import annotations

from typing import Any

import torch

from verl.config.schema import RolloutConfig, ServeRolloutConfig
from verl.config.schema.tools import GenerationModelConfig, GenerationRolloutConfig
from verl.core.model_engine.loading import end_tokens, load_config, load_policy
from verl.core.rollout_engine.api import RolloutEngine, SamplingParams
from verl.core.rollout_engine.factory import DTYPES, make_rollout_engine
from verl.errors import ConfigError


def build_engine(
    model: GenerationModelConfig,
    rollout: GenerationRolloutConfig,
    *,
    model_path: str,
    device: torch.device,
    tokenizer: Any,
    key: str,
) -> tuple[RolloutEngine, tuple[int, ...], str | None]:
    """(engine with the model's weights, tokens that end a response, a notice if it is not the engine asked for).

    key: the config key of the model's path, for messages.

    Raises:
        ConfigError: the model cannot be loaded, or the engine is not there or cannot run it.
    """
    code = model.trust_remote_code
    dtype = DTYPES[rollout.dtype] if rollout.dtype else (torch.bfloat16 if device.type == "cuda" else torch.float32)
    hf_config = load_config(model_path, trust_remote_code=code, key=key)
    _check_length(rollout, hf_config, key)
    policy = load_policy(model_path, hf_config, dtype, trust_remote_code=code, key=key).requires_grad_(False)
    weights = dict(policy.named_parameters())
    engine, notice = make_rollout_engine(
        engine_config(rollout, rollout.seed),
        model_path=model_path,
        hf_config=hf_config,
        device=device,
        trainer_weights=weights,
        trainer_dtype=dtype,
        max_prompt_length=rollout.prompt_length,
        max_response_length=rollout.response_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    engine.wake()
    engine.load_weights(weights.items(), version=0)
    return engine, end_tokens(tokenizer, policy.generation_config), notice


def _check_length(rollout: GenerationRolloutConfig, hf_config: Any, key: str) -> None:
    most = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if rollout.name == "native" and most is not None and rollout.prompt_length + rollout.response_length > most:
        where = key.removesuffix("model.path") + "rollout"
        raise ConfigError(
            f"{where}.prompt_length={rollout.prompt_length} and {where}.response_length={rollout.response_length} are more than the "
            f"{most} tokens that the model of {key} attends to. Lower one of them."
        )


def engine_config(rollout: GenerationRolloutConfig | ServeRolloutConfig, seed: int = 0) -> RolloutConfig:
    """What the engines read, in the form in which the trainer gives it to them."""
    return RolloutConfig(
        name=rollout.name,
        dtype=rollout.dtype,
        seed=seed,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
    )


def sampling_params(rollout: GenerationRolloutConfig, stops: tuple[int, ...], n: int = 1) -> SamplingParams:
    """Greedy with rollout.do_sample=False."""
    return SamplingParams(
        max_tokens=rollout.response_length,
        n=n,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k if rollout.do_sample else -1,
        top_p=rollout.top_p if rollout.do_sample else 1.0,
        stop_token_ids=stops,
        seed=rollout.seed,
    )
