"""The loggers of others: tensorboard, wandb, mlflow, swanlab. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.config.schema.trainer import TrainerConfig
from verl.config.suggest import nearest_words
from verl.errors import ConfigError

LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab")


class Backend(Protocol):
    """One logger.

    run_id: what continues its run after a resume; None if it needs nothing. closes_in_caller: close is to be called by
    the thread that made the logger.
    """

    name: str
    run_id: str | None
    closes_in_caller: bool

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_generations(self, rows: list[dict[str, Any]], step: int) -> None: ...

    def close(self, status: str) -> None:
        """status: "finished", "interrupted" or "failed"."""


class TensorBoard:
    """Event files in $TENSORBOARD_DIR, else in `<folder>/tensorboard`."""

    name = "tensorboard"
    run_id: str | None = None
    closes_in_caller = False

    def __init__(self, folder: Path, resumed_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        where = os.environ.get("TENSORBOARD_DIR") or str(folder / "tensorboard")
        # The viewer hides what an interrupted run wrote after the step that this one resumes from.
        self._writer = SummaryWriter(where, purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, rows: list[dict[str, Any]], step: int) -> None:
        text = "\n\n---\n\n".join(
            "\n\n".join(f"**{k}**\n\n{_indented(v)}" for k, v in row.items() if k != "step") for row in rows
        )
        self._writer.add_text("val/generations", text, step)

    def close(self, status: str) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; WANDB_* variables as its own manual says (WANDB_MODE=offline needs no account)."""

    name = "wandb"
    closes_in_caller = False

    def __init__(self, config: TrainerConfig, run_config: dict[str, Any], folder: Path, run_id: str | None):
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=config.project_name,
            name=config.experiment_name,
            config=run_config,
            dir=str(folder),
            id=run_id,
            resume="allow" if run_id else None,
        )
        self.run_id: str | None = self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: list[dict[str, Any]], step: int) -> None:
        columns = _columns(rows)
        table = self._wandb.Table(columns=columns, data=[[_cell(row.get(c)) for c in columns] for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """MLflow at $MLFLOW_TRACKING_URI, else in `<folder>/mlflow.db` and `<folder>/mlflow`."""

    name = "mlflow"
    closes_in_caller = False

    def __init__(self, config: TrainerConfig, run_config: dict[str, Any], folder: Path, run_id: str | None):
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._entities = importlib.import_module("mlflow.entities")
        # The client and not the module's global run: that belongs to one thread, and perhaps to the user.
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run_id is None:
            experiment = self._client.get_experiment_by_name(config.project_name)
            if experiment:
                number = experiment.experiment_id
            else:
                # Without a server, files would land in the working directory.
                place = None if "MLFLOW_TRACKING_URI" in os.environ else (folder / "mlflow").absolute().as_uri()
                number = self._client.create_experiment(config.project_name, artifact_location=place)
            run_id = self._client.create_run(number, run_name=config.experiment_name).info.run_id
            for key, value in flatten(run_config).items():
                self._client.log_param(run_id, key, str(value)[:500])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id: str | None = run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        # MLflow allows letters, digits and _ - . space : / in names.
        entries = [self._entities.Metric(_plain(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=entries)

    def log_generations(self, rows: list[dict[str, Any]], step: int) -> None:
        self._client.log_dict(self.run_id, {"step": step, "rows": rows}, f"generations/step_{step}.json")

    def close(self, status: str) -> None:
        ends = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self.run_id, ends.get(status, "FAILED"))


class SwanLab:
    """SwanLab; $SWANLAB_MODE=local needs no account."""

    name = "swanlab"
    closes_in_caller = True  # its end puts signal handlers back, which only the main thread may

    def __init__(self, config: TrainerConfig, run_config: dict[str, Any], folder: Path, run_id: str | None):
        self._swanlab = importlib.import_module("swanlab")
        options: dict[str, Any] = {"id": run_id, "resume": "allow"} if run_id else {}
        if mode := os.environ.get("SWANLAB_MODE"):
            options["mode"] = mode
        run = self._swanlab.init(
            project=config.project_name,
            experiment_name=config.experiment_name,
            config=run_config,
            logdir=str(folder / "swanlab"),
            **options,
        )
        self.run_id: str | None = getattr(run, "id", None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_generations(self, rows: list[dict[str, Any]], step: int) -> None:
        texts = [
            self._swanlab.Text("\n\n".join(f"{k}: {v}" for k, v in row.items()), caption=str(i))
            for i, row in enumerate(rows)
        ]
        self._swanlab.log({"val/generations": texts}, step=step)

    def close(self, status: str) -> None:
        self._swanlab.finish()


def logger_names(value: Any) -> list[str]:
    """`trainer.logger` as a list of names, each known and installed; ConfigError otherwise."""
    names = [value] if isinstance(value, str) else list(value or [])
    for name in names:
        if name not in LOGGERS:
            near = nearest_words(str(name), LOGGERS, limit=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ConfigError(f"trainer.logger={name}: {hint}Known: {', '.join(LOGGERS)}")
        if name != "console" and not _installed(name):
            extra = "reverl" if name == "tensorboard" else f"reverl[{name}]"
            raise ConfigError(f"trainer.logger={name} needs a package that is not installed: pip install '{extra}'")
    return list(dict.fromkeys(names))


def _installed(name: str) -> bool:
    # A mere folder of that name counts as a package without origin, and wandb leaves one in the working directory.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def make_backend(
    name: str,
    config: TrainerConfig,
    run_config: dict[str, Any],
    folder: Path,
    run_id: str | None,
    resumed_step: int | None,
) -> Backend:
    if name == "tensorboard":
        return TensorBoard(folder, resumed_step)
    made = {"wandb": Wandb, "mlflow": MLflow, "swanlab": SwanLab}[name]
    return made(config, run_config, folder, run_id)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested config as dotted keys.

    >>> flatten({"data": {"seed": 1, "files": ["a", "b"]}})
    {'data.seed': 1, 'data.files': ['a', 'b']}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def _indented(value: Any) -> str:
    """Markdown for text that must not be read as Markdown."""
    return "\n".join(f"    {line}" for line in str(value).splitlines() or [""])
