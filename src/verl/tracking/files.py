"""The files of a run, from which everything else can be rebuilt.

    metrics.jsonl       one JSON line a step: {"step": 3, "timing/gen": 1.2, ...}; a value that is not finite is null
    generations.jsonl   one JSON line a validation sample: {"step": 0, "prompt": ..., "response": ..., "score": ...}
    run.json            config, plan, status, notices

Lines are written as they come, so that a killed run keeps them. A run that starts from scratch moves the earlier
run's lines to metrics.previous.jsonl; a resumed run cuts the lines after the step that it resumes from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.core.checkpoint_engine.atomic import write_atomically

METRICS, GENERATIONS, RUN = "metrics.jsonl", "generations.jsonl", "run.json"


class StepLines:
    """A JSON-lines file in which every line has a step, and steps never go back.

    resumed_step: None for a run from scratch; N keeps the lines of steps up to N.
    """

    def __init__(self, path: Path, resumed_step: int | None):
        self.path = path
        kept: list[dict[str, Any]] = []
        if path.exists():
            if resumed_step is None:
                path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
            else:
                kept = [line for line in read_lines(path) if line["step"] <= resumed_step]
                write_atomically(path, "".join(_dump(line) for line in kept))
        self._file = open(path, "ab")  # noqa: SIM115 (open as long as the run)
        self._last = kept[-1] if kept else None
        self._last_start = self._file.tell() - (len(_dump(self._last).encode()) if self._last else 0)

    @property
    def last_step(self) -> int | None:
        """Step of the last line; None if there is no line."""
        return None if self._last is None else self._last["step"]

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line; it is in the file when this returns."""
        self._last, self._last_start = dict(line), self._file.tell()
        self._file.write(_dump(line).encode())
        self._file.flush()

    def merge(self, line: Mapping[str, Any]) -> None:
        """Add one line, or widen the last one if that has the same step, so that a step keeps one line."""
        if self._last is not None and self._last["step"] == line["step"]:
            line = {**self._last, **line}
            self._file.truncate(self._last_start)
            self._file.seek(self._last_start)
        self.append(line)

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file; a last line that a kill cut short is left out, and so is a missing file."""
    try:
        # Not splitlines(): it also breaks at characters such as U+2028, which JSON strings may hold.
        texts = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except FileNotFoundError:
        return []
    lines = []
    for number, text in enumerate(texts):
        try:
            lines.append(json.loads(text))
        except ValueError:
            if number != len(texts) - 1:
                raise ValueError(f"{path}, line {number + 1} is not JSON: {text[:80]}") from None
    return lines


def read_run(folder: Path) -> dict[str, Any]:
    """run.json, or {} if there is none."""
    try:
        return json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def write_run(folder: Path, record: Mapping[str, Any]) -> None:
    write_atomically(folder / RUN, json.dumps(_clean(record), indent=1, ensure_ascii=False, default=str))


def series(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, where it was logged and finite."""
    return [(line["step"], float(line[name])) for line in lines if line.get(name) is not None]


def _dump(line: Mapping[str, Any]) -> str:
    return json.dumps(_clean(line), ensure_ascii=False, default=str) + "\n"


def _clean(value: Any) -> Any:
    """JSON has no NaN: null takes its place, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value
