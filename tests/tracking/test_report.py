"""The report: complete, self-contained, safe, and rebuilt from the run's files at any time."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from verl.errors import DataError
from verl.tracking import charts
from verl.tracking.charts import bar_chart, line_chart
from verl.tracking.report import _duration, main, write_report


def write(folder, metrics, generations=(), run=None):
    for name, rows in (("metrics.jsonl", metrics), ("generations.jsonl", generations)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))


def svgs(html):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html)]


METRICS = [
    {"step": 0, "val/test_score/tiny": 0.25},
    {
        "step": 1,
        "critic/score/mean": 0.3,
        "actor/entropy": 0.9,
        "timing/gen": 2.0,
        "timing/update_actor": 1.0,
        "timing/step": 4.0,
    },
    {
        "step": 2,
        "critic/score/mean": 0.5,
        "actor/entropy": None,
        "timing/gen": 1.0,
        "timing/step": 1.005,
        "val/test_score/tiny": 0.75,
    },
]


def test_page_has_what_a_reader_looks_for(tmp_path):
    generations = [
        {"step": 0, "prompt": "1+1=", "response": "<script>7", "score": 0.0, "ground_truth": "2"},
        {"step": 2, "prompt": "1+1=", "response": "2", "score": 1.0, "ground_truth": "2"},
        {"step": 2, "prompt": "new?", "response": "3", "score": 0.5},
    ]
    run = {"experiment": "a&b", "project": "p", "status": "finished", "total_steps": 2, "started": 1000, "ended": 1200,
           "config": {"trainer": {"seed": None}}, "plan": {"world_size": 1}, "notices": ["<careful>"]}  # fmt: skip
    write(tmp_path, METRICS, generations, run)
    html = write_report(tmp_path).read_text()
    assert "<h1>p / a&amp;b</h1>" in html
    assert "step 2 of 2" in html
    assert "<b>0.750</b><span>from 0.250 (+0.500)</span>" in html
    assert "3 min 20 s" in html
    assert "&lt;script&gt;7" in html
    assert "<script>7" not in html
    assert "&lt;careful&gt;" in html
    assert "<td>trainer.seed</td><td>null</td>" in html
    assert "<td>world_size</td><td>1</td>" in html
    assert html.count("not sampled") == 1
    titles = re.findall(r"<figcaption><b>(.*?)</b>", html)
    assert titles == ["Validation score", "Reward", "Entropy", "Time of a step"]
    assert len(svgs(html)) == 4


def test_generation_beside_the_step_is_no_part_of_its_time(tmp_path):
    step = {"timing/gen": 3.0, "timing/wait": 1.0, "timing/update_actor": 2.0, "timing/step": 3.0}
    lines = [{"step": i, **step, "training/staleness_mean": 1.0, "perf/idle_share_trainer": 0.3} for i in (1, 2)]
    write(tmp_path, lines)
    figures = re.findall(r"<figure.*?</figure>", write_report(tmp_path).read_text(), re.DOTALL)
    titles = {re.search(r"<figcaption><b>(.*?)</b>", figure).group(1): figure for figure in figures}
    assert list(titles) == ["Staleness", "Idle", "Time of a step"]
    assert re.findall(r"</i>(\w+)</span>", titles["Time of a step"]) == ["update_actor", "wait"]


def test_nothing_is_fetched(tmp_path):
    write(tmp_path, METRICS)
    html = write_report(tmp_path).read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(", html)
    assert set(re.findall(r"https?://[^\"')\s]+", html)) <= {"http://www.w3.org/2000/svg"}


def test_line_chart_puts_points_where_they_belong():
    html = line_chart("T", "unit", {"a": [(0, 0.0), (10, 1.0)]})
    line = svgs(html)[0].find("polyline")
    left, right, top, bottom = charts.LEFT, charts.WIDTH - charts.RIGHT, charts.TOP, charts.HEIGHT - charts.BOTTOM
    assert line.get("points") == f"{left}.0,{bottom}.0 {right}.0,{top}.0"
    texts = [text.text for text in svgs(html)[0].iter("text")]
    assert texts == ["0", "0.5", "1.0", "0", "2", "4", "6", "8", "10", "step", "unit"]
    rows = json.loads(svgs(html)[0].get("data-rows"))
    assert rows == [[0, left, {"a": 0.0}], [10, right, {"a": 1.0}]]
    assert line_chart("T", "unit", {"a": []}) == ""


def test_long_lines_are_thinned_and_smoothed():
    html = line_chart("T", "u", {"a": [(i, float(i % 2)) for i in range(5000)]})
    raw, mean = svgs(html)[0].findall("polyline")
    assert raw.get("class") == "s0 raw"
    assert len(raw.get("points").split()) == len(mean.get("points").split()) <= 400


def test_bars_stack_to_the_sum():
    html = bar_chart("T", "seconds", {"gen": {1: 2.0, 2: 1.0}, "update": {1: 1.0}}, [1, 2])
    bars = svgs(html)[0].findall("rect")
    assert [bar.get("class") for bar in bars] == ["s0", "s0", "s1"]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[2] == pytest.approx(heights[1], abs=0.2)
    assert float(bars[2].get("y")) + heights[2] == pytest.approx(float(bars[0].get("y")), abs=0.2)
    assert bars[0].get("x") == bars[2].get("x")
    assert bar_chart("T", "seconds", {}, []) == ""


def test_many_bars_are_merged_into_means():
    steps = list(range(1, 201))
    html = bar_chart("T", "seconds", {"gen": {s: 1.0 if s % 2 else 3.0 for s in steps}}, steps)
    rows = json.loads(svgs(html)[0].get("data-rows"))
    assert len(rows) == 67
    # Bins of three steps: 1, 3, 1 and 3, 1, 3 in turn.
    assert [row[2]["gen"] for row in rows[:2]] == pytest.approx([5 / 3, 7 / 3])


def test_other_is_what_phases_leave_of_the_step(tmp_path):
    write(tmp_path, METRICS)
    html = write_report(tmp_path).read_text()
    rows = json.loads(svgs(html)[-1].get("data-rows"))
    assert rows[0][2] == {"gen": 2.0, "update_actor": 1.0, "other": 1.0}
    assert rows[1][2] == {"gen": 1.0, "update_actor": 0.0, "other": 0.0}


def test_durations():
    assert [_duration(s) for s in (42.4, 200, 7300)] == ["42 s", "3 min 20 s", "2 h 01 min"]


def test_command_line(tmp_path, capsys):
    write(tmp_path, METRICS)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "none")]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(DataError):
        write_report(tmp_path / "none")


def test_a_run_that_just_began(tmp_path):
    write(tmp_path, [])
    assert "No metrics yet." in write_report(tmp_path).read_text()
