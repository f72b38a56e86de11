"""The dataset's schema: prompt, data_source, reward_model.ground_truth, extra_info; checked before anything slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl.data.reading import Row
from verl.errors import DataError

ROWS_SHOWN = 5
UNNAMED_SOURCE = "unknown"
EXAMPLE = '[{"role": "user", "content": "…"}]'

Message = dict[str, Any]
Checked = TypeVar("Checked")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One checked row. where: its file and row."""

    where: str
    messages: list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One checked conversation, with a turn of the assistant that is not the first. where: its file and row."""

    where: str
    messages: list[Message]


class _BadRow(Exception):
    """column: what is wrong with it, and what to write."""


def check_rows(rows: list[Row], prompt_key: str, source_key: str, require_ground_truth: bool) -> list[PromptRow]:
    """Checked rows, or one DataError that shows the first bad ones and counts them all."""
    return _check_all(rows, lambda row: _check_row(row, prompt_key, source_key, require_ground_truth))


def check_conversations(rows: list[Row], messages_key: str) -> list[ConversationRow]:
    """Checked conversations, or one DataError that shows the first bad rows and counts them all."""
    return _check_all(rows, lambda row: _check_conversation(row, messages_key))


def _check_all(rows: list[Row], check: Callable[[Row], Checked]) -> list[Checked]:
    checked: list[Checked] = []
    faults: list[str] = []
    for row in rows:
        try:
            checked.append(check(row))
        except _BadRow as fault:
            faults.append(f"{row.where}, {fault}")
    if faults:
        more = f"\n  … and {len(faults) - ROWS_SHOWN} more" if len(faults) > ROWS_SHOWN else ""
        listing = "\n  ".join(faults[:ROWS_SHOWN])
        raise DataError(f"{len(faults)} of {len(rows)} rows do not follow the schema:\n  {listing}{more}")
    return checked


def count_unnamed_sources(rows: list[PromptRow]) -> int:
    return Counter(row.data_source for row in rows)[UNNAMED_SOURCE]


def _check_conversation(row: Row, key: str) -> ConversationRow:
    if key not in row.fields:
        raise _BadRow(f"column '{key}' is missing (there are {sorted(row.fields)}). Name it with data.messages_key.")
    if not isinstance(row.fields[key], list):
        raise _BadRow(f"column '{key}' holds a {type(row.fields[key]).__name__}. Write chat messages, {EXAMPLE}.")
    messages = _messages(row.fields[key], key)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise _BadRow(
            f"column '{key}' has roles {roles}. A conversation begins with another role than the assistant's and has a turn of it."
        )
    return ConversationRow(row.where, messages)


def _check_row(row: Row, prompt_key: str, source_key: str, require_ground_truth: bool) -> PromptRow:
    fields = row.fields
    if prompt_key not in fields:
        raise _BadRow(
            f"column '{prompt_key}' is missing (there are {sorted(fields)}). "
            f"Add it as chat messages, {EXAMPLE}, or name the right column with data.prompt_key."
        )
    source = fields.get(source_key)
    if source is not None and not isinstance(source, str):
        raise _BadRow(f"column '{source_key}' holds a {type(source).__name__}. Write a text such as 'openai/gsm8k'.")
    extra_info = fields.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise _BadRow(f"column 'extra_info' holds a {type(extra_info).__name__}. Write an object, or leave it out.")
    return PromptRow(
        row.where,
        _messages(fields[prompt_key], prompt_key),
        source or UNNAMED_SOURCE,
        _ground_truth(fields.get("reward_model"), require_ground_truth),
        extra_info or {},
    )


def _messages(prompt: Any, column: str) -> list[Message]:
    """Chat messages of a prompt; a text is one message of the user."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _BadRow(f"column '{column}' is an empty text. Write the question.")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        what = "is an empty list" if prompt == [] else f"holds a {type(prompt).__name__}"
        raise _BadRow(f"column '{column}' {what}. Write chat messages, {EXAMPLE}, or a text.")
    return [_message(message, number, column) for number, message in enumerate(prompt)]


def _message(message: Any, number: int, column: str) -> Message:
    where = f"column '{column}', message {number}"
    if not isinstance(message, dict):
        raise _BadRow(f"{where} holds a {type(message).__name__}. Write {EXAMPLE[1:-1]}.")
    for name in ("role", "content"):
        value = message.get(name)
        if not isinstance(value, str) or (name == "role" and not value):
            what = "is missing" if value is None else f"holds {value!r:.60}"
            raise _BadRow(f"{where}: '{name}' {what}. Write a text: {EXAMPLE[1:-1]}.")
    # Parquet gives every message the union of all keys; a template would take the None of a key not written as content.
    return {name: value for name, value in message.items() if value is not None}


def _ground_truth(reward_model: Any, required: bool) -> Any:
    if reward_model is not None and not isinstance(reward_model, dict):
        found = type(reward_model).__name__
        raise _BadRow(
            f'column \'reward_model\' holds a {found}. Write an object: {{"style": "rule", "ground_truth": …}}.'
        )
    truth = (reward_model or {}).get("ground_truth")
    if required and (truth is None or truth != truth):  # a gap in a column of numbers is NaN
        raise _BadRow(
            "column 'reward_model': 'ground_truth' is missing, and the built-in scorers compare with it. "
            'Write {"style": "rule", "ground_truth": "42"}, or give your own function with custom_reward_function.path.'
        )
    return truth
