"""What the native engine needs to know of a model: `ModelSpec`, read from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
# The rope types whose frequencies do not depend on the length of the sequence at hand.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder with grouped-query attention, rotary positions, RMS norms and a SwiGLU feed-forward part.

    inv_freq: float32 [head_dim / 2], radians a position. rope_scale: factor of cos and sin (yarn; otherwise 1).
    sliding_window: positions that a token sees, or None for all; the engine computes full attention, so contexts longer
    than it are refused.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    sliding_window: int | None
    inv_freq: Tensor
    rope_scale: float

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> ModelSpec:
        """The spec of a transformers config; ConfigError if this engine does not compute that model."""
        reason = supported(config)
        if reason:
            raise ConfigError(f"rollout.name=native: {reason}. Set actor_rollout_ref.rollout.name=hf.")
        family = config.model_type
        heads = config.num_attention_heads
        bias = bool(getattr(config, "attention_bias", False))
        inv_freq, rope_scale = rope_frequencies(config)
        return cls(
            family=family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=_head_dim(config),
            rms_eps=config.rms_norm_eps,
            tied_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=family == "qwen2" or bias,
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            max_positions=config.max_position_embeddings,
            sliding_window=_sliding_window(config),
            inv_freq=inv_freq,
            rope_scale=rope_scale,
        )

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the KV cache holds for one token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def rotary_table(self, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """cos and sin for positions 0..length-1: float32 [length, head_dim / 2] each."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self.inv_freq.cpu()[None]
        return (angles.cos() * self.rope_scale).to(device), (angles.sin() * self.rope_scale).to(device)


def supported(config: Any, max_model_len: int | None = None) -> str | None:
    """None if the native engine computes this transformers config, else the reason why not.

    max_model_len: longest prompt plus response in use; models with a sliding window are fine below the window.
    """
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        return f"model type '{family}' is not one of {', '.join(FAMILIES)}"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"hidden_act '{config.hidden_act}' is not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "rope_parameters differ between layers"
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"rope_type '{rope['rope_type']}' is not one of {', '.join(ROPE_TYPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated (partial_rotary_factor)"
    if getattr(config, "quantization_config", None):
        return "the weights are quantised"
    window = _sliding_window(config)
    if window is not None and max_model_len is not None and max_model_len > window:
        return f"prompt plus response may reach {max_model_len} tokens, past the model's sliding window of {window}"
    return None


def rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """(inv_freq float32 [head_dim / 2], factor of cos and sin) of a transformers config."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        exponent = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
        return 1.0 / (float(rope["rope_theta"]) ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=torch.device("cpu"))
    return inv_freq.float(), float(scale)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _sliding_window(config: Any) -> int | None:
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)
