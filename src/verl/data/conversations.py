"""Chat conversations to samples whose assistant turns are trained, found by the difference that each makes to the template."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from verl.config.schema import SFTDataConfig
from verl.data.batch import Ragged, SampleBatch
from verl.data.reading import list_files, read_rows
from verl.data.schema import ConversationRow, check_conversations
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segment = tuple[str, bool]
"""A stretch of a conversation's text, and whether it is trained."""


class ConversationDataset:
    """N conversations as token ids, each split before its first trained token into prompt and response.

    notices: what the user should read once. fingerprint: of all tokens.
    """

    def __init__(self, prompts: Ragged, responses: Ragged, mask: Ragged, notices: list[str]):
        self._columns = SampleBatch({"prompt_ids": prompts, "response_ids": responses, "response_mask": mask})
        self.notices = notices
        digest = hashlib.blake2b(digest_size=16)
        for part in (prompts, responses):
            digest.update(part.lengths.numpy().tobytes())
            digest.update(part.values.numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._columns)

    def batch(self, indices: Sequence[int]) -> SampleBatch:
        """prompt_ids, response_ids, and response_mask, True at the assistant's tokens."""
        return self._columns.select(indices)


@dataclass
class _Counts:
    """Conversations cut, left out because no trained token was left, and trained on their last turn alone."""

    cut: int = 0
    dropped: int = 0
    last_only: int = 0


def load_conversations(
    files: Any, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, *, split: Literal["train", "val"]
) -> ConversationDataset:
    """Load files (parquet, jsonl; one or a list) with a column of chat messages.

    Raises:
        DataError: a file is missing; a row does not follow the schema, has no turn of the assistant, or is longer than
            data.max_length with truncation=error; or nothing is left.
    """
    key = f"data.{split}_files"
    required = {"data.messages_key": config.messages_key}
    raw = [row for path in list_files(files, key) for row in read_rows(path, [config.messages_key], required)]
    wanted = config.train_max_samples if split == "train" else config.val_max_samples
    rows = check_conversations(raw, config.messages_key)[: wanted if wanted >= 0 else None]
    counts = _Counts()
    conversations = [_segments(row, tokenizer, config.apply_chat_template_kwargs, counts) for row in rows]
    texts = [text for segments in conversations for text, _ in segments]
    # Each stretch by itself, so that a prompt and an answer have the tokens that they have in a rollout.
    ids = (
        iter(tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"])
        if texts
        else iter(())
    )
    samples = []
    for row, segments in zip(rows, conversations, strict=True):
        tokens, mask = [], []
        for _, trained in segments:
            part = next(ids)
            tokens += part
            mask += [trained] * len(part)
        tokens, mask = _fit(tokens, mask, config, row.where, counts)
        if any(mask[1:]):
            first = mask.index(True, 1)
            samples.append((tokens[:first], tokens[first:], mask[first:]))
        else:
            counts.dropped += 1
    if not samples:
        raise DataError(f"{key}: none of the {len(rows)} conversations has a token of the assistant to train on.")
    prompts, responses, masks = zip(*samples)
    return ConversationDataset(
        Ragged.from_rows(prompts),
        Ragged.from_rows(responses),
        Ragged.from_rows(masks, torch.bool),
        _notices(key, config, counts, len(rows)),
    )


def _fit(tokens: list[int], mask: list[bool], config: SFTDataConfig, where: str, counts: _Counts) -> tuple[list, list]:
    limit = config.max_length
    if len(tokens) <= limit:
        return tokens, mask
    if config.truncation == "error":
        raise DataError(
            f"{where}: {len(tokens)} tokens are more than data.max_length={limit}, and data.truncation=error. Raise the "
            "limit, or cut with data.truncation=right (keeps the start) or left."
        )
    counts.cut += 1
    return (tokens[:limit], mask[:limit]) if config.truncation == "right" else (tokens[-limit:], mask[-limit:])


def _notices(key: str, config: SFTDataConfig, counts: _Counts, total: int) -> list[str]:
    notices = []
    if counts.cut:
        notices.append(
            f"{key}: {counts.cut} of {total} conversations are longer than data.max_length={config.max_length} tokens and were "
            f"cut (data.truncation={config.truncation})."
        )
    if counts.dropped:
        notices.append(
            f"{key}: {counts.dropped} of {total} conversations have no token of the assistant to train on (after cuts) and are "
            "left out."
        )
    if counts.last_only:
        notices.append(
            f"{key}: {counts.last_only} of {total} conversations are trained on the assistant's last turn alone, since the chat "
            "template writes earlier turns otherwise once later ones follow."
        )
    return notices


def _segments(
    row: ConversationRow, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], counts: _Counts
) -> list[Segment]:
    """The conversation's text in stretches. Turn i of the assistant is what it adds to the template of the turns before.

    With a template that ends turns by "<e>" and begins the assistant's by "A:", the messages user "hi", assistant "yo"
    give [("U:hi<e>A:", False), ("yo<e>", True)].
    """
    turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    whole = _render(row, row.messages, tokenizer, arguments, False)
    segments = _difference(row, turns, whole, tokenizer, arguments)
    if segments is None and len(turns) > 1:
        segments = _difference(row, turns[-1:], whole, tokenizer, arguments)
        counts.last_only += segments is not None
    if segments is None:
        raise DataError(
            f"{row.where}: what the assistant says cannot be told apart by the model's chat template: adding a turn changes the "
            "text before it. Give a tokenizer whose template only adds (model.tokenizer_path)."
        )
    return segments


def _difference(
    row: ConversationRow, turns: list[int], whole: str, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> list[Segment] | None:
    """None where the text of some turn is not a part of the whole text."""
    segments: list[Segment] = []
    position = 0
    for i in turns:
        before = _render(row, row.messages[:i], tokenizer, arguments, True)
        after = _render(row, row.messages[: i + 1], tokenizer, arguments, False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= position):
            return None
        answer = after[len(before) :]
        said = _up_to_end(answer, tokenizer)
        segments += [(whole[position : len(before)], False), (said, True)]
        position = len(before) + len(said)
    return [segment for segment in [*segments, (whole[position:], False)] if segment[0]]


def _up_to_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Without white space after the token that ends the turn: generation stops there, so nothing after it is learned."""
    shorter = text.rstrip()
    return shorter if shorter.endswith(tuple(tokenizer.all_special_tokens)) else text


def _render(
    row: ConversationRow,
    messages: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    generation: bool,
) -> str:
    if tokenizer.chat_template is None:
        return "".join(m["content"] + (tokenizer.eos_token if m["role"] == "assistant" else "") for m in messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **arguments)
    except Exception as error:  # whatever the model's own template raises
        roles = [message["role"] for message in messages]
        raise DataError(
            f"{row.where}: the model's chat template rejects the conversation (roles {roles}): {error}. Correct the messages "
            "or data.apply_chat_template_kwargs."
        ) from error
