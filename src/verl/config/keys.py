"""The schema as a flat list of dotted keys: what `--help`, the docs and the error messages are made from."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from verl.config.schema import PPOConfig

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", Any: "any value"}


@dataclass(frozen=True)
class Key:
    """One option, or one section of options.

    name: dotted key. owner: name of the dataclass that holds the field. type: without None. optional: null is allowed.
    default: as written in the schema; a text with `${...}` follows another key.
    """

    name: str
    owner: str
    field: str
    type: Any
    optional: bool
    default: Any
    help: str
    choices: tuple | None
    min: float | None
    max: float | None
    above: float | None

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.type)

    @property
    def is_mapping(self) -> bool:
        """A free-form section: any key may be set under it."""
        return typing.get_origin(self.type) is dict

    @property
    def type_words(self) -> str:
        """What the value has to be, in words: "a whole number or null"."""
        if typing.get_origin(self.type) is list:
            item = {str: "texts", float: "numbers", int: "whole numbers"}.get(typing.get_args(self.type)[0], "values")
            words = f"a list of {item}"
        elif self.is_mapping:
            words = "a mapping such as {name: value}"
        else:
            words = _TYPE_WORDS.get(self.type, str(self.type))
        return f"{words} or null" if self.optional else words

    @property
    def limit_words(self) -> str:
        """The limits in words, or "": "at least 1", "above 0 and at most 1"."""
        words = []
        if self.above is not None:
            words.append(f"above {self.above}")
        if self.min is not None:
            words.append(f"at least {self.min}")
        if self.max is not None:
            words.append(f"at most {self.max}")
        return " and ".join(words)

    @property
    def choice_words(self) -> str:
        """The choices in words, or ""."""
        return ", ".join(str(c) for c in self.choices) if self.choices else ""


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        return (kinds[0] if len(kinds) == 1 else Any), len(kinds) < len(typing.get_args(annotation))
    return annotation, annotation is Any


def _walk(instance: Any, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(type(instance))
    for f in fields(instance):
        kind, optional = _split_optional(hints[f.name])
        value = getattr(instance, f.name)
        meta = f.metadata
        limits = {name: meta.get(name) for name in ("choices", "min", "max", "above")}
        key = Key(
            f"{prefix}{f.name}", type(instance).__name__, f.name, kind, optional, value, meta.get("help", ""), **limits
        )
        yield key
        if key.is_section:
            yield from _walk(value, f"{key.name}.")


@cache
def schema_keys(schema: type = PPOConfig) -> dict[str, Key]:
    """Every section and option of `schema` by dotted name, in the order of the schema."""
    return {key.name: key for key in _walk(schema(), "")}


def options(schema: type = PPOConfig) -> dict[str, Key]:
    """The options alone, without the sections that hold them."""
    return {name: key for name, key in schema_keys(schema).items() if not key.is_section}


def holder(name: str, schema: type = PPOConfig) -> Key | None:
    """The free-form option under which the dotted `name` lies, if there is one."""
    parts = name.split(".")
    keys = schema_keys(schema)
    for end in range(len(parts) - 1, 0, -1):
        key = keys.get(".".join(parts[:end]))
        if key is not None:
            return key if key.is_mapping else None
    return None
