"""Every `>>>` in a docstring gives what is written below it. (Those of verl.algorithms have a test among their own.)"""

import doctest
import importlib
from pathlib import Path

import pytest

import verl

ROOT = Path(verl.__file__).parent


def modules_with_examples() -> list[str]:
    files = [path for path in ROOT.rglob("*.py") if "\n    >>> " in path.read_text()]
    names = (".".join(["verl", *path.relative_to(ROOT).with_suffix("").parts]) for path in sorted(files))
    return [name.removesuffix(".__init__") for name in names if not name.startswith("verl.algorithms.")]


@pytest.mark.parametrize("name", modules_with_examples())
def test_an_example_gives_what_it_says(name):
    if "triton" in name or "cuda" in name:
        pytest.importorskip("triton")
    assert doctest.testmod(importlib.import_module(name)).failed == 0
