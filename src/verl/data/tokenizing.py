"""Chat messages to token ids: template, length limit, truncation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.data.schema import PromptRow
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = list[int]


def tokenize_rows(
    rows: list[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
    key: str = "data.apply_chat_template_kwargs",
) -> list[TokenIds]:
    """Token ids of each prompt, up to where the assistant's answer begins, of whatever length. key: of the arguments.

    A tokenizer without a chat template gets the contents one after the other, and adds its own special tokens; a
    template writes them itself.
    """
    if not rows:
        return []
    templated = tokenizer.chat_template is not None
    texts = [_render(row, tokenizer, template_arguments, key) if templated else _contents(row) for row in rows]
    all_ids = tokenizer(texts, add_special_tokens=not templated, return_attention_mask=False)["input_ids"]
    for row, text, ids in zip(rows, texts, all_ids, strict=True):
        if not ids or not text.strip():
            raise DataError(f"{row.where}: the prompt has no tokens. Write a question into it.")
    return all_ids


def _contents(row: PromptRow) -> str:
    return "".join(message["content"] for message in row.messages)


def _render(row: PromptRow, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], key: str) -> str:
    try:
        return tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True, **arguments)
    except Exception as error:  # whatever the model's own template raises
        roles = [message["role"] for message in row.messages]
        raise DataError(
            f"{row.where}: the model's chat template rejects the prompt (roles {roles}): {error}. "
            f"Correct the messages or {key}."
        ) from error


def truncate(ids: TokenIds, limit: int, policy: str) -> TokenIds:
    """At most `limit` tokens: the end (policy "left"), the start ("right"), or both ends ("middle").

    >>> [truncate([1, 2, 3, 4, 5], 3, policy) for policy in ("left", "right", "middle")]
    [[3, 4, 5], [1, 2, 3], [1, 4, 5]]
    """
    if len(ids) <= limit:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[policy]
    tail = limit - head
    return ids[:head] + ids[len(ids) - tail :]
