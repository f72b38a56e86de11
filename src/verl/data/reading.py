"""Rows from parquet and jsonl files, each with its file and row for later error messages."""

from __future__ import annotations

import codecs
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.suggest import did_you_mean, nearest_words
from verl.errors import DataError

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}
USUAL_COLUMNS = {"data.prompt_key": "prompt", "data.reward_fn_key": "data_source", "data.messages_key": "messages"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read. where: "FILE, row N" (parquet, from 0) or "FILE, line N" (jsonl, from 1)."""

    where: str
    fields: dict[str, Any]


def list_files(spec: Any, key: str) -> list[Path]:
    """Existing files named by a config value: one path, a list, or a text such as "a,b" or "[a,b]".

    key: the config key, for messages. Raises DataError with the nearest name when a file is missing or has a wrong type.
    """
    if isinstance(spec, (str, Path)):
        text = str(spec).strip()
        if text.startswith("[") and text.endswith("]"):
            spec = [part.strip().strip("'\"") for part in text[1:-1].split(",")]
        elif "," in text and not Path(text).expanduser().exists():
            spec = [part.strip() for part in text.split(",")]
        else:
            spec = [text]
    if far := next((str(part) for part in spec or [] if "://" in str(part)), None):
        raise DataError(
            f"{key}: {far} is an address, and files are read from this machine. Fetch it and name the file."
        )
    paths = [Path(str(part)).expanduser() for part in spec or [] if str(part).strip()]
    if not paths:
        raise DataError(f"{key} names no file. Write {key}=FILE.parquet, or a list: {key}=[A.parquet,B.parquet].")
    for path in paths:
        _check_file(path, key)
    return paths


def _check_file(path: Path, key: str) -> None:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in FORMATS)
        listing = f"It holds {', '.join(inside[:10])}." if inside else "It holds no parquet or jsonl file."
        raise DataError(f"{key}: {path} is a folder. {listing} Name the files.")
    if not path.exists():
        raise DataError(f"{key}: {path} does not exist. {_nearest(path)}")
    if path.suffix not in FORMATS:
        raise DataError(f"{key}: {path} is of type '{path.suffix}'. Convert it to .parquet or .jsonl.")


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        existing = next(parent for parent in path.absolute().parents if parent.is_dir())
        return f"Its folder does not exist either; the nearest that does is {existing}."
    files = sorted(p.name for p in path.parent.iterdir() if p.suffix in FORMATS)
    if not files:
        return f"There is no parquet or jsonl file in {path.parent.absolute()}."
    stems = {Path(name).stem: name for name in files}  # names alike in their ending alone are not
    if near := difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.4):
        return f"The nearest file there is {path.parent / stems[near[0]]}."
    return f"Its folder holds {', '.join(files[:10])}."


def read_rows(path: Path, columns: list[str], required: Mapping[str, str] | None = None) -> list[Row]:
    """All rows of a file with those of `columns` that it has.

    required: columns that some row has to have, by the config key that names each.

    Raises:
        DataError: the file is unreadable, empty, or without a required column.
    """
    if FORMATS[path.suffix] == "parquet":
        check_columns(path, _parquet_columns(path), required or {})
        rows = _read_parquet(path, columns)
    else:
        rows = list(_read_jsonl(path))
        check_columns(path, list(dict.fromkeys(name for row in rows for name in row.fields)), required or {})
    if not rows:
        raise _no_rows(path)
    return rows


def _no_rows(path: Path) -> DataError:
    return DataError(f"{path} has no rows. Write it again with at least one prompt, or leave it out of the list.")


def check_parquet_columns(path: Path, required: Mapping[str, str]) -> None:
    """The same check of the required columns from a parquet file's footer alone; other files are left to `read_rows`."""
    if FORMATS[path.suffix] == "parquet":
        check_columns(path, _parquet_columns(path), required)


def check_columns(path: Path, found: list[str], required: Mapping[str, str]) -> None:
    """Raise DataError for the first required column, by its config key, that is not among those found."""
    for key, name in required.items():
        if name in found or not found:
            continue
        usual = [word for word in (USUAL_COLUMNS.get(key),) if word in found]
        near = usual or nearest_words(name, found, limit=1)
        mend = did_you_mean(near) or f" Name the right one with {key}."
        raise DataError(f"{key}={name}: {path} has no such column. It has {', '.join(found)}.{mend}")


def count_rows(path: Path) -> int:
    """Rows of a parquet file from its footer, objects of a jsonl file by its lines.

    A file that holds one JSON list counts as its entries, which means reading it.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    if count := _count(path):
        return count
    raise _no_rows(path)


def _count(path: Path) -> int:
    if FORMATS[path.suffix] == "parquet":
        try:
            return pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {str(error).rstrip('.')}. Write it again.") from error
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
        if not first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return bool(first) + sum(1 for line in lines if line.strip())
    return sum(1 for _ in _read_jsonl(path))


def _parquet_columns(path: Path) -> list[str]:
    try:
        return pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {str(error).rstrip('.')}. Write it again.") from error


def _read_parquet(path: Path, columns: list[str]) -> list[Row]:
    try:
        file = pq.ParquetFile(path)
        present = [name for name in columns if name in file.schema_arrow.names]
        records = file.read(columns=present).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {str(error).rstrip('.')}. Write it again.") from error
    return [Row(f"{path}, row {number}", fields) for number, fields in enumerate(records)]


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark, as some editors write, is no part of the text
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}. Write it again.") from error
    if text.lstrip().startswith("["):
        yield from _read_json_list(path, text)
        return
    # Not splitlines(): it also breaks at characters such as U+2028, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = _parse(line, where, "Write one object a line.")
        if not isinstance(fields, dict):
            raise DataError(f"{where}: holds a {type(fields).__name__}. Write one object a line.")
        yield Row(where, _whole(where, fields) if _may_hold_half(line) else fields)


def _read_json_list(path: Path, text: str) -> Iterator[Row]:
    suspect = _may_hold_half(text)
    for number, fields in enumerate(_parse(text, str(path), "Write one object a line, or one list of objects.")):
        where = f"{path}, entry {number}"
        if not isinstance(fields, dict):
            raise DataError(f"{where}: holds a {type(fields).__name__}. Write an object.")
        yield Row(where, _whole(where, fields) if suspect else fields)


def _parse(text: str, where: str, mend: str) -> Any:
    """The JSON value; DataError for text that is none, or that Python cannot hold."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error}). {mend}") from error
    except ValueError as error:  # a whole number of more digits than Python converts
        raise DataError(
            f"{where}: holds a number that cannot be read ({error}). Write it as text, in quotes."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: lists or objects lie too deep in each other. Write that part as text.") from error


def _may_hold_half(text: str) -> bool:
    """Half a surrogate pair can only come from an escape, since the file itself is UTF-8."""
    return "\\ud" in text or "\\uD" in text


def _whole(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, if their texts are Unicode: half of a surrogate pair is no character, and no tokenizer takes it."""
    try:
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1].encode("ascii", "backslashreplace").decode()
        raise DataError(
            f"{where}: a text holds {half}, half of a surrogate pair. Write the character whole."
        ) from error
    return fields
