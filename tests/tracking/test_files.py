"""metrics.jsonl: one line a step, after resumes and kills too."""

import json

import pytest

from verl.tracking.files import StepLines, read_lines, read_run, series, write_run


def steps(path):
    return [line["step"] for line in read_lines(path)]


def test_lines_are_there_at_once_and_strict_json(tmp_path):
    lines = StepLines(tmp_path / "m.jsonl", None)
    lines.merge({"step": 0, "a": 1 / 3, "b": float("nan"), "c": float("inf"), "d": {"e": [float("nan")]}})
    text = (tmp_path / "m.jsonl").read_text()
    assert text == '{"step": 0, "a": 0.3333333333333333, "b": null, "c": null, "d": {"e": [null]}}\n'
    assert json.loads(text, parse_constant=pytest.fail)["a"] == 1 / 3
    lines.close()


def test_same_step_twice_is_one_line(tmp_path):
    lines = StepLines(tmp_path / "m.jsonl", None)
    for line in ({"step": 0, "v": "é" * 10}, {"step": 1, "a": 1, "b": 1}, {"step": 1, "b": 2, "c": 3}, {"step": 2}):
        lines.merge(line)
    lines.close()
    assert read_lines(tmp_path / "m.jsonl") == [
        {"step": 0, "v": "é" * 10},
        {"step": 1, "a": 1, "b": 2, "c": 3},
        {"step": 2},
    ]


def test_resume_cuts_what_comes_after_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    first = StepLines(path, None)
    for step in range(5):
        first.merge({"step": step, "run": 1, "text": "ü"})
    first.close()
    with open(path, "a") as file:
        file.write('{"step": 5, "ru')  # killed in the middle of a line
    second = StepLines(path, resumed_step=2)
    second.merge({"step": 2, "again": 1})  # validation before the first new step
    second.merge({"step": 3, "run": 2})
    second.close()
    lines = read_lines(path)
    assert steps(path) == [0, 1, 2, 3]
    assert lines[2] == {"step": 2, "run": 1, "text": "ü", "again": 1}
    assert lines[3]["run"] == 2


def test_a_run_from_scratch_keeps_the_earlier_file_aside(tmp_path):
    path = tmp_path / "m.jsonl"
    for run in (1, 2):
        lines = StepLines(path, None)
        lines.merge({"step": 0, "run": run})
        lines.close()
    assert read_lines(path) == [{"step": 0, "run": 2}]
    assert read_lines(tmp_path / "m.previous.jsonl") == [{"step": 0, "run": 1}]


def test_damage_in_the_middle_is_not_swallowed(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON: rubbish"):
        read_lines(path)
    assert read_lines(tmp_path / "none.jsonl") == []


def test_series_leaves_out_what_is_not_there():
    lines = [{"step": 0, "a": 1}, {"step": 1, "a": None}, {"step": 2}, {"step": 3, "a": 0.0}]
    assert series(lines, "a") == [(0, 1.0), (3, 0.0)]


def test_run_record(tmp_path):
    assert read_run(tmp_path) == {}
    write_run(tmp_path, {"config": {"path": tmp_path, "nan": float("nan")}})
    assert read_run(tmp_path) == {"config": {"path": str(tmp_path), "nan": None}}


def test_only_newlines_end_a_line(tmp_path):
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    lines = StepLines(tmp_path / "g.jsonl", None)
    for step in (1, 2):
        lines.append({"step": step, "response": text})
    lines.close()
    assert read_lines(tmp_path / "g.jsonl") == [{"step": 1, "response": text}, {"step": 2, "response": text}]
    (tmp_path / "empty.jsonl").write_text("")
    assert read_lines(tmp_path / "empty.jsonl") == []
