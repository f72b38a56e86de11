"""The results page: its settings compose, and its figures and picture are the recorded ones."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.scripts import load_benchmark

from verl.config.compose import compose
from verl.config.validate import validate
from verl.trainer.algorithm import choose_algorithm

ROOT = Path(__file__).resolve().parents[2]
benchmark = load_benchmark("algorithms")


@pytest.mark.parametrize("name", list(benchmark.ALGORITHMS))
def test_settings_are_ones_that_the_trainer_takes(name):
    config = compose([*benchmark.ALGORITHMS[name][1], "actor_rollout_ref.rollout.n=16"], notify=lambda text: None)
    validate(config)
    estimator, loss = choose_algorithm(config)
    assert estimator.name == config.algorithm.adv_estimator
    assert loss.name == config.actor_rollout_ref.actor.policy_loss.loss_mode


def recorded():
    record = json.loads((ROOT / "benchmarks" / "results" / "algorithms_tiny.json").read_text())
    return {name: [[tuple(point) for point in c] for c in curves] for name, curves in record.items()}


def test_the_page_shows_the_record():
    runs = recorded()
    assert len(runs) >= 8
    assert all(len(curves) == 3 for curves in runs.values())
    assert benchmark.table(runs) in benchmark.PAGE.read_text()
    assert benchmark.PICTURE.read_text() == benchmark.picture(runs)


def test_picture_and_table_by_hand():
    curves = [[(0, 0.5), (20, 0.75)], [(0, 0.5), (20, 1.0)]]
    assert benchmark.mean(curves) == [(0, 0.5), (20, 0.875)]
    root = ET.fromstring(benchmark.picture({"grpo": curves, "rloo": curves[:1]}))
    panels = [g for g in root if g.tag.endswith("}g")]
    lines = [[p.get("points") for p in panel if p.tag.endswith("polyline")] for panel in panels]
    assert [len(group) for group in lines] == [3, 2]  # the reference, and each seed
    # The axis goes from 0.4 or 0.5 up to 1: the second seed ends at the top.
    assert lines[0][2].split()[-1] == f"{benchmark.WIDTH - benchmark.RIGHT:.1f},{benchmark.TOP:.1f}"


def test_a_run_that_is_done_is_not_repeated(tmp_path, monkeypatch):
    folder = tmp_path / "grpo-0"
    folder.mkdir()
    rows = [{"step": s, benchmark.SCORE: 0.5} for s in range(0, benchmark.STEPS + 1, benchmark.EVERY)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *a, **k: pytest.fail("started again"))
    benchmark.train("grpo", 0, tmp_path)
    assert benchmark.collect(tmp_path) == {"grpo": [[(row["step"], 0.5) for row in rows]]}
