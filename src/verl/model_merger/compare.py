"""Compare a role's folder with a Hugging Face directory, weight by weight."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl.core.checkpoint_engine.disk import MODEL, check_role_folder, read_full
from verl.errors import CheckpointError
from verl.model_merger.adapter import whole_model
from verl.model_merger.architecture import Architecture, recognise


@dataclass
class Difference:
    """largest: greatest absolute difference of any number, in the weight `name`. problems: names and shapes that differ."""

    compared: int = 0
    largest: float = 0.0
    name: str | None = None
    problems: list[str] = field(default_factory=list)

    def within(self, atol: float) -> bool:
        return not self.problems and self.largest <= atol

    def summary(self, atol: float) -> str:
        verdict = "same" if self.within(atol) else "DIFFERENT"
        where = f" in {self.name}" if self.name else ""
        lines = [
            f"{verdict}: {self.compared} weights compared, max difference {self.largest:.6g}{where} (atol {atol:g})"
        ]
        return "\n  ".join(lines + self.problems[:20])


def compare(
    local_dir: Path | str, hf_dir: Path | str, trust_remote_code: bool = False, base_model: str | None = None
) -> Difference:
    """How far the weights in `local_dir` are from those in `hf_dir`, in the precision of `hf_dir`. One weight at a time."""
    with whole_model(check_role_folder(local_dir), base_model, trust_remote_code) as folder:
        return _compare(folder, hf_dir, trust_remote_code)


def _compare(folder: Path, hf_dir: Path | str, trust_remote_code: bool) -> Difference:
    architecture = recognise(folder, trust_remote_code)
    result = Difference()
    with ExitStack() as stack:
        other = _open(Path(hf_dir).expanduser(), stack)
        names = set(other) - set(architecture.aliases)
        result.problems += [f"{name} is only in {hf_dir}" for name in sorted(names - set(architecture.written()))]
        for name in architecture.written():
            if name not in names:
                result.problems.append(f"{name} is not in {hf_dir}")
                continue
            _compare_one(result, name, read_full(folder / MODEL, [name])[name], other[name].get_tensor(name))
        _compare_aliases(result, architecture, other)
    return result


def _compare_one(result: Difference, name: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        result.problems.append(f"{name} has shape {list(ours.shape)}, there {list(theirs.shape)}")
        return
    result.compared += 1
    # Both sides rounded alike, then subtracted in double: the difference itself is not rounded.
    gap = (ours.to(theirs.dtype).double() - theirs.double()).abs()
    largest = gap.max().item() if gap.numel() else 0.0
    if largest != largest:
        result.problems.append(f"{name} holds NaN")
    elif largest > result.largest:
        result.largest, result.name = largest, name


def _compare_aliases(result: Difference, architecture: Architecture, other: dict[str, Any]) -> None:
    """A directory that stores a tied weight twice has to store the same numbers twice."""
    for alias, source in architecture.aliases.items():
        both = alias in other and source in other
        if both and not torch.equal(other[alias].get_tensor(alias), other[source].get_tensor(source)):
            result.problems.append(f"{alias} and {source} are tied but differ in the directory compared with")


def _open(hf_dir: Path, stack: ExitStack) -> dict[str, Any]:
    """By weight name, the opened file that holds it."""
    files = sorted(hf_dir.glob("*.safetensors")) if hf_dir.is_dir() else []
    if not files:
        raise CheckpointError(f"--test_hf_dir {hf_dir}: no *.safetensors file there")
    opened: dict[str, Any] = {}
    for file in files:
        handle = stack.enter_context(safe_open(file, framework="pt"))
        opened.update(dict.fromkeys(handle.keys(), handle))
    return opened
