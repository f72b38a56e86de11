"""GSM8K as training and validation prompts: train.parquet and test.parquet.

    python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k

takes openai/gsm8k from Hugging Face, or from ModelScope with VERL_USE_MODELSCOPE=True. Without a network, give a folder
that holds train.jsonl and test.jsonl (one {"question", "answer"} a line) with --local_dataset_path.

Columns written: data_source, prompt (chat messages), ability, reward_model {style, ground_truth},
extra_info {split, index, question, answer}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "openai/gsm8k"
MODELSCOPE_NAME = "modelscope/gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = 'Think step by step, and write your final answer, a number, after "####" on the last line.'


def final_answer(answer: str) -> str:
    """The number after the `####` of a reference solution, without thousands separators.

    >>> final_answer("She makes 9 * 2 = $18.\\n#### 1,018")
    '1018'
    """
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise ValueError(f"the answer has no number after '####': {answer!r:.200}")
    return number


def to_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """One row of the parquet file."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def read_split(folder: Path, split: str) -> Iterator[dict[str, str]]:
    """Questions and answers of FOLDER/SPLIT.jsonl."""
    path = folder / f"{split}.jsonl"
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                yield {"question": record["question"], "answer": record["answer"]}
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise SystemExit(
                    f'{path}, line {number}: {error!r}. Each line has to be {{"question": …, "answer": …}}.'
                ) from error


def load_local(folder: Path) -> dict[str, Iterable[dict[str, str]]]:
    """Both splits of a folder: jsonl files as they are, anything else as `datasets` understands it."""
    if not folder.is_dir():
        raise SystemExit(f"--local_dataset_path {folder}: there is no such folder.")
    if all((folder / f"{split}.jsonl").is_file() for split in SPLITS):
        return {split: read_split(folder, split) for split in SPLITS}
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
    mend = (
        f"Put train.jsonl and test.jsonl into {folder} (it holds: {found}), or a copy of the openai/gsm8k repository."
    )
    return load_hub(str(folder), mend)


def load_hub(name: str, mend: str) -> dict[str, Iterable[dict[str, str]]]:
    """Both splits through Hugging Face `datasets`; SystemExit with the mend when that fails."""
    import datasets

    try:
        loaded = datasets.load_dataset(name, "main")
        return {split: loaded[split] for split in SPLITS}
    except Exception as error:  # network, cache and format errors come in many classes
        raise SystemExit(f"Cannot load {name}: {type(error).__name__}: {error}\n{mend}") from error


def load_modelscope(mend: str) -> dict[str, Iterable[dict[str, str]]]:
    """Both splits from ModelScope."""
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise SystemExit(
            f"VERL_USE_MODELSCOPE=True needs ModelScope's datasets ({error}): pip install 'modelscope[datasets]'"
        ) from error
    try:
        return {split: MsDataset.load(MODELSCOPE_NAME, subset_name="main", split=split) for split in SPLITS}
    except Exception as error:  # as above
        raise SystemExit(f"Cannot load {MODELSCOPE_NAME} from ModelScope: {error}\n{mend}") from error


def load(local_dataset_path: str | None) -> dict[str, Iterable[dict[str, str]]]:
    """Both splits from wherever the user said."""
    if local_dataset_path:
        return load_local(Path(local_dataset_path).expanduser())
    mend = (
        "Without a network, download it elsewhere and give its folder with --local_dataset_path"
        " (train.jsonl and test.jsonl). Hugging Face and ModelScope mirror each other: VERL_USE_MODELSCOPE={}."
    )
    if os.environ.get("VERL_USE_MODELSCOPE", "").lower() in ("true", "1"):
        return load_modelscope(mend.format("False"))
    return load_hub(DATA_SOURCE, mend.format("True"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write GSM8K as train.parquet and test.parquet.")
    parser.add_argument(
        "--local_save_dir", "--local_dir", default="~/data/gsm8k", help="folder to write to (default: %(default)s)"
    )
    parser.add_argument("--local_dataset_path", help="folder with train.jsonl and test.jsonl, instead of a download")
    options = parser.parse_args(arguments)

    target = Path(options.local_save_dir).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split, records in load(options.local_dataset_path).items():
        try:
            rows = [to_row(r["question"], r["answer"], split, index) for index, r in enumerate(records)]
        except ValueError as error:
            sys.exit(f"{split}: {error}")
        path = target / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
