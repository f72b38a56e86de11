"""Whole files of rows as Arrow tables: read with all their columns, written so that a file is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.reading import FORMATS, list_files, read_rows
from verl.errors import DataError


def read_table(file: Any, key: str) -> tuple[Path, pa.Table]:
    """The path and all rows of one parquet or jsonl file. key: the config key that names it, for messages.

    Raises:
        DataError: no file, more than one, or one that cannot be read or is empty.
    """
    if not file:
        raise DataError(f"{key} is not set. Write {key}=FILE.parquet.")
    paths = list_files(file, key)
    if len(paths) > 1:
        raise DataError(f"{key} names {len(paths)} files: give one.")
    path = paths[0]
    if FORMATS[path.suffix] == "jsonl":
        return path, pa.Table.from_pylist([row.fields for row in read_rows(path, [])])
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {str(error).rstrip('.')}. Write it again.") from error
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows.")
    return path, table


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with this column added, or put in the place of one of the same name."""
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def check_output(file: str | None, key: str) -> Path:
    """The path of a parquet file to write, whose folder is made; DataError for one that cannot be."""
    if not file:
        raise DataError(f"{key} is not set. Write {key}=FILE.parquet.")
    path = Path(file).expanduser()
    if path.suffix != ".parquet":
        raise DataError(f"{key}={file}: its name has to end in .parquet.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{key}={file}: its folder cannot be made ({error}). Name another.") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError(f"{key}={file} cannot be written. Name a file in a folder that you may write to.")
    return path


def write_table(table: pa.Table, path: Path) -> None:
    """Write beside the target, then rename: a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
