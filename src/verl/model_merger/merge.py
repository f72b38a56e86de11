"""Write a role's folder as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl.core.checkpoint_engine.atomic import sync_tree
from verl.core.checkpoint_engine.disk import HUGGINGFACE, MODEL, check_role_folder, describe, read_full
from verl.errors import CheckpointError, ConfigError
from verl.model_merger.adapter import check_parents, whole_model
from verl.model_merger.architecture import Architecture, recognise

SHARD_BYTES = 5 * 10**9
MARKER = "merged.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Merged:
    """What was written. parameters: numbers in the weights, tied ones once. bytes: of all weight files."""

    folder: Path
    architecture: str
    dtype: torch.dtype
    parameters: int
    bytes: int
    files: int

    def summary(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.architecture}, {self.parameters / 1e6:.1f}M parameters in {precision}, "
            f"{self.bytes / 1e6:.1f} MB in {self.files} file{'s' if self.files > 1 else ''}: {self.folder}"
        )


def merge(
    local_dir: Path | str,
    target_dir: Path | str,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    shard_bytes: int = SHARD_BYTES,
    base_model: str | None = None,
) -> Merged:
    """Turn `.../global_step_N/actor` (or critic) into a directory that `from_pretrained` loads.

    dtype: "float32", "bfloat16" or "float16"; None: the original model's, from huggingface/config.json. At most one
    file's worth of weights (`shard_bytes`) is in memory at a time. Everything is written beside the target and renamed,
    so that the target is never half written.

    A checkpoint of adapters (LoRA) is put into the model that it was trained on; base_model says where that is now.
    """
    folder, target = check_role_folder(local_dir), Path(target_dir).expanduser().absolute()
    _check_target(target)
    with whole_model(folder, base_model, trust_remote_code) as whole:
        return _merge(whole, folder, target, dtype, trust_remote_code, shard_bytes)


def _merge(
    folder: Path, origin: Path, target: Path, dtype: str | None, trust_remote_code: bool, shard_bytes: int
) -> Merged:
    """`folder` holds all weights; `origin` is where they come from."""
    architecture = recognise(folder, trust_remote_code)
    precision = _precision(folder, architecture, dtype)
    _check_aliases(folder, architecture)
    shards = _plan(folder, architecture, precision, shard_bytes)
    temporary = target.with_name(f".merging_{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_weights(folder, temporary, architecture, shards, precision)
        _write_side(folder, temporary, architecture, precision)
        _verify(temporary, architecture, shards, precision)
        _write_marker(temporary, origin, architecture, precision)
        sync_tree(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"--target_dir {target} cannot be written ({error}): name a directory where you may write, on a disk with room"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Merged(
        folder=target,
        architecture=architecture.name,
        dtype=precision,
        parameters=sum(torch.Size(architecture.shapes[name]).numel() for name in architecture.written()),
        bytes=sum(file.stat().st_size for file in target.glob("*.safetensors")),
        files=len(shards),
    )


def _check_target(target: Path) -> None:
    """Only a directory that is new, empty, or nothing but an earlier merge may be replaced."""
    check_parents(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"--target_dir {target} is a file: name a new directory")
    present = {p.relative_to(target).as_posix() for p in target.rglob("*") if not p.is_dir()}
    try:
        ours = set(json.loads((target / MARKER).read_text())["files"]) | {MARKER}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if foreign := sorted(present - ours):
        names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise CheckpointError(f"--target_dir {target} holds files of other origin ({names}): name an empty directory")


def _precision(folder: Path, architecture: Architecture, asked: str | None) -> torch.dtype:
    if asked is not None:
        precision = getattr(torch, asked, None)
        if precision not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"--dtype {asked}: write float32, bfloat16 or float16")
        return precision
    original = architecture.config.dtype
    if original is None:
        # A config from before the field existed: keep what was trained.
        return next(info.dtype for info in describe(folder / MODEL).values() if info.dtype.is_floating_point)
    return getattr(torch, original) if isinstance(original, str) else original


def _check_aliases(folder: Path, architecture: Architecture) -> None:
    """A tied weight that was saved twice is written once, so the two copies have to agree."""
    stored = describe(folder / MODEL)
    for alias, source in architecture.aliases.items():
        if alias not in stored:
            continue
        pair = read_full(folder / MODEL, [alias, source])
        if not torch.equal(pair[alias], pair[source]):
            raise CheckpointError(
                f"{folder / MODEL}: {alias} and {source} are tied in the config but differ, so one of them would be lost. "
                f"Set tie_word_embeddings to false in {HUGGINGFACE}/config.json to keep both."
            )


def _plan(folder: Path, architecture: Architecture, precision: torch.dtype, limit: int) -> list[list[str]]:
    """Names of the weights by file: as many in a file as fit into `limit` bytes, at least one."""
    stored = describe(folder / MODEL)
    shards: list[list[str]] = [[]]
    filled = 0
    for name in architecture.written():
        width = precision.itemsize if stored[name].dtype.is_floating_point else stored[name].dtype.itemsize
        size = torch.Size(stored[name].shape).numel() * width
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _cast(tensor: Tensor, precision: torch.dtype) -> Tensor:
    return tensor.to(precision).contiguous() if tensor.is_floating_point() else tensor.contiguous()


def _check_finite(name: str, tensor: Tensor, folder: Path) -> None:
    """Before the cast, whose overflow in a narrow precision is not the checkpoint's fault."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise CheckpointError(
            f"{folder / MODEL}: {name} holds numbers that are not finite: the run had diverged or the file is damaged. "
            "Choose an earlier checkpoint."
        )


def _write_weights(
    folder: Path, out: Path, architecture: Architecture, shards: list[list[str]], precision: torch.dtype
) -> None:
    where, total = {}, 0
    for file, names in zip(_file_names(len(shards)), shards, strict=True):
        tensors = read_full(folder / MODEL, names)
        for name in names:
            _check_finite(name, tensors[name], folder)
            tensors[name] = _cast(tensors[name], precision)
            total += tensors[name].nbytes
            where[name] = file
        save_file(tensors, out / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_side(folder: Path, out: Path, architecture: Architecture, precision: torch.dtype) -> None:
    """Config for what was written, and the tokenizer and generation config as they are."""
    for file in sorted((folder / HUGGINGFACE).rglob("*")):
        relative = file.relative_to(folder / HUGGINGFACE)
        if file.is_file() and file.suffix not in (".safetensors", ".bin") and relative.name != INDEX:
            (out / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / relative)
    architecture.config.architectures = [architecture.name]
    architecture.config.dtype = precision
    architecture.config.save_pretrained(out)


def _verify(out: Path, architecture: Architecture, shards: list[list[str]], precision: torch.dtype) -> None:
    """Read the written files' headers: every weight of the model once, in its shape and precision."""
    found = {}
    for file in _file_names(len(shards)):
        with safe_open(out / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_slice(name)
                found[name] = (tuple(tensor.get_shape()), tensor.get_dtype())
    code = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[precision]
    wrong = sorted(set(found) ^ set(architecture.written()))
    for name, (shape, dtype) in found.items():
        if shape != architecture.shapes.get(name) or (architecture.floating.get(name) and dtype != code):
            wrong.append(f"{name} {dtype}{list(shape)}")
    if wrong:
        raise CheckpointError(f"what was written does not match {architecture.name}: {', '.join(wrong[:5])}")


def _write_marker(out: Path, folder: Path, architecture: Architecture, precision: torch.dtype) -> None:
    record = {
        "from": str(folder),
        "architecture": architecture.name,
        "dtype": str(precision).removeprefix("torch."),
        "files": sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()),
    }
    (out / MARKER).write_text(json.dumps(record, indent=2) + "\n")
