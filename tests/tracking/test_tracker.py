"""The tracker as a trainer uses it."""

import json
import os

import numpy as np
import pytest
import torch

from verl.config.schema import TrainerConfig
from verl.errors import ConfigError
from verl.tracking import Tracker
from verl.tracking.files import read_lines


def config(**changes) -> TrainerConfig:
    return TrainerConfig(project_name="p", experiment_name="e", **{"logger": "console", **changes})


def rows(n, response="2"):
    return [{"prompt": f"{i}+1=", "response": response, "score": 1.0, "ground_truth": str(i + 1)} for i in range(n)]


def test_a_run(tmp_path, capsys):
    tracker = Tracker(config(), {"trainer": {"seed": 3}}, tmp_path / "run", total_steps=2, plan={"world_size": 1})
    tracker.log({"val/test_score/tiny": 0.25}, 0)
    tracker.log(
        {"timing/gen": np.float32(1.5), "actor/lr": 1e-6, "actor/pg_loss": torch.tensor(-0.0), "reward/failures": 2}, 1
    )
    tracker.notice("2 rewards failed")
    report = tracker.finish("interrupted")
    assert capsys.readouterr().out.splitlines() == [
        "step:0 - val/test_score/tiny:0.250",
        "step:1 - timing/gen:1.500 - actor/lr:1.000e-06 - actor/pg_loss:0.000 - reward/failures:2.000",
        "note: 2 rewards failed",
    ]
    assert read_lines(tmp_path / "run/metrics.jsonl") == [
        {"step": 0, "val/test_score/tiny": 0.25},
        {"step": 1, "timing/gen": 1.5, "actor/lr": 1e-6, "actor/pg_loss": 0.0, "reward/failures": 2},
    ]
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["notices"] == ["2 rewards failed"]
    assert record["config"] == {"trainer": {"seed": 3}}
    assert record["plan"] == {"world_size": 1}
    assert record["ended"] >= record["started"]
    assert report == tmp_path / "run/report.html"
    assert "2 rewards failed" in report.read_text()


def test_a_killed_run_leaves_its_lines_and_a_record(tmp_path):
    tracker = Tracker(config(), {}, tmp_path)
    tracker.log({"a": 1.0}, 0)
    tracker.notice("watch out")
    # No finish: everything so far is on the disk.
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}]
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["notices"]) == ("running", ["watch out"])


def test_a_step_is_restored_where_a_kill_took_its_line(tmp_path):
    tracker = Tracker(config(), {}, tmp_path)
    tracker.log({"a": 1.0}, 1)
    tracker.log({"a": 2.0}, 2)
    for lost in (False, True):
        if lost:
            (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n')
        resumed = Tracker(config(), {}, tmp_path, resumed_step=2)
        resumed.restore({"a": 9.0 if not lost else 2.0}, 2)
        resumed.finish()
        assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]


def test_resume(tmp_path):
    first = Tracker(config(), {}, tmp_path)
    for step in range(4):
        first.log({"run": 1}, step)
        first.log_generations(rows(1), step)
    first.notice("said twice")
    started = json.loads((tmp_path / "run.json").read_text())["started"]
    second = Tracker(config(), {}, tmp_path, resumed_step=1)
    second.notice("said twice")
    for step in (2, 3, 4):
        second.log({"run": 2}, step)
    second.finish()
    assert [(x["step"], x["run"]) for x in read_lines(tmp_path / "metrics.jsonl")] == [
        (0, 1),
        (1, 1),
        (2, 2),
        (3, 2),
        (4, 2),
    ]
    assert [x["step"] for x in read_lines(tmp_path / "generations.jsonl")] == [0, 1]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["started"] == started
    assert record["resumed_from"] == [1]
    assert record["notices"] == ["said twice"]


def test_generations_printed_as_asked_and_a_few_kept_anyway(tmp_path, capsys):
    tracker = Tracker(config(log_val_generations=2), {}, tmp_path)
    tracker.log_generations(rows(20, "two\nlines"), 5)
    out = capsys.readouterr().out
    assert out.count("sample at step 5") == 2
    assert "  prompt: 1+1=\n  response: two\nlines\n  score: 1.0" in out
    assert len(read_lines(tmp_path / "generations.jsonl")) == 8
    quiet = Tracker(config(), {}, tmp_path / "quiet")
    quiet.log_generations(rows(3), 0)
    assert capsys.readouterr().out == ""
    assert [x["prompt"] for x in read_lines(tmp_path / "quiet/generations.jsonl")] == ["0+1=", "1+1=", "2+1="]


def test_without_console_steps_are_not_printed_but_notices_are(tmp_path, capsys):
    tracker = Tracker(config(logger=["tensorboard"]), {}, tmp_path)
    tracker.log({"a": 1.0}, 0)
    tracker.notice("mind this")
    tracker.finish()
    assert capsys.readouterr().out == "note: mind this\n"
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_what_is_not_a_number_is_named(tmp_path):
    tracker = Tracker(config(), {}, tmp_path)
    with pytest.raises(TypeError, match="metric 'actor/x' is str 'high'"):
        tracker.log({"actor/x": "high"}, 0)
    with pytest.raises(ConfigError, match="did you mean 'console'"):
        Tracker(config(logger="consol"), {}, tmp_path)


def test_a_logger_that_cannot_start_is_said_and_left_out(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise OSError("no route to host")

    monkeypatch.setattr("verl.tracking.tracker.make_backend", fail)
    tracker = Tracker(config(logger=["console", "tensorboard"]), {}, tmp_path)
    tracker.log({"a": 1.0}, 0)
    tracker.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "note: trainer.logger=tensorboard could not start, the run goes on: OSError: no route to host",
        "step:0 - a:1.000",
    ]


@pytest.mark.parametrize("killed", [False, True])
def test_the_time_until_a_run_is_resumed_does_not_count(tmp_path, monkeypatch, killed):
    now = 1000.0
    monkeypatch.setattr("verl.tracking.tracker.time.time", lambda: now)
    first = Tracker(config(), {}, tmp_path)
    first.log({"a": 1.0}, 1)
    now = 1060.0
    if killed:
        os.utime(tmp_path / "metrics.jsonl", (now, now))
    else:
        first.finish("interrupted")
    now = 9000.0
    second = Tracker(config(), {}, tmp_path, resumed_step=1)
    now = 9030.0
    assert "<span>the run</span><b>1 min 30 s</b>" in second.finish().read_text()


def test_a_report_that_fails_does_not_change_how_the_run_ended(tmp_path, capsys):
    tracker = Tracker(config(), {}, tmp_path)
    tracker.log({"a": 1.0}, 1)
    (tmp_path / "report.html").mkdir()  # stands where the page should go
    assert tracker.finish("finished") is None
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["notices"][0].startswith("the report could not be written: IsADirectoryError")
    assert "note: the report could not be written" in capsys.readouterr().out


def test_the_same_notice_is_said_once(tmp_path, capsys):
    tracker = Tracker(config(), {}, tmp_path)
    for text in ("mind the gap", "mind the step", "mind the gap"):
        tracker.notice(text)
    tracker.finish()
    assert capsys.readouterr().out.splitlines() == ["note: mind the gap", "note: mind the step"]
