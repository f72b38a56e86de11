"""Prompt files to a `PromptDataset`: read, checked, tokenised and cut to length before the run starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from numpy.random import RandomState

from verl.config.schema import DataConfig
from verl.data.batch import Ragged, SampleBatch
from verl.data.reading import list_files, read_rows
from verl.data.schema import PromptRow, check_rows, count_unnamed_sources
from verl.data.tokenizing import TokenIds, tokenize_rows, truncate
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_A_BLOCK = 1024


class PromptDataset:
    """N tokenised prompts.

    notices: what the user should read once, such as how many prompts were cut. fingerprint: of all prompts and truths;
    two datasets with the same one are the same.
    """

    def __init__(self, rows: list[PromptRow], prompt_ids: Ragged, split: str, notices: list[str]):
        self._rows, self._prompt_ids, self._split = rows, prompt_ids, split
        self.notices = notices
        self.fingerprint = _fingerprint(rows, prompt_ids)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def data_sources(self) -> set[str]:
        return {row.data_source for row in self._rows}

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """Tokens of each prompt: int64 [N]."""
        return self._prompt_ids.lengths

    def batch(self, indices: Sequence[int], *, uids: Sequence[str] | None = None, step: int = 0) -> SampleBatch:
        """The prompts `indices`, in that order.

        uids: one text a prompt, each different. Made when not given, from the split, `step` (the number of the draw),
        the place in the batch and the index: the same in every run, different for every draw.
        """
        if uids is None:
            uids = [f"{self._split}-{step}-{place}-{index}" for place, index in enumerate(indices)]
        elif len(uids) != len(indices) or len(set(uids)) != len(uids):
            raise ValueError(f"PromptDataset.batch: {len(set(uids))} different uids for {len(indices)} prompts")
        rows = [self._rows[index] for index in indices]
        return SampleBatch(
            {
                "uid": list(uids),
                "prompt_ids": self._prompt_ids.select(torch.tensor(list(indices), dtype=torch.int64)),
                "data_source": [row.data_source for row in rows],
                "ground_truth": [row.ground_truth for row in rows],
                "extra_info": [row.extra_info for row in rows],
                "raw_prompt": [row.messages for row in rows],
            }
        )


def load_prompts(
    files: Any,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Literal["train", "val"],
    require_ground_truth: bool = True,
    require_source: bool = False,
) -> PromptDataset:
    """Load prompt files (parquet, jsonl; one or a list).

    split: selects `train_max_samples` (drawn at random when `shuffle`) or `val_max_samples` (the first), and begins the
    uids. require_ground_truth: False when the user's own reward function does without. require_source: whether nothing
    scores a prompt without a data source, so that a file has to have its column.

    Raises DataError for a missing file or column, a row that does not follow the schema, a prompt over `max_prompt_length` with
    truncation=error, or nothing left after the filter.
    """
    columns = list(dict.fromkeys([config.prompt_key, config.reward_fn_key, "reward_model", "extra_info"]))
    required = {"data.prompt_key": config.prompt_key}
    if require_source:
        required["data.reward_fn_key"] = config.reward_fn_key
    raw = [row for path in list_files(files, f"data.{split}_files") for row in read_rows(path, columns, required)]
    rows = check_rows(raw, config.prompt_key, config.reward_fn_key, require_ground_truth)
    wanted = config.train_max_samples if split == "train" else config.val_max_samples
    wanted = len(rows) if wanted < 0 else min(wanted, len(rows))
    if wanted == 0:
        raise DataError(f"data.{split}_max_samples=0 leaves no prompts. Write -1 for all of them.")
    order = _order(len(rows), wanted, split == "train" and config.shuffle, config.seed)
    kept, long, seen = _fit(rows, order, wanted, config, tokenizer)
    notices = _notices(rows, config, tokenizer, split, long, seen)
    if not kept:
        raise DataError(
            f"data.{split}_files: all {seen} prompts are longer than data.max_prompt_length={config.max_prompt_length} "
            "and data.filter_overlong_prompts=True drops them. Raise the one or unset the other."
        )
    kept.sort(key=lambda pair: pair[0])  # the file's order: the sampler does the shuffling
    ids = Ragged.from_rows([ids for _, ids in kept])
    return PromptDataset([rows[index] for index, _ in kept], ids, split, notices)


def _order(size: int, wanted: int, random: bool, seed: int) -> list[int]:
    """Row indices in the order in which they are considered until enough are found."""
    if random and wanted < size:
        return RandomState(seed % 2**32).permutation(size).tolist()
    return list(range(size))


def _fit(
    rows: list[PromptRow], order: list[int], wanted: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[int, TokenIds]], int, int]:
    """(index, token ids within the limit) of up to `wanted` rows; how many were too long; how many were looked at."""
    kept: list[tuple[int, TokenIds]] = []
    long: list[tuple[int, int]] = []
    seen = 0
    for index, ids in _tokenized(rows, order, wanted, config, tokenizer):
        if len(kept) == wanted:
            break
        seen += 1
        if len(ids) > config.max_prompt_length:
            long.append((index, len(ids)))
            if config.filter_overlong_prompts:
                continue
        kept.append((index, ids))
    if long and config.truncation == "error" and not config.filter_overlong_prompts:
        index, length = max(long, key=lambda pair: pair[1])
        raise DataError(
            f"{len(long)} of {seen} prompts are longer than data.max_prompt_length={config.max_prompt_length} and "
            f"data.truncation=error. The longest has {length} tokens: {rows[index].where}. Raise the limit, drop them "
            "with data.filter_overlong_prompts=True, or cut them with data.truncation=left, right or middle."
        )
    return [(i, truncate(ids, config.max_prompt_length, config.truncation)) for i, ids in kept], len(long), seen


def _tokenized(
    rows: list[PromptRow], order: list[int], wanted: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, TokenIds]]:
    """Rows in `order` with their tokens, in blocks: when few are wanted, few are tokenised."""
    size = min(ROWS_A_BLOCK, wanted)
    arguments = dict(config.apply_chat_template_kwargs)
    for start in range(0, len(order), size):
        block = order[start : start + size]
        yield from zip(block, tokenize_rows([rows[i] for i in block], tokenizer, arguments), strict=True)


def _notices(
    rows: list[PromptRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str, long: int, seen: int
) -> list[str]:
    notices = []
    if tokenizer.chat_template is None:
        notices.append(
            f"data.{split}_files: the tokenizer has no chat template; the messages' contents are joined as they are."
        )
    unnamed = count_unnamed_sources(rows)
    if unnamed:
        notices.append(
            f"data.{split}_files: {unnamed} of {len(rows)} rows have no '{config.reward_fn_key}'; it is 'unknown' there."
        )
    if long:
        limit = f"data.max_prompt_length={config.max_prompt_length}"
        done = "dropped" if config.filter_overlong_prompts else f"cut (data.truncation={config.truncation})"
        notices.append(f"data.{split}_files: {long} of {seen} prompts are longer than {limit} tokens and were {done}.")
    return notices


def _fingerprint(rows: list[PromptRow], prompt_ids: Ragged) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(prompt_ids.lengths.numpy().tobytes())
    digest.update(prompt_ids.values.numpy().tobytes())
    for row in rows:
        digest.update(f"{row.data_source}\0{row.ground_truth!r}\n".encode())
    return digest.hexdigest()
