"""What the walker of key_reads.py knows about sources: classes, functions, and the types that annotations name."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

# Names of classes. "*X" is a collection of X.
Types = frozenset[str]
NOTHING: Types = frozenset()

_COLLECTIONS = {"list", "tuple", "set", "Sequence", "Iterable", "Iterator", "Generator", "dict", "Mapping"}
_UNIONS = {"Optional", "Union", "Annotated", "ClassVar", "Final", "type", "Type"}


@dataclass
class ClassInfo:
    bases: list[str] = field(default_factory=list)
    attributes: dict[str, Types] = field(default_factory=dict)
    methods: dict[str, FunctionInfo] = field(default_factory=dict)


@dataclass
class FunctionInfo:
    node: ast.FunctionDef | ast.AsyncFunctionDef
    annotated: Types = NOTHING
    returns: Types = NOTHING
    parameters: dict[str, Types] = field(default_factory=dict)
    is_property: bool = False


@dataclass(frozen=True)
class Read:
    """One field, read in a module inside a top-level definition."""

    owner: str
    field: str
    module: str
    definition: str


def annotation_types(node: ast.expr | None) -> Types:
    """Classes that an annotation names."""
    if node is None:
        return NOTHING
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return annotation_types(ast.parse(node.value, mode="eval").body)
        except SyntaxError:
            return NOTHING
    if isinstance(node, ast.Name):
        return frozenset({node.id})
    if isinstance(node, ast.Attribute):
        return frozenset({node.attr})
    if isinstance(node, ast.BinOp):
        return annotation_types(node.left) | annotation_types(node.right)
    if isinstance(node, ast.Subscript):
        outer = next(iter(annotation_types(node.value)), "")
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        found = frozenset().union(*(annotation_types(item) for item in inner))
        if outer in _COLLECTIONS:
            return collection(found)
        return found if outer in _UNIONS else frozenset({outer})
    return NOTHING


def collection(types: Types) -> Types:
    """A collection of `types`; collections of collections are followed three deep, so that learning comes to an end."""
    return frozenset(f"*{name}" for name in types if not name.startswith("***"))


def schema_fields(cls: type) -> dict[str, Types]:
    """Fields of a dataclass with the classes that their annotations name."""
    texts = {f.name: f.type if isinstance(f.type, str) else _type_text(f.type) for f in fields(cls)}
    return {name: annotation_types(ast.parse(text, mode="eval").body) for name, text in texts.items()}


def _type_text(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def declare_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> FunctionInfo:
    """What is known of a function before any of it is walked."""
    decorators = {name for d in node.decorator_list for name in annotation_types(d)}
    return FunctionInfo(
        node, annotated=annotation_types(node.returns), is_property=bool(decorators & {"property", "cached_property"})
    )


def schema_classes(root: type) -> list[type]:
    """A dataclass and all dataclasses in its fields."""
    instance = root()
    found: dict[str, type] = {}

    def collect(value: object) -> None:
        if is_dataclass(value) and type(value).__name__ not in found:
            found[type(value).__name__] = type(value)
            for f in fields(value):
                collect(getattr(value, f.name))

    collect(instance)
    return list(found.values())


def read_sources(root: Path, package: str) -> dict[str, str]:
    """{dotted module name: source} of the package in folder `root`."""
    return {
        f"{package}.{'.'.join(path.relative_to(root).with_suffix('').parts)}".removesuffix(
            ".__init__"
        ): path.read_text()
        for path in sorted(root.rglob("*.py"))
    }
