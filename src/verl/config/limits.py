"""Checks of one value against what its `opt` field says."""

from __future__ import annotations

import math
import os.path
from typing import Any

from verl.config.keys import Key
from verl.config.suggest import did_you_mean, nearest_words


def wrong_type(key: Key, value: Any) -> str:
    """The problem of a value of the wrong type."""
    return f"{key.name}={value}: takes {key.type_words}."


def limit_problem(key: Key, value: Any) -> str:
    """The problem of a value outside the choices or limits of its option, or ""."""
    if value is None:
        return "" if key.optional else f"{key.name}=null: takes {key.type_words}."
    if key.choices and value not in key.choices:
        return _choice_problem(key, value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and key.type in (int, float):
        inside = (
            not math.isnan(value)
            and (key.above is None or value > key.above)
            and (key.min is None or value >= key.min)
            and (key.max is None or value <= key.max)
        )
        if not inside:
            return f"{key.name}={value}: has to be {key.limit_words or 'a number'}."
    for text in value if isinstance(value, list) else [value]:
        # What expanduser leaves as it is would raise in pathlib, long after.
        if isinstance(text, str) and text.startswith("~") and os.path.expanduser(text) == text:
            return f"{key.name}={text}: {text.partition('/')[0]} is nobody's home folder here. Write the path in full."
    return ""


def _choice_problem(key: Key, value: Any) -> str:
    from verl.config.old_keys import VALUE_HINTS

    hint = VALUE_HINTS.get((key.name, str(value)), "")
    if hint:
        return f"{key.name}={value}: {hint} It takes {key.choice_words}."
    null = " or null" if key.optional else ""
    mend = did_you_mean(nearest_words(str(value), [str(c) for c in key.choices or ()], limit=1, cutoff=0.5))
    return f"{key.name}={value}: takes {key.choice_words}{null}.{mend}"
