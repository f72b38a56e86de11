"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: adapters put into a model's linear layers, and taken out again.

The base weights stay as they are; only the adapters are trained and saved. Rollout engines get the merged weights,
W + lora_alpha / lora_rank * B A, under the names of the checkpoint, and know nothing of adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.config.derived import name_list
from verl.config.schema import ModelConfig
from verl.core.checkpoint_engine.gather import Traffic
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.core.model_engine.fsdp_engine import FSDPEngine
    from verl.data.batch import Ragged, SampleBatch

FOLDER = "lora_adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = re.compile(r"\.lora_([AB])(?:\.default)?\.weight$")


def add_adapters(hf: nn.Module, config: ModelConfig, model_path: str, key: str = "actor_rollout_ref.model") -> None:
    """Put adapters of rank `config.lora_rank` into `config.target_modules`, in place. A starts random, B at zero.

    Raises:
        ConfigError: peft is not installed, or the target modules are not there or not linear layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear
    except ImportError:
        raise ConfigError(f"{key}.lora_rank={config.lora_rank} needs peft: pip install 'reverl[peft]'") from None
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_modules(config.target_modules, f"{key}.target_modules"),
        exclude_modules=_modules(config.exclude_modules, f"{key}.exclude_modules"),
        lora_dropout=0.0,
        base_model_name_or_path=model_path,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(settings, hf)
    except ValueError as error:
        raise ConfigError(f"{key}.target_modules={config.target_modules}: {error}") from None
    others = [name for name, m in hf.named_modules() if hasattr(m, "lora_A") and not isinstance(m, Linear)]
    if others:
        raise ConfigError(f"{key}.target_modules: {others[0]} is not a linear layer; name linear layers alone.")
    hf.adapter_settings = settings


def _modules(value: Any, key: str) -> str | list[str] | None:
    """ "all-linear", one name or a regular expression as it is; a list of names; None."""
    if value is None or isinstance(value, str):
        return value
    try:
        return name_list(value)
    except TypeError:
        raise ConfigError(f"{key}={value}: takes all-linear, a name, or a list such as [q_proj,v_proj].") from None


def adapter_settings(hf: nn.Module) -> Any | None:
    """peft's LoraConfig of a model with adapters, else None."""
    return getattr(hf, "adapter_settings", None)


def freeze_base(model: nn.Module) -> None:
    """Only the adapters' parameters get gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    return _ADAPTER.search(name) is not None


def plain_name(name: str) -> str:
    """The name in the checkpoint: without what peft puts between.

    >>> plain_name("model.layers.0.mlp.up_proj.base_layer.weight"), plain_name("q_proj.lora_A.default.weight")
    ('model.layers.0.mlp.up_proj.weight', 'q_proj.lora_A.weight')
    """
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def merged(weights: Iterable[tuple[str, Tensor]], scale: float, traffic: Traffic) -> Iterator[tuple[str, Tensor]]:
    """The model's weights with the adapters added: (plain name, whole tensor), base weights and adapters in, base out.

    The sum is taken in float32 and rounded once, to the base weight's dtype. A weight without adapter is handed on as it is.
    A layer's weight comes before its A, and that before its B, as peft's modules have them: one weight waits at a time.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name.endswith(".base_layer.weight") or ".lora_A." in name:
            waiting[name] = tensor
        elif ".lora_B." in name:
            stem = name[: name.index(".lora_B.")]
            weight, a = waiting.pop(f"{stem}.base_layer.weight"), waiting.pop(name.replace(".lora_B.", ".lora_A."))
            yield f"{stem}.weight", traffic.hold(fuse(weight, a, tensor, scale))
        else:
            yield plain_name(name), tensor
    if waiting:
        raise ValueError(f"adapters without their other half: {', '.join(waiting)}")


@torch.no_grad()
def fuse(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale * b @ a: [out, in], [r, in], [out, r] -> [out, in] in the weight's dtype."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def scale_of(settings: Any) -> float:
    return settings.lora_alpha / settings.r


def save_adapter(folder: Path, settings: Any, weights: dict[str, Tensor]) -> None:
    """Write `lora_adapter/` as peft reads it (`PeftModel.from_pretrained`). weights: by plain name, whole."""
    from safetensors.torch import save_file

    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(target)
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, target / WEIGHTS, metadata={"format": "pt"})


class BaseReference:
    """The reference policy of a LoRA run: the actor itself with its adapters off. Needs no memory of its own."""

    def __init__(self, actor: FSDPEngine):
        self._actor = actor

    def log_probs(
        self, batch: SampleBatch, temperature: float, *, with_entropy: bool = False
    ) -> tuple[Ragged, Ragged | None]:
        """Log-probs (and entropy) of the response tokens under the base model."""
        with adapters_off(self._actor.model):
            return self._actor.log_probs(batch, temperature, with_entropy=with_entropy)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block the model computes as its base does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
