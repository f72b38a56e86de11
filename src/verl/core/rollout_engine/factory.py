"""`make_rollout_engine`: the engine that `actor_rollout_ref.rollout.name` asks for, or the one that can do the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import RolloutEngine
from verl.core.rollout_engine.config import supported
from verl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_engine(config: RolloutConfig, key: str = "rollout") -> None:
    """Find what is wrong with the choice of engine without loading anything. key: the section, for messages.

    Raises:
        ConfigError: the engine is not installed or not in this version, or does not do what is asked of it.
    """
    if config.tensor_model_parallel_size > 1 and config.name != "vllm":
        raise ConfigError(
            f"{key}.tensor_model_parallel_size={config.tensor_model_parallel_size}: only {key}.name=vllm splits the "
            f"rollout model over devices; with {key}.name={config.name} set it to 1."
        )
    if config.name not in ("native", "hf", "vllm", "server"):
        raise ConfigError(
            f"{key}.name={config.name} is not in this version. Write {key}.name=native, hf, vllm or server."
        )
    if config.name == "vllm":
        from verl.core.rollout_engine.vllm_setup import check_allocator, check_installed

        check_installed()
        check_allocator(config, key)


def make_rollout_engine(
    config: RolloutConfig,
    *,
    model_path: str | Path,
    hf_config: PretrainedConfig,
    device: torch.device,
    trainer_weights: Mapping[str, Tensor] | None,
    trainer_dtype: torch.dtype,
    max_prompt_length: int,
    max_response_length: int,
    pad_token_id: int | None,
    own_copy: bool = False,
) -> tuple[RolloutEngine, str | None]:
    """The rollout engine of one device, and a notice for the user if it is not quite what was asked for.

    native makes way for hf, with the reason, for a model that it does not compute.

    Args:
        config: actor_rollout_ref.rollout.
        model_path: Hugging Face folder of the model (vllm reads it).
        hf_config: transformers config of the model.
        trainer_weights: the trainer's parameters by checkpoint name. On a CPU, native and hf read them in place where the
            dtype allows. None: `load_weights` brings them.
        trainer_dtype: of those.
        max_prompt_length, max_response_length: tokens.
        own_copy: never in place: the engine generates while the trainer changes its weights.
    Raises:
        ConfigError: the engine is not installed, or cannot run this model here.
    """
    check_engine(config)
    name, notice = config.name, None
    max_model_len = max_prompt_length + max_response_length
    dtype = DTYPES[config.dtype] if config.dtype else None
    if name == "native":
        reason = supported(hf_config, max_model_len)
        if reason is None:
            if trainer_weights is None and device.type == "cpu":
                dtype = dtype or trainer_dtype
            where = {"device": device, "dtype": dtype, "config": config}
            return _native(hf_config, max_model_len, weights=trainer_weights, own_copy=own_copy, **where)
        name = "hf"
        notice = (
            f"rollout.name=native does not do this model ({reason}): generating with transformers, which is slower."
        )
    if name == "hf":
        from verl.core.rollout_engine.hf_engine import HFEngine

        if own_copy and trainer_weights is not None:
            trainer_weights = {name: tensor.detach().clone() for name, tensor in trainer_weights.items()}
        model = model_around(hf_config, trainer_weights, device, dtype or trainer_dtype)
        return HFEngine(model, config=config, pad_token_id=pad_token_id or 0), notice
    if name == "server":
        return _servers(config, hf_config, max_model_len)
    from verl.core.rollout_engine.vllm_engine import VLLMEngine

    default = torch.bfloat16 if device.type == "cuda" else trainer_dtype
    engine = VLLMEngine(model_path, device=device, dtype=dtype or default, config=config, max_model_len=max_model_len)
    return engine, None


def _native(
    hf_config: PretrainedConfig, max_model_len: int, *, config: RolloutConfig, dtype: torch.dtype | None, **options: Any
) -> tuple[RolloutEngine, str | None]:
    from verl.core.rollout_engine.engine import NativeEngine

    engine = NativeEngine(hf_config, config=config, dtype=dtype, **options)
    engine.check_length(max_model_len)
    if dtype in (None, engine.dtype):
        return engine, None
    return engine, (
        f"rollout.dtype={config.dtype}: this CPU has no fast bfloat16, so generation computes in float32, which is quicker "
        "on it."
    )


def _servers(
    config: RolloutConfig, hf_config: PretrainedConfig, max_model_len: int
) -> tuple[RolloutEngine, str | None]:
    from verl.core.rollout_engine.service.check import check_servers
    from verl.core.rollout_engine.service.client import ServerRolloutEngine

    servers = check_servers(config.server, max_model_len)
    servers.check_model(hf_config)
    return ServerRolloutEngine(config, servers), "\n".join(servers.notices) or None


def model_around(
    hf_config: PretrainedConfig, weights: Mapping[str, Tensor] | None, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A transformers model that holds `weights` themselves where device and dtype are equal, copies elsewhere.

    Without weights: random ones.

    Raises:
        CheckpointError: a weight of the model did not come, or one has no place in it.
    """
    from transformers import AutoModelForCausalLM

    own_code = type(hf_config).__module__.startswith("transformers_modules")  # the user has allowed it already
    model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=own_code)
    if weights is None:
        return model.to(device)
    given = {name: tensor.detach().to(device=device, dtype=dtype) for name, tensor in weights.items()}
    missing, unexpected = model.load_state_dict(given, strict=False, assign=True)
    model.tie_weights()
    tied = set(model.state_dict()) - set(dict(model.named_parameters()))
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise CheckpointError(f"The weights do not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}")
    return model.to(device)
