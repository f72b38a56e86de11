"""`opt`: a dataclass field that carries its own help text and limits."""

import copy
from dataclasses import field
from typing import Any

LARGEST_SEED = 2**63 - 1  # torch's generators take 64 bits with a sign


def opt(
    default: Any,
    help: str,
    *,
    choices: tuple | None = None,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
) -> Any:
    """A config field.

    Args:
        default: value, or an OmegaConf interpolation such as "${data.max_prompt_length}". Lists and dicts are copied.
        help: one line for `--help`.
        choices: the values allowed (None is allowed besides when the field is Optional).
        min, max: inclusive numeric limits. above: exclusive lower limit.
    """
    metadata = {"help": help, "choices": choices, "min": min, "max": max, "above": above}
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)
