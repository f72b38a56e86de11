"""Model and optimizer state on disk, readable on any number of ranks.

A role's folder (`global_step_N/actor`, `global_step_N/critic`) holds:

    model/         weights, named as in the Hugging Face checkpoint   (torch.distributed.checkpoint)
    optimizer/     optimizer state                                    (torch.distributed.checkpoint)
    extra.pt       schedule and random state
    huggingface/   config.json, generation_config.json, tokenizer files

Every rank of a process group calls `save_sharded` and `load_sharded` together; without a process group they work alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from verl.core.checkpoint_engine.store import EARLIER, MANIFEST, CheckpointStore, defect, verify
from verl.errors import CheckpointError

MODEL, OPTIMIZER, EXTRA, HUGGINGFACE = "model", "optimizer", "extra.pt", "huggingface"


@dataclass(frozen=True)
class TensorInfo:
    """shape and dtype of a stored tensor; bytes as stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save_sharded(state: dict[str, Any], folder: Path | str, group: dist.ProcessGroup | None = None) -> None:
    """Write tensors and DTensors (and plain Python values among them) into `folder`, each rank its own shards.

    group: through which the ranks agree; None: the default one.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with _quiet():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), process_group=group, no_dist=_alone())


def load_sharded(state: dict[str, Any], folder: Path | str) -> dict[str, Any]:
    """Read `folder` into the tensors of `state`, in place, whatever the layout it was saved in.

    state: tensors and DTensors by name, nested dicts as in an optimizer's state allowed; plain values in it are replaced.
    Both sides must name the same tensors in the same shapes: CheckpointError before anything is read otherwise, since
    a tensor left out on either side would go on with the wrong numbers and no word. Returns `state`.
    """
    path = check_sharded(folder)
    stored, wanted = describe(path), dict(_tensors(state))
    problems = [f"{name} is not in it" for name in wanted if name not in stored]
    problems += [f"it holds {name}, for which this run has no place" for name in stored if name not in wanted]
    problems += [
        f"{name} has shape {list(stored[name].shape)}, this run needs {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit this run: {_few(problems)}")
    with _quiet(), damage_named(path):
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=_alone())
    return state


def describe(folder: Path | str) -> dict[str, TensorInfo]:
    """The tensors stored in a sharded folder, by name, without reading them."""
    return {
        name: TensorInfo(tuple(entry.size), entry.properties.dtype)
        for name, entry in _metadata(Path(folder)).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_full(folder: Path | str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors on the CPU, from a folder saved by any number of ranks; needs no process group.

    names: which tensors; None reads all.
    """
    path = check_sharded(folder)
    stored = describe(path)
    wanted = list(stored) if names is None else list(names)
    if missing := [name for name in wanted if name not in stored]:
        raise CheckpointError(f"{path} lacks {_few(missing)}")
    state = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in wanted}
    if state:
        with _quiet(), damage_named(path):
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def check_sharded(folder: Path | str) -> Path:
    """The folder, if everything that its index points to is there; else CheckpointError."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    needed: dict[str, int] = {}
    for place in (_metadata(path).storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, size in needed.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing")
        if file.stat().st_size < size:
            raise CheckpointError(f"{path} is incomplete: {name} has {file.stat().st_size} bytes of at least {size}")
    return path


def check_role_folder(folder: Path | str) -> Path:
    """The folder `.../actor` or `.../critic`, if the checkpoint around it is whole and its weights undamaged; else CheckpointError.

    A folder copied out of its checkpoint has no manifest above it and is held to its own index alone.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder.{_newest_role(path.parents, path.name)}")
    if not (path / MODEL).is_dir() and (mend := _newest_role([path], "actor")):
        raise CheckpointError(f"{folder} is a run's folder: name one role of one checkpoint.{mend}")
    if (path / "actor").is_dir() and not (path / MODEL).is_dir():
        raise CheckpointError(f"{folder} is a whole checkpoint: name one role in it, such as {Path(folder) / 'actor'}")
    # The prefix also catches the hidden folder of a checkpoint that is still being written.
    in_checkpoint = "global_step_" in path.parent.name or (path.parent / MANIFEST).exists()
    if in_checkpoint and (problem := defect(path.parent)):
        raise CheckpointError(f"{path.parent} is not a whole checkpoint: {problem}. Choose another one.")
    if not (path / MODEL).is_dir():
        raise CheckpointError(f"{folder} has no {MODEL}/ folder: it does not hold a role's weights")
    check_sharded(path / MODEL)
    if in_checkpoint:
        verify(path.parent, f"{path.name}/{MODEL}/")
    return path


def _newest_role(folders: Iterable[Path], role: str) -> str:
    """A hint at the role in the newest whole checkpoint of the first of these folders that is there; "" for none."""
    existing = next((folder for folder in folders if folder.is_dir()), None)
    if existing is None or (newest := CheckpointStore(existing).newest()) is None:
        return ""
    role = role if (newest.path / role).is_dir() else "actor"
    return f" Did you mean {newest.path / role}?"


def save_hf_side(folder: Path | str, model_config: Any, tokenizer: Any = None, generation_config: Any = None) -> Path:
    """Write `huggingface/` beside the weights: what turns them into a Hugging Face model later.

    model_config: as read from the original checkpoint; its dtype becomes the merged model's. tokenizer,
    generation_config: None leaves them out. Returns the folder written.
    """
    target = Path(folder) / HUGGINGFACE
    target.mkdir(parents=True, exist_ok=True)
    for part in (model_config, generation_config, tokenizer):
        if part is not None:
            part.save_pretrained(target)
    return target


def keep_whole(weights: Iterable[tuple[str, Tensor]], dtype: Any) -> dict[str, Tensor]:
    """Whole weights in host memory.

    dtype: of the numbers kept, a torch dtype or its name; None keeps theirs.
    """
    precision = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    kept: dict[str, Tensor] = {}
    for name, tensor in weights:
        wanted = precision if tensor.is_floating_point() else None
        kept[name] = tensor.detach().to("cpu", dtype=wanted, copy=True).contiguous()
    return kept


def save_whole(weights: dict[str, Tensor], folder: Path | str) -> None:
    """Write weights into `huggingface/` as safetensors, where `from_pretrained` finds them beside the config."""
    from huggingface_hub import save_torch_state_dict

    target = Path(folder) / HUGGINGFACE
    target.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, target)


def check_contents(folder: Path | str, wanted: Iterable[str]) -> None:
    """CheckpointError if a role's folder was saved without a part that `wanted` (checkpoint.load_contents) names."""
    places = {"model": MODEL, "optimizer": OPTIMIZER, "extra": EXTRA}
    there = [part for part, name in places.items() if (Path(folder) / name).exists()]
    if missing := [part for part in wanted if part in places and part not in there]:
        raise CheckpointError(
            f"{folder} was saved without {', '.join(missing)} (checkpoint.save_contents), which checkpoint.load_contents "
            + (
                f"asks for. Write checkpoint.load_contents=[{','.join(there)}] in this model's section, such as "
                f"actor_rollout_ref.actor.checkpoint.load_contents=[{','.join(there)}]: the rest then starts anew."
                if "model" in there
                else f"asks for. {EARLIER}"
            )
        )


def _metadata(path: Path) -> Metadata:
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is incomplete: it has no .metadata, which is written last") from None
    except Exception as error:  # unpickling a damaged file raises nearly anything
        raise CheckpointError(f"{path}/.metadata cannot be read: {error}") from error
    if not all(
        isinstance(e, (TensorStorageMetadata, BytesStorageMetadata)) for e in metadata.state_dict_metadata.values()
    ):
        raise CheckpointError(f"{path}/.metadata lists entries that are neither tensors nor values")
    return metadata


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _tensors(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested dicts, under the dotted names by which they are stored."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{prefix}{name}.")


def load_file(path: Path) -> Any:
    """What `torch.save` wrote into this file, without running code from it; CheckpointError if it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. {EARLIER}")
    with damage_named(path):
        return torch.load(path, weights_only=True)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn whatever reading a damaged file raises within into a CheckpointError that names it."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # zip, pickle, json and torch each have their own
        raise CheckpointError(f"{path} is damaged and cannot be read ({_reason(error)}). {EARLIER}") from error
    except CheckpointException as error:  # of torch.distributed.checkpoint; no Exception, and its text is a traceback
        causes = sorted({_reason(cause) for cause, _ in error.failures.values()})
        raise CheckpointError(f"{path} is damaged and cannot be read ({_few(causes)}). {EARLIER}") from error


def _reason(error: BaseException) -> str:
    """The error's kind and first line, without torch's advice to run what the damaged file holds."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {'not what torch writes' if 'weights_only' in line else line}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that there is no process group: that is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _few(items: list[str], limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
