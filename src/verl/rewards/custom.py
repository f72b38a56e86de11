"""Load the user's reward function from a file and check its signature before anything slow starts."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import RewardError
from verl.rewards.types import ScoreFunction

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURE = "def {name}(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True)
class CustomFunction:
    """Where a user's function is; this, not the function, travels to worker processes."""

    path: str
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def load(self) -> ScoreFunction:
        """Import the file and return the function with `kwargs` bound. Raises RewardError with the mend."""
        module = load_module(self.path)
        function = getattr(module, self.name, None)
        if not callable(function):
            raise RewardError(self._missing(module, function))
        check_signature(function, self.name, self.path, self.kwargs)
        return partial(function, **self.kwargs) if self.kwargs else function

    def _missing(self, module: ModuleType, found: Any) -> str:
        candidates = _functions_of(module)
        fitting = [name for name, function in candidates.items() if _signature_fault(function, self.kwargs) is None]
        near = difflib.get_close_matches(self.name, candidates, n=1)
        suggestion = fitting[0] if len(fitting) == 1 else near[0] if near else None
        what = "is not a function" if found is not None else "does not exist"
        message = f"custom_reward_function.name={self.name} {what} in {self.path}."
        if suggestion:
            return f"{message} Did you mean {suggestion}? Write custom_reward_function.name={suggestion}."
        listing = f"It defines {', '.join(candidates)}." if candidates else "It defines no function."
        return f"{message} {listing} Add: {SIGNATURE.format(name=self.name)}."


def check_signature(function: ScoreFunction, name: str, path: str, kwargs: dict[str, Any]) -> None:
    """Raise RewardError unless the function takes the four keyword arguments and `reward_kwargs`, and needs no others."""
    fault = _signature_fault(function, kwargs)
    if fault:
        raise RewardError(f"{name} in {path}: {fault} Its signature has to be: {SIGNATURE.format(name=name)}.")


def _signature_fault(function: ScoreFunction, kwargs: dict[str, Any]) -> str | None:
    clash = sorted(set(kwargs) & set(ARGUMENTS))
    if clash:
        return f"custom_reward_function.reward_kwargs sets {', '.join(clash)}, which the trainer passes."
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # a builtin without a signature: the first call will tell
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        return f"it takes {', '.join(positional)} by position only, and is called with keywords."
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = [*ARGUMENTS, *kwargs]
    refused = [] if open_ended else [argument for argument in given if argument not in named]
    if refused:
        return f"it does not take {', '.join(refused)} (add it, or **kwargs)."
    needed = [p.name for p in parameters if p.name in named and p.default is p.empty and p.name not in given]
    if needed:
        return (
            f"it needs {', '.join(needed)}, which nothing gives (set custom_reward_function.reward_kwargs.{needed[0]})."
        )
    return None


def _functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Public functions that the file itself defines."""
    members = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in members if f.__module__ == module.__name__ and not name.startswith("_")}


def find_file(path: str, key: str = "custom_reward_function.path") -> Path:
    """The file that a config key names; RewardError with the nearest where there is none."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise RewardError(_no_file(path, file, key))
    return file


def load_module(path: str, key: str = "custom_reward_function.path") -> ModuleType:
    """Run a Python file as a module, so that `import neighbour`, `from .neighbour import x` and, in a package,
    `from ..other import x` work as its author meant them. key: the config key that names it, for messages."""
    file = find_file(path, key)
    parent = _package_of(file)
    name = f"{parent}.{re.sub(r'[^0-9a-zA-Z_]', '_', file.stem)}"
    folder = str(file.parent)
    # In front while the file runs, as for a script. At the end afterwards (functions may import when called), so that
    # a neighbour called `datasets.py` cannot take the place of an installed package elsewhere in this process.
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader(name, str(file)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if "." in parent:
            importlib.import_module(parent)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise RewardError(f"{key}={path} cannot be imported: {type(error).__name__}: {error}\n{trace}") from error
    finally:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    return module


def _package_of(file: Path) -> str:
    """Name of the package that holds the file, under a root package of our own: its names clash with nobody's."""
    root, inner = file.parent, []
    while (root / "__init__.py").is_file():
        inner.insert(0, root.name)
        root = root.parent
    package = f"verl_user_code_{hashlib.sha1(str(root).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        module = ModuleType(package)
        module.__path__ = [str(root)]
        sys.modules[package] = module
    return ".".join([package, *inner])


def _no_file(path: str, file: Path, key: str) -> str:
    message = f"{key}={path}: there is no such file."
    if not file.parent.is_dir():
        return f"{message} Its folder {file.parent} does not exist either."
    neighbours = sorted(p.name for p in file.parent.glob("*.py"))
    near = difflib.get_close_matches(file.name, neighbours, n=1, cutoff=0.5)
    if near:
        return f"{message} Did you mean {file.parent / near[0]}?"
    return f"{message} Python files in {file.parent}: {', '.join(neighbours[:10]) or 'none'}."
