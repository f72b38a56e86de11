"""Command-line overrides to a checked config: Hydra's grammar and OmegaConf's typed merge, nothing else of Hydra.

There are no output folders, no change of directory and no set-up of logging.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from verl.config.keys import Key, holder, options, schema_keys
from verl.config.limits import limit_problem, wrong_type
from verl.config.schema import PPOConfig
from verl.config.suggest import did_you_mean, nearest_keys
from verl.errors import ConfigError

T = TypeVar("T")


def print_notice(text: str) -> None:
    """Show a notice on stderr."""
    print(f"note: {text}", file=sys.stderr)


def compose(
    overrides: list[str],
    schema: type[T] = PPOConfig,  # type: ignore[assignment]
    *,
    notify: Callable[[str], None] = print_notice,
) -> T:
    """The config that `overrides` make of the schema's defaults, as dataclass instances with all values resolved.

    Args:
        overrides: words in Hydra's grammar: a.b=c, a.b=[1,2], +a.b=c, ++a.b=c, ~a.b. A later word wins over an earlier.
        schema: a dataclass of `opt` fields.
        notify: gets a line for every old key name.

    Raises:
        ConfigError: with all problems of the command line.
    """
    from omegaconf import OmegaConf

    from verl.config.overrides import expand, parse_words
    from verl.config.rename import apply_old_names

    words, problems = parse_words(overrides)
    assignments = [leaf for word in words for leaf in expand(word, lambda key: _is_one_value(key, schema))]
    if schema is PPOConfig:
        assignments, notices, more = apply_old_names(assignments)
        problems += more
        for notice in notices:
            notify(notice)
    tree = OmegaConf.structured(schema)
    OmegaConf.set_struct(tree, True)
    given: dict[str, Any] = {}
    for assignment in assignments:
        problem = _key_problem(assignment.key, schema) or _apply(tree, assignment, schema)
        if problem:
            problems.append(problem)
        else:
            given[assignment.key] = assignment.value
    problems += _resolve_problems(tree, given, schema)
    if problems:
        raise ConfigError(join_problems(problems))
    return OmegaConf.to_object(tree)  # type: ignore[return-value]


def join_problems(problems: list[str]) -> str:
    """One message of all problems."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return "\n".join([f"{len(unique)} problems in the configuration:", *(f"  - {p}" for p in unique)])


def to_yaml(config: Any) -> str:
    """A config as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def _is_one_value(key: str, schema: type) -> bool:
    """A mapping assigned to this key is its value, not a short form for several keys."""
    return key in options(schema) or holder(key, schema) is not None


def _key_problem(key: str, schema: type) -> str:
    found = schema_keys(schema).get(key)
    if found is not None:
        if not found.is_section:
            return ""
        first = next(name for name in options(schema) if name.startswith(f"{key}."))
        return f"{key}: is a section, not an option. Set an option in it, such as {first}=VALUE."
    if holder(key, schema) is not None:
        return ""
    parent = key.rsplit(".", 1)[0]
    if parent in options(schema):
        return f"{key}: {parent} is one option, which takes {options(schema)[parent].type_words}."
    return f"{key}: there is no such key.{did_you_mean(_known_like(key, schema)) or ' See --help.'}"


def _known_like(key: str, schema: type) -> list[str]:
    if schema is not PPOConfig:
        return nearest_keys(key, options(schema))
    from verl.config.old_keys import RENAMED

    # A misspelled old name leads to the new one.
    names = {name: name for name in options(schema)} | {o: n for o, n in RENAMED.items() if not o.endswith("*")}
    return list(dict.fromkeys(names[name] for name in nearest_keys(key, names)))


def _apply(tree: Any, assignment: Any, schema: type) -> str:
    """Put one assignment into the tree; the problem, or ""."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    key = schema_keys(schema).get(assignment.key)
    if assignment.remove:
        return _remove(tree, assignment, key)
    value = _fit(assignment, key)
    if key is not None and _is_misfit(value, key):
        return wrong_type(key, assignment.value)
    try:
        with open_dict(tree):
            OmegaConf.update(tree, assignment.key, value, merge=True, force_add=key is None)
    except OmegaConfBaseException as error:
        if key is None:
            return f"{assignment.key}={assignment.value}: {str(error).splitlines()[0]}"
        return wrong_type(key, assignment.value)
    return ""


def _remove(tree: Any, assignment: Any, key: Key | None) -> str:
    from omegaconf import OmegaConf, open_dict

    if key is not None:
        mend = f"write {key.name}=null" if key.optional else f"leave the word out for its default, {key.default!r}"
        return f"~{assignment.key}: an option cannot be taken away; {mend}."
    parent, _, last = assignment.key.rpartition(".")
    section = OmegaConf.select(tree, parent)
    if section is None or last not in section:
        return f"~{assignment.key}: nothing to take away; no earlier word set it."
    with open_dict(tree):
        del section[last]
    return ""


def _fit(assignment: Any, key: Key | None) -> Any:
    """The value in the option's type where it plainly says the same: 2024_05 as text, 1e3 as a whole number."""
    value = assignment.value
    if key is None:
        return value
    if key.type is str and assignment.text is not None and value is not None:
        return assignment.text
    if key.type is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _is_misfit(value: Any, key: Key) -> bool:
    """Values that OmegaConf would convert although they are mistakes."""
    if key.type is bool:
        return isinstance(value, (int, float)) and value not in (0, 1)
    return key.type is not Any and not key.is_mapping and isinstance(value, dict)


def _resolve_problems(tree: Any, given: dict[str, Any], schema: type) -> list[str]:
    """Problems of values that refer to other keys, and of limits and choices."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, InterpolationValidationError, OmegaConfBaseException

    problems = []
    for name, key in options(schema).items():
        if name not in given and isinstance(key.default, str) and "${" in key.default:
            continue  # What it follows is checked at its own place.
        shown = given.get(name, key.default)
        try:
            value = OmegaConf.select(tree, name, throw_on_missing=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            problems.append(limit_problem(key, value))
        except InterpolationValidationError:
            problems.append(wrong_type(key, shown))
        except InterpolationKeyError as error:
            target = (re.findall("'(.+)'", str(error)) or ["?"])[0]
            mend = did_you_mean(_known_like(target, schema))
            problems.append(f"{name}={shown}: refers to {target}, which is no option.{mend}")
        except OmegaConfBaseException as error:
            problems.append(f"{name}={shown}: {str(error).splitlines()[0].rstrip('.')}.")
        except RecursionError:
            problems.append(f"{name}={shown}: refers to itself.")
    return [p for p in problems if p]
