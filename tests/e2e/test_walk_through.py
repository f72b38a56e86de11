"""docs/trainers.md from conversations to scores: every command of the walk-through, with less data."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainers.md"
SMALLER = {
    "--rows 256": "--rows 128",
    "global_step_4": "global_step_2",
    "total_training_steps=20": "total_training_steps=3",
}
SMALLER |= {"global_step_20": "global_step_3", "make_data.py --out": "make_data.py --test 60 --train 2000 --out"}

pytestmark = pytest.mark.e2e


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_walk_through(tmp_path):
    text = PAGE.read_text().partition("## From conversations")[2].partition("\n## ")[0]
    script = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    for old, new in SMALLER.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    scores = json.loads(done.stdout.splitlines()[-1])
    assert scores["responses"] == 240
    assert scores["test_score/tiny/arithmetic"] > 0.4  # a third is where it starts
    assert scores["tiny/arithmetic/best@4/mean"] >= scores["tiny/arithmetic/maj@4/mean"]
    assert (tmp_path / "outputs" / "walk" / "model" / "model.safetensors").is_file()
