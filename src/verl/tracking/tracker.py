"""`Tracker`: everything that a run says about itself goes through here."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import verl
from verl.config.schema.trainer import TrainerConfig
from verl.tracking.backends import logger_names, make_backend
from verl.tracking.background import Background
from verl.tracking.console import Console, format_line
from verl.tracking.files import GENERATIONS, METRICS, StepLines, read_run, write_run
from verl.tracking.report import write_report

# Samples of a validation that are kept for the report, whatever trainer.log_val_generations says.
KEPT_GENERATIONS = 8


class Tracker:
    """Console, metrics.jsonl, run.json, loggers and report of one run.

    Args:
        config: `trainer.*`; read here: logger, project_name, experiment_name, log_val_generations.
        run_config: the whole resolved config, as plain dicts.
        folder: the run's folder; made if missing.
        total_steps: length of the run, for the progress bar; None shows none.
        resumed_step: None for a run from scratch; otherwise the step of the checkpoint that it goes on from, and what
            was logged after that step is cut.
        plan: numbers of the batch plan, shown in the report.

    Raises ConfigError for a logger that is unknown or not installed. One that fails later, even at its start, is
    reported once and left alone.
    """

    def __init__(
        self,
        config: TrainerConfig,
        run_config: dict[str, Any],
        folder: Path | str,
        *,
        total_steps: int | None = None,
        resumed_step: int | None = None,
        plan: Mapping[str, Any] | None = None,
    ):
        names = logger_names(config.logger)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._shown_generations = config.log_val_generations
        self._print_steps = "console" in names
        last_written = (self.folder / METRICS).stat().st_mtime if (self.folder / METRICS).exists() else 0.0
        self._metrics = StepLines(self.folder / METRICS, resumed_step)
        self._generations = StepLines(self.folder / GENERATIONS, resumed_step)
        self._run = self._new_record(config, run_config, total_steps, resumed_step, plan, last_written)
        # The bar starts last: a logger that asks for a password at its start needs the terminal for itself.
        self._console = Console()
        self._backends = self._start_backends(names, config, run_config, resumed_step)
        write_run(self.folder, self._run)
        self._console = Console(total_steps if self._print_steps else None, resumed_step or 0)

    def _new_record(
        self,
        config: TrainerConfig,
        run_config: dict[str, Any],
        total_steps: int | None,
        resumed_step: int | None,
        plan: Mapping[str, Any] | None,
        last_written: float,
    ) -> dict[str, Any]:
        earlier = read_run(self.folder) if resumed_step is not None else {}
        return {
            "project": config.project_name,
            "experiment": config.experiment_name,
            "status": "running",
            "started": earlier.get("started", time.time()),
            "earlier_seconds": _seconds_of(earlier, last_written),
            "session_started": time.time(),
            "ended": None,
            "resumed_from": [*earlier.get("resumed_from", []), *([] if resumed_step is None else [resumed_step])],
            "total_steps": total_steps,
            "versions": {"reverl": verl.__version__, "python": platform.python_version()},
            "plan": dict(plan or {}),
            "notices": earlier.get("notices", []),
            "logger_runs": earlier.get("logger_runs", {}),
            "config": run_config,
        }

    def _start_backends(
        self, names: list[str], config: TrainerConfig, run_config: dict[str, Any], resumed_step: int | None
    ) -> list[Background]:
        started = []
        for name in names:
            if name == "console":
                continue
            run_id = self._run["logger_runs"].get(name)
            try:
                backend = make_backend(name, config, run_config, self.folder, run_id, resumed_step)
            except Exception as error:  # a server that is down must not cost the run
                self.notice(f"trainer.logger={name} could not start, the run goes on: {type(error).__name__}: {error}")
                continue
            if backend.run_id is not None:
                self._run["logger_runs"][name] = backend.run_id
            started.append(Background(backend, self.notice))
        return started

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers (Python, numpy, or tensors with one element) under `step`. Called twice for a step, both count."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._metrics.merge({"step": step, **numbers})
        if self._print_steps:
            self._console.print(format_line(numbers, step))
            self._console.progress(numbers, step)
        for backend in self._backends:
            backend.log(numbers, step)

    def restore(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log a step that a checkpoint says is done, unless it has its line: a kill between the two took it away."""
        if self._metrics.last_step != step:
            self.log(metrics, step)

    def log_generations(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Log validation samples: dicts with prompt, response, score, and whatever else helps (ground_truth).

        The first `trainer.log_val_generations` are printed and sent to the loggers; a few are kept for the report.
        """
        samples = [dict(row) for row in rows]
        for row in samples[: max(KEPT_GENERATIONS, self._shown_generations)]:
            self._generations.append({"step": step, **row})
        shown = samples[: self._shown_generations]
        for row in shown:
            self._console.print(_sample_text(row, step))
        for backend in self._backends if shown else []:
            backend.log_generations(shown, step)

    def notice(self, text: str) -> None:
        """Say something that the user should know: printed, and kept for the report. The same text is said once."""
        with self._lock:  # loggers call this from their threads
            said, self._said = text in self._said, self._said | {text}
        if said:
            return
        self._console.print(f"note: {text}")
        with self._lock:
            if text not in self._run["notices"]:  # a resumed run says much of it again
                self._run["notices"].append(text)
            write_run(self.folder, self._run)

    def finish(self, status: str = "finished") -> Path | None:
        """Close everything and write the report. status: "finished", "interrupted" or "failed".

        Returns the report's path; None, with a notice, where it could not be written.
        """
        self._console.close()
        for backend in self._backends:
            backend.close(status)
        self._backends = []
        self._metrics.close()
        self._generations.close()
        self._run.update(status=status, ended=time.time())
        write_run(self.folder, self._run)
        try:
            return write_report(self.folder)
        except Exception as error:  # the run is over and its files are whole: how it ended does not depend on a page
            self.notice(f"the report could not be written: {type(error).__name__}: {error}")
            return None


def _seconds_of(record: Mapping[str, Any], last_written: float) -> float:
    """Seconds that a run went on before it is resumed; one that was killed, until its last metrics were written."""
    if "session_started" not in record:
        return 0.0
    end = record.get("ended") or last_written
    return record.get("earlier_seconds", 0.0) + max(0.0, end - record["session_started"])


def _number(name: str, value: Any) -> float | int:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric '{name}' is {type(value).__name__} {value!r}, not a number") from None
    return value


def _sample_text(row: Mapping[str, Any], step: int) -> str:
    values = (f"  {k}: {v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in row.items())
    return "\n".join([f"sample at step {step}", *values])
