"""Which loggers may be asked for, and what they get."""

import sys
import types

import pytest

from verl.config.schema import TrainerConfig
from verl.errors import ConfigError
from verl.tracking.backends import TensorBoard, flatten, logger_names, make_backend


def test_names_and_lists():
    assert logger_names("console") == ["console"]
    assert logger_names(["console", "tensorboard", "console"]) == ["console", "tensorboard"]
    assert logger_names(None) == []
    with pytest.raises(ConfigError, match=r"trainer\.logger=wandbb: did you mean 'wandb'"):
        logger_names(["wandbb"])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_missing_package_names_its_extra(name, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    with pytest.raises(ConfigError, match=rf"pip install 'reverl\[{name}\]'"):
        logger_names(name)


def test_a_folder_called_wandb_is_not_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()
    with pytest.raises(ConfigError, match="not installed"):
        logger_names("wandb")


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": []}}, "e": {}}) == {"a.b": 1, "a.c.d": [], "e": {}}


def test_tensorboard_holds_the_numbers(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    for steps, resumed in (((0, 1, 2), None), ((2, 3), 1)):
        board = TensorBoard(tmp_path, resumed)
        for step in steps:
            board.log({"actor/lr": step / 8}, step)
        board.log_generations([{"prompt": "1+1=", "response": "# 2"}], steps[-1])
        board.close("finished")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("actor/lr")] == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]


class FakeRun:
    id = "run7"

    def __init__(self):
        self.logged, self.exit_code = [], None

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code=None):
        self.exit_code = exit_code


def test_wandb_gets_config_steps_and_its_run_back(tmp_path, monkeypatch):
    run, seen = FakeRun(), {}
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: seen.update(options) or run
    fake.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TrainerConfig(project_name="p", experiment_name="e")
    backend = make_backend("wandb", config, {"a": 1}, tmp_path, run_id="run7", resumed_step=3)
    assert backend.run_id == "run7"
    expected = {"project": "p", "name": "e", "config": {"a": 1}, "dir": str(tmp_path), "id": "run7", "resume": "allow"}
    assert seen == expected
    backend.log({"x": 1.0}, 4)
    backend.log_generations([{"prompt": "q", "tags": [1]}, {"prompt": "r", "score": 1.0}], 4)
    assert run.logged == [
        (4, {"x": 1.0}),
        (4, {"val/generations": (["prompt", "tags", "score"], [["q", "[1]", None], ["r", None, 1.0]])}),
    ]
    backend.close("failed")
    assert run.exit_code == 1


@pytest.mark.parametrize("name", ["mlflow", "wandb", "swanlab"])
def test_the_real_package_offline(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrainerConfig(project_name="p", experiment_name="e")
    run_id = None
    for resumed in (None, 1):
        backend = make_backend(name, config, {"a": {"b": 1}}, tmp_path, run_id, resumed)
        backend.log({"val/test_score/openai/gsm8k": 0.5}, 0 if resumed is None else 2)
        backend.log_generations([{"prompt": "1+1=", "response": "2"}], 0)
        backend.close("finished")
        assert run_id is None or backend.run_id == run_id
        run_id = backend.run_id
    if name == "mlflow":
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
        history = client.get_metric_history(run_id, "val/test_score/openai/gsm8k")
        assert [(m.step, m.value) for m in history] == [(0, 0.5), (2, 0.5)]
        assert client.get_run(run_id).info.status == "FINISHED"
