"""The benchmarks still run: each with --smoke, in seconds."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_grpo_step(tmp_path):
    """Two steps of 4 prompts x 2 samples, the first left out; the phases fill the step, and no token is lost or made up."""
    out = run("grpo_step.py", "--reference", "trl", "--trl-python", "/nowhere", "--json", str(tmp_path / "out.json"))
    assert "no comparison: --trl-python /nowhere is not a Python" in out
    assert "ratio" not in out
    assert "median of 1 steps" in out
    (result,) = json.loads((tmp_path / "out.json").read_text())
    (process,) = result["ours"]
    assert len(process["steps"]) == 2
    for step in process["steps"]:
        phases = sum(step[name] for name in ("gen", "ref", "reward", "adv", "update_actor", "update_weights"))
        assert 0.5 * step["step"] < phases <= step["step"]
        assert 8 <= step["response_tokens"] <= 8 * 16
    assert 0 < process["ready_seconds"] < 600


@pytest.mark.slow
def test_overlap(tmp_path):
    out = run("overlap.py", "--svg", str(tmp_path / "lines.svg"))
    rows = {row.split()[0]: row.split() for row in out.splitlines() if row.startswith(("sync", "one_step", "fully"))}
    assert {name: row[-1] for name, row in rows.items()}.keys() == {"sync", "one_step_off", "fully_async"}
    assert (rows["sync"][-1], rows["one_step_off"][-1]) == ("0.00", "1.00")  # how stale a batch is
    picture = ET.parse(tmp_path / "lines.svg")
    kinds = {element.get("class") for element in picture.iter() if element.tag.endswith("rect")}
    assert kinds == {"page", "lane", "gen", "train", "weights"}


def test_rollout():
    assert "tokens/s" in run("rollout.py")


@pytest.mark.slow
def test_weights_over_several_ranks():
    command = [sys.executable, str(BENCHMARKS / "multi_gpu_sync.py"), "tiny", "shared", "separate"]
    command += ["--device", "cpu", "--bucket", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shared, separate = map(json.loads, done.stdout.splitlines())
    # Of two ranks each receives the other's half; on a device of its own a rank receives all.
    assert separate["received_gb"] == pytest.approx(separate["rollout_weights_gb"], abs=1e-3)
    assert shared["received_gb"] == pytest.approx(shared["rollout_weights_gb"] / 2, abs=1e-3)
    assert shared["least_seconds"] == pytest.approx(shared["received_gb"] / shared["link_gb_per_second"], rel=0.05)


@pytest.mark.vllm
def test_vllm_adapter():
    pytest.importorskip("vllm")
    assert "rollout engine" in run("vllm_adapter.py")


@pytest.mark.slow
def test_serve_load(tmp_path):
    """Eight clients for two seconds: right answers to right and wrong requests, and no slot in use after them."""
    out = run("serve_load.py", "--json", str(tmp_path / "out.json"))
    assert "tokens/s, direct" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["wrong"] == {}
    assert min(found["requests"]["whole"], found["requests"]["streamed"]) >= 2
    assert found["tokens_per_second"] == pytest.approx(sum(found["requests"].values()) * 8 / found["seconds"])
    assert sum(found["bad"].values()) >= 1
    assert (found["slots_used_at_the_end"], found["waiting_at_the_end"]) == (0, 0)
