"""A LoRA run's checkpoint: its adapter as peft keeps it, or put into the model that it was trained on."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.core.checkpoint_engine.atomic import sync_tree
from verl.core.checkpoint_engine.disk import HUGGINGFACE, MODEL, check_role_folder, read_full, save_sharded
from verl.core.model_engine.lora import CONFIG, FOLDER, fuse
from verl.errors import CheckpointError


def has_adapter(folder: Path) -> bool:
    """Whether a role's folder holds an adapter alone."""
    return (folder / FOLDER / CONFIG).is_file()


@contextmanager
def whole_model(folder: Path, base: str | None, trust_remote_code: bool) -> Iterator[Path]:
    """A role's folder with all weights: `folder` itself, or for an adapter a copy with it put into its base.

    base: the model that the adapter was trained on; None takes the one that it names.

    Raises:
        CheckpointError: the base cannot be loaded, or does not have the layers that the adapter changes.
    """
    if not has_adapter(folder):
        yield folder
        return
    settings = json.loads((folder / FOLDER / CONFIG).read_text())
    # Beside the checkpoint's own disk may be no room; the system's folder for temporary files is the user's to choose.
    with tempfile.TemporaryDirectory(prefix="verl_merge_") as name:
        target = Path(name) / "actor"
        target.mkdir()
        shutil.copytree(folder / HUGGINGFACE, target / HUGGINGFACE)
        save_sharded(fused_weights(folder, settings, base, trust_remote_code), target / MODEL)
        yield target


def fused_weights(
    folder: Path, settings: dict[str, Any], base: str | None, trust_remote_code: bool
) -> dict[str, Tensor]:
    """All weights of the model by name: the base's, with scale * B A added in float32 where there is an adapter."""
    adapter = read_full(folder / MODEL)
    weights = _base_weights(base or settings["base_model_name_or_path"], trust_remote_code)
    scale = settings["lora_alpha"] / settings["r"]
    for name, a in adapter.items():
        stem, part, _ = name.partition(".lora_A.")
        if not part:
            continue
        b, target = adapter.get(name.replace(".lora_A.", ".lora_B.")), f"{stem}.weight"
        if b is None or target not in weights or weights[target].shape != (b.shape[0], a.shape[1]):
            raise CheckpointError(
                f"{folder}: the base model has no layer {stem} of the shape that the adapter was trained on"
            )
        weights[target] = fuse(weights[target].float(), a, b, scale)
    return weights


def _base_weights(path: str, trust_remote_code: bool) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the adapter's base model {path} cannot be loaded: {str(error).splitlines()[0]} Say where it is with --base_model."
        ) from None
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_parents(target: Path) -> None:
    """CheckpointError for a target that cannot be made, since something above it is a file."""
    existing = next(parent for parent in target.parents if parent.exists())
    if not existing.is_dir():
        raise CheckpointError(f"--target_dir {target}: {existing} is a file, so nothing can be below it")


def export_adapter(local_dir: Path | str, target_dir: Path | str) -> Path:
    """Copy the adapter as peft reads it (`PeftModel.from_pretrained`). Returns the folder."""
    folder, target = check_role_folder(local_dir), Path(target_dir).expanduser().absolute()
    if not has_adapter(folder):
        raise CheckpointError(f"{folder} has no {FOLDER}: it was not trained with actor_rollout_ref.model.lora_rank")
    check_parents(target / CONFIG)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"--target_dir {target} holds files already: name an empty directory")
    shutil.copytree(folder / FOLDER, target, dirs_exist_ok=True)
    sync_tree(target)
    return target
