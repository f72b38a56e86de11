"""Samples as rows of named values: from a batch, to a batch, and packed for a checkpoint or another process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.data.batch import Column, Ragged, SampleBatch

TOKEN_FIELDS = ("prompt_ids", "response_ids")
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True)
class Item:
    """A value that comes back in a list, though it may be a number or a tensor."""

    value: Any


def rows_of(batch: SampleBatch) -> list[dict[str, Any]]:
    """The batch's samples as rows, without its uid; `batch_of` makes the same columns of them.

    >>> rows_of(SampleBatch({"uid": ["a"], "ids": Ragged.from_rows([[1, 2]]), "truth": [42]}))
    [{'ids': tensor([1, 2]), 'truth': Item(value=42)}]
    """
    columns: dict[str, Sequence[Any]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            columns[name] = column.rows()
        elif isinstance(column, Tensor):
            if column.ndim != 1:
                raise ValueError(
                    f"column '{name}' has shape {list(column.shape)}; a sample's part of it has to be one number"
                )
            columns[name] = column.unbind()
        elif name != "uid":
            columns[name] = [Item(x) if isinstance(x, int | float | Tensor) else x for x in column]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def batch_of(uids: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> SampleBatch:
    """Rows side by side: `uid`, and a column for each field that all rows have."""
    names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return SampleBatch({"uid": list(uids), **{name: _column([row[name] for row in rows]) for name in names}})


def _column(values: list[Any]) -> Column:
    if all(isinstance(v, Tensor) for v in values):
        if all(v.ndim for v in values):
            return Ragged(torch.cat(values), torch.tensor([v.shape[0] for v in values], dtype=torch.int64))
        if not any(v.ndim for v in values):
            return torch.stack(values)
    elif all(isinstance(v, bool) for v in values):
        return torch.tensor(values, dtype=torch.bool)
    elif all(isinstance(v, int) for v in values):
        return torch.tensor(values, dtype=torch.int64)
    elif all(isinstance(v, int | float) for v in values):
        return torch.tensor(values, dtype=torch.float32)
    return [v.value if isinstance(v, Item) else v for v in values]


def check_value(name: str, value: Any) -> None:
    """TypeError for what torch.load would not read back with weights_only."""
    if (found := _foreign(value.value if isinstance(value, Item) else value)) is not None:
        raise TypeError(
            f"field '{name}' holds a {type(found).__module__}.{type(found).__qualname__}, which a checkpoint cannot hold. Put "
            "tensors, numbers, texts, None, and lists, tuples or dicts of them; make a numpy array a tensor, or a list of it."
        )


def _foreign(value: Any) -> Any | None:
    """The first part of a value that is not plain data; None if all of it is."""
    if type(value) in _SCALARS or isinstance(value, Tensor):
        return None
    if type(value) is dict:
        parts: Sequence[Any] = [*value, *value.values()]
    elif type(value) in (list, tuple):
        parts = value
    else:
        return value
    return next((found for part in parts if (found := _foreign(part)) is not None), None)


def sizes(fields: Mapping[str, Any]) -> tuple[int, int]:
    """(tokens, bytes) of a sample's fields. Bytes are those of tensors, texts and numbers, not of Python's objects."""
    tokens = sum(len(fields[name]) for name in TOKEN_FIELDS if isinstance(fields.get(name), Tensor))
    size = 0
    for value in fields.values():
        if isinstance(value, Tensor):
            size += value.nbytes
        elif isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, int | float):
            size += 8
    return tokens, size


def pack(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as few large tensors instead of many small ones, which is what saving and sending them costs. Exact.

    A field's values are kept in parts of one kind and dtype, each with the numbers of its rows.
    """
    parts: dict[tuple, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))
    for number, row in enumerate(rows):
        for name, value in row.items():
            numbers, values = parts[name, *_kind(value)]
            numbers.append(number)
            values.append(value)
    packed = []
    for (name, kind, *_), (numbers, values) in parts.items():
        part: dict[str, Any] = {"field": name, "kind": kind, "rows": numbers}
        if kind == "ragged":
            part["values"] = torch.cat(values)
            part["lengths"] = [v.shape[0] for v in values]
        elif kind == "tensor":
            part["values"] = torch.stack(values)
        else:
            part["values"] = [v.value if kind == "item" else v for v in values]
        packed.append(part)
    return {"count": len(rows), "parts": packed}


def _kind(value: Any) -> tuple:
    if isinstance(value, Tensor):
        return ("ragged", value.dtype, value.shape[1:]) if value.ndim else ("tensor", value.dtype)
    return ("item",) if isinstance(value, Item) else ("object",)


def unpack(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that were packed."""
    rows: list[dict[str, Any]] = [{} for _ in range(packed["count"])]
    for part in packed["parts"]:
        values = part["values"]
        if part["kind"] == "ragged":
            values = values.split(part["lengths"])
        elif part["kind"] == "tensor":
            values = values.unbind()
        elif part["kind"] == "item":
            values = [Item(v) for v in values]
        for number, value in zip(part["rows"], values, strict=True):
            rows[number][part["field"]] = value
    return rows
