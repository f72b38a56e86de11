"""Which model a set of stored weights belongs to, and whether they are all there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from verl.core.checkpoint_engine.disk import HUGGINGFACE, MODEL, TensorInfo, describe
from verl.errors import CheckpointError

# In this order: a policy, a value model whose head has a bias, a value or reward model whose head has none.
CANDIDATES = (AutoModelForCausalLM, AutoModelForTokenClassification, AutoModelForSequenceClassification)


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint will be loaded as.

    name: the transformers class. shapes: every weight of the model. aliases: tied weights, each with the weight that it
    is the same as; a Hugging Face checkpoint leaves aliases out.
    """

    name: str
    config: Any
    shapes: dict[str, tuple[int, ...]]
    floating: dict[str, bool]
    aliases: dict[str, str]

    def written(self) -> list[str]:
        """Names of the weights that a Hugging Face checkpoint of this model holds."""
        return [name for name in self.shapes if name not in self.aliases]


def load_config(folder: Path, trust_remote_code: bool) -> Any:
    """The config in `folder`/huggingface."""
    side = folder / HUGGINGFACE
    if not (side / "config.json").is_file():
        raise CheckpointError(f"{folder} has no {HUGGINGFACE}/config.json, which says what model the weights belong to")
    return AutoConfig.from_pretrained(side, trust_remote_code=trust_remote_code)


def recognise(folder: Path, trust_remote_code: bool = False) -> Architecture:
    """The architecture whose weights `folder`/model holds: every one, in the right shape, and nothing else.

    The stored names decide between a language model and a value model, since the config of a value model is often the
    language model's that it came from. Raises CheckpointError with the nearest candidate's differences.
    """
    stored = describe(folder / MODEL)
    config = load_config(folder, trust_remote_code)
    if "score.weight" in stored:
        config.num_labels = stored["score.weight"].shape[0]
    best: tuple[int, str, list[str]] | None = None
    for candidate in CANDIDATES:
        architecture = _build(candidate, config, trust_remote_code)
        if architecture is None:
            continue
        problems = mismatches(architecture, stored)
        if not problems:
            return architecture
        if best is None or len(problems) < best[0]:
            best = (len(problems), architecture.name, problems)
    if best is None:
        raise CheckpointError(f"{folder}: transformers has no model class for the config's type '{config.model_type}'")
    count, name, problems = best
    shown = "".join(f"\n  {line}" for line in problems[:10]) + (f"\n  and {count - 10} more" if count > 10 else "")
    raise CheckpointError(f"{folder / MODEL} does not hold the weights of {name}, the nearest model:{shown}")


def mismatches(architecture: Architecture, stored: dict[str, TensorInfo]) -> list[str]:
    """Differences between a model's weights and those stored, one sentence each. A stored alias is allowed."""
    lines = [f"{name} is missing" for name in architecture.written() if name not in stored]
    for name, info in stored.items():
        if name not in architecture.shapes:
            lines.append(f"{name} {list(info.shape)} is not a weight of this model")
        elif info.shape != architecture.shapes[name]:
            lines.append(f"{name} has shape {list(info.shape)} instead of {list(architecture.shapes[name])}")
        elif info.dtype.is_floating_point != architecture.floating[name]:
            lines.append(f"{name} has dtype {info.dtype}")
    return lines


def _build(candidate: Any, config: Any, trust_remote_code: bool) -> Architecture | None:
    """The candidate's model on the meta device: names and shapes without memory. None if there is no such class."""
    try:
        with torch.device("meta"):
            model = candidate.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError:  # "Unrecognized configuration class": this family has no such head
        return None
    state = model.state_dict()
    return Architecture(
        name=type(model).__name__,
        config=config,
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        floating={name: tensor.is_floating_point() for name, tensor in state.items()},
        aliases={k: v for k, v in model.all_tied_weights_keys.items() if k in state},
    )
