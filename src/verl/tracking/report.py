"""`report.html`: one self-contained page about a run. `python -m verl.tracking.report FOLDER` rebuilds it at any time."""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl.core.checkpoint_engine.atomic import write_atomically
from verl.errors import DataError, UserError
from verl.tracking import names
from verl.tracking.charts import bar_chart, line_chart
from verl.tracking.files import GENERATIONS, METRICS, read_lines, read_run, series
from verl.tracking.page import page

REPORT = "report.html"
Lines = Sequence[Mapping[str, Any]]

# Title, y axis, metrics (all that were logged are drawn), whether the y axis begins at 0.
_CURVES: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("Response length", "tokens", names.RESPONSE_LENGTH, True),
    ("KL", "nats a token", names.KL, False),
    ("Gradient norm", "norm", names.GRAD_NORM, True),
    ("Loss", "loss", names.LOSS, False),
    ("Clipped", "share", names.CLIPPED, True),
    ("Rollout against trainer", "probability difference", names.MISMATCH, True),
    ("Staleness", "steps", names.STALENESS, True),
    ("Throughput", "tokens a second", names.THROUGHPUT, True),
    ("Idle", "share of a step", names.IDLE, True),
)


def write_report(folder: Path | str) -> Path:
    """Write `<folder>/report.html` from metrics.jsonl, generations.jsonl and run.json. Returns its path.

    Works on a run that is still going, or was killed. Raises DataError if the folder has no metrics.jsonl.
    """
    where = Path(folder)
    if not (where / METRICS).is_file():
        raise DataError(f"{where} has no {METRICS}: name a run's folder, checkpoints/<project_name>/<experiment_name>")
    lines, run = read_lines(where / METRICS), read_run(where)
    html = page(
        title=" / ".join(n for n in (run.get("project"), run.get("experiment")) if n) or where.resolve().name,
        subtitle=_subtitle(run, lines),
        tiles=_tiles(lines, run),
        charts=_charts(lines),
        samples=_samples(read_lines(where / GENERATIONS)),
        tables=_tables(run, lines),
        notices=run.get("notices", []),
    )
    write_atomically(where / REPORT, html)
    return where / REPORT


def _logged(lines: Lines) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line if name != "step"))


def _subtitle(run: Mapping[str, Any], lines: Lines) -> str:
    parts = [run.get("status", "")]
    if lines:
        parts.append(f"step {lines[-1]['step']}" + (f" of {run['total_steps']}" if run.get("total_steps") else ""))
    if run.get("started"):
        parts.append(f"{datetime.datetime.fromtimestamp(run['started']):%Y-%m-%d %H:%M}")
    parts += [f"resumed from step {step}" for step in run.get("resumed_from", [])]
    parts += [f"{name} {version}" for name, version in run.get("versions", {}).items()]
    return " · ".join(part for part in parts if part)


def _tiles(lines: Lines, run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, note) of the figures that are asked for first."""
    logged, tiles = _logged(lines), []
    scores = [name for name in logged if name.startswith(names.VALIDATION)]
    labelled = [(f"validation {name.removeprefix(names.VALIDATION)}", name) for name in scores]
    if reward := names.first(names.REWARD, logged):
        labelled.append(("training reward", reward))
    for label, name in labelled:
        if points := series(lines, name):
            change = points[-1][1] - points[0][1]
            tiles.append((label, f"{points[-1][1]:.3f}", f"from {points[0][1]:.3f} ({change:+.3f})"))
    if seconds := [y for _, y in series(lines, names.STEP_SECONDS)]:
        tiles.append(("a step", f"{statistics.median(seconds):.2f} s", "median"))
    if throughput := [y for _, y in series(lines, names.THROUGHPUT[0])]:
        tiles.append(("throughput", f"{statistics.median(throughput):,.0f}", "tokens a second, median"))
    if run.get("ended") and (started := run.get("session_started", run.get("started"))):
        seconds = run.get("earlier_seconds", 0.0) + run["ended"] - started  # without the time until it was resumed
        tiles.append(("the run", _duration(seconds), run.get("status", "")))
    return tiles


def _duration(seconds: float) -> str:
    """
    >>> [_duration(s) for s in (42.4, 200, 7300)]
    ['42 s', '3 min 20 s', '2 h 01 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _charts(lines: Lines) -> list[str]:
    logged = _logged(lines)
    scores = [name for name in logged if name.startswith(names.VALIDATION)]
    reward = names.first(names.REWARD, logged)
    charts = [
        line_chart("Validation score", "score", {n.removeprefix(names.VALIDATION): series(lines, n) for n in scores}),
        line_chart("Reward", "mean of a step", {reward: series(lines, reward)} if reward else {}),
    ]
    entropy = names.first(names.ENTROPY, logged)
    charts.append(line_chart("Entropy", "nats a token", {entropy: series(lines, entropy)} if entropy else {}))
    for title, unit, metrics, zero in _CURVES:
        charts.append(line_chart(title, unit, {n: series(lines, n) for n in metrics if n in logged}, zero))
    charts.append(_timing(lines, logged))
    return [chart for chart in charts if chart]


def _timing(lines: Lines, logged: Sequence[str]) -> str:
    """Seconds of each step by phase; what the phases leave of the whole step is "other"."""
    left_out = {names.STEP_SECONDS} | ({names.BESIDE} if names.WAIT_SECONDS in logged else set())
    phases = [name for name in logged if name.startswith(names.TIMING) and name not in left_out]
    timed = [line for line in lines if any(line.get(name) for name in phases)]
    parts = {
        name.removeprefix(names.TIMING): {line["step"]: line[name] for line in timed if line.get(name)}
        for name in sorted(phases, key=lambda n: -sum(line.get(n) or 0.0 for line in timed))
    }
    rest = {}
    for line in timed:
        left = (line.get(names.STEP_SECONDS) or 0.0) - sum(line.get(name) or 0.0 for name in phases)
        # Below a hundredth of the step it is rounding, and phases may overlap.
        if left > 0.01 * (line.get(names.STEP_SECONDS) or 0.0):
            rest[line["step"]] = left
    if rest:
        parts["other"] = rest
    return bar_chart("Time of a step", "seconds", parts, [line["step"] for line in timed])


def _samples(rows: Lines) -> str:
    """The same prompts before and after; where only one validation was logged, its samples alone."""
    if not rows:
        return ""
    before_step, after_step = rows[0]["step"], rows[-1]["step"]
    before = {row.get("prompt"): row for row in rows if row["step"] == before_step}
    after = {row.get("prompt"): row for row in rows if row["step"] == after_step}
    steps = [before_step] if before_step == after_step else [before_step, after_step]
    head = "".join(f"<th>step {step}</th>" for step in steps)
    body = []
    for prompt, row in after.items():
        sides = [row] if len(steps) == 1 else [before.get(prompt), row]
        expected = (
            f'<div class="note">expected {escape(str(row["ground_truth"]))}</div>' if "ground_truth" in row else ""
        )
        cells = "".join(f"<td>{_answer(side)}</td>" for side in sides)
        body.append(f"<tr><td><pre>{escape(str(prompt))}</pre>{expected}</td>{cells}</tr>")
    return f'<table class="samples"><tr><th>prompt</th>{head}</tr>{"".join(body)}</table>'


def _answer(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return '<span class="note">not sampled</span>'
    score = row.get("score")
    shown = f'<span class="score">{score:g}</span>' if isinstance(score, (int, float)) else ""
    return f"{shown}<pre>{escape(str(row.get('response', '')))}</pre>"


def _tables(run: Mapping[str, Any], lines: Lines) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, rows) of what is folded away at the end."""
    tables = [("Plan", _rows(run.get("plan", {}))), ("Config", _rows(run.get("config", {})))]
    last: dict[str, Any] = {}
    for line in lines:
        last.update({name: value for name, value in line.items() if value is not None})
    tables.append(("Last value of every metric", [(name, f"{value:.6g}") for name, value in sorted(last.items())]))
    return [(title, rows) for title, rows in tables if rows]


def _rows(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(tree, Mapping):
        return [row for key, value in tree.items() for row in _rows(value, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, "null" if tree is None else str(tree))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.tracking.report", description="Write a run's report.html.")
    parser.add_argument("folder", type=Path, help="a run's folder, with metrics.jsonl in it")
    try:
        print(write_report(parser.parse_args(arguments).folder))
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
