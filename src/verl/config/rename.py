"""Old key names: moved to the new ones, or accepted without effect, each with a notice."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from verl.config.keys import schema_keys
from verl.config.old_keys import PER_DEVICE, RENAMED, RETIRED, VALUE_ALIASES, Retired
from verl.config.overrides import Assignment

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def new_name(key: str) -> str | None:
    """Today's name of an old key, or None where the key is not an old one."""
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED.items():
        if old.endswith(".*") and key.startswith(old[:-1]):
            return new[:-1] + key[len(old) - 1 :]
    return None


def retirement(key: str) -> Retired | None:
    """The entry of a retired key, or None. A pattern "x.*" covers x itself too."""
    for entry in RETIRED:
        if fnmatchcase(key, entry.pattern) or fnmatchcase(key, entry.pattern.removesuffix(".*")):
            return entry
    return None


def apply_old_names(assignments: list[Assignment]) -> tuple[list[Assignment], list[str], list[str]]:
    """Assignments of today's keys alone.

    Returns:
        The assignments, notices for the user, and problems: values of retired keys that ask for what this version
        does not do.
    """
    given = {a.key: a.value for a in assignments}
    kept: list[Assignment] = []
    notices: list[str] = []
    problems: list[str] = []
    retired: dict[str, list[str]] = {}
    for assignment in assignments:
        new = new_name(assignment.key)
        entry = None if new or assignment.key in schema_keys() else retirement(assignment.key)
        if new:
            try:
                kept += _move(assignment, new, given, notices)
            except ValueError as error:
                problems.append(str(error))
        elif entry:
            problem = _disagreement(assignment, entry, given)
            if problem:
                problems.append(problem)
            else:
                retired.setdefault(entry.reason, []).append(assignment.key)
        else:
            kept.append(_alias(assignment))
    notices += [f"not read: {', '.join(dict.fromkeys(names))} ({reason})." for reason, names in retired.items()]
    kept = [_rename_references(a) for a in kept]
    # What followed its own old name has nothing to follow any more.
    return [a for a in kept if a.value != f"${{{a.key}}}" or given.get(a.key) == a.value], notices, problems


def _move(old: Assignment, new: str, given: dict[str, Any], notices: list[str]) -> list[Assignment]:
    """The assignment under its new name, or nothing where it says nothing; ValueError with a problem."""
    key = schema_keys().get(new)
    unset = old.value is None and (new in given or (key is not None and not key.optional))
    if unset or old.value == f"${{{new}}}":
        notices.append(f"`{old.key}` is now `{new}`; {'null' if unset else 'this value'} leaves that as it is.")
        return []
    value = old.value
    if old.key in PER_DEVICE and value is not None:
        value = _per_device(old, new, _devices(given))
    notice = f"`{old.key}` is now `{new}`"
    if value != old.value:
        notice += f": {old.value} on all devices is {value} on each"
    if new in given and given[new] != value:
        notice += "; both are set, and the last one counts"
    notices.append(f"{notice}.")
    return [_alias(old.moved(new, value))]


def _devices(given: dict[str, Any]) -> int:
    sizes = [given.get(name, 1) for name in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    nodes, per_node = (n if isinstance(n, int) and n > 0 else 1 for n in sizes)
    return nodes * per_node


def _per_device(old: Assignment, new: str, devices: int) -> Any:
    if devices == 1:
        return old.value
    if not isinstance(old.value, int) or old.value % devices:
        raise ValueError(
            f"{old.key}={old.value}: counts the samples of all {devices} devices and cannot be divided by {devices}. "
            f"Write {new}=SAMPLES_ON_ONE_DEVICE."
        )
    return old.value // devices


def _disagreement(assignment: Assignment, entry: Retired, given: dict[str, Any]) -> str:
    """The problem of a retired key's value, or ""."""
    value = _follow(assignment.value, given)
    if entry.allowed is None or value is None or assignment.remove or value in ({}, []):
        return ""
    if isinstance(value, str) and "${" in value:
        return ""  # It follows a key that nobody set.
    for a in entry.allowed:
        if (type(a) is type(value) and a == value) or _same_number(a, value) or _same_text(a, value):
            return ""
    return f"{assignment.key}={assignment.value}: {entry.instead}."


def _follow(value: Any, given: dict[str, Any]) -> Any:
    """What a value such as "${a.b}" refers to, as far as the command line says it."""
    for _ in range(10):
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if not match or match[1] not in given:
            return value
        value = given[match[1]]
    return value


def _same_number(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    return numbers and a == b


def _same_text(a: Any, b: Any) -> bool:
    return all(isinstance(x, (str, bool)) for x in (a, b)) and str(a).lower() == str(b).lower()


def _alias(assignment: Assignment) -> Assignment:
    """The value in today's spelling."""
    value = assignment.value
    for pattern, aliases in VALUE_ALIASES.items():
        if fnmatchcase(assignment.key, pattern) and (value is None or isinstance(value, str)) and value in aliases:
            return assignment.moved(assignment.key, aliases[value])
    return assignment


def _rename_references(assignment: Assignment) -> Assignment:
    """`${old.key}` in a value as `${new.key}`."""

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            return _REFERENCE.sub(lambda m: f"${{{new_name(m[1]) or m[1]}}}", value)
        if isinstance(value, list):
            return [rename(v) for v in value]
        if isinstance(value, dict):
            return {k: rename(v) for k, v in value.items()}
        return value

    renamed = rename(assignment.value)
    return assignment if renamed == assignment.value else assignment.moved(assignment.key, renamed)
