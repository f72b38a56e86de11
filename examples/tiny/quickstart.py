"""Watch a model learn: data, GRPO with validation before and after, merge, and the merged model's answers.

`make quickstart` runs it. Everything is written to ./quickstart; a second run starts anew.

    python3 examples/tiny/quickstart.py --seed 1 --out quickstart
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import make_data

HERE = Path(__file__).resolve().parent
WARM_START = HERE / "model"
SCORE = f"val/test_score/{make_data.DATA_SOURCE}"
TESTS = 1000
SHOWN = 3

Pair = tuple[str, str]


def train(out: Path, seed: int, overrides: list[str]) -> Path:
    """GRPO as grpo.sh sets it up; returns the run's folder."""
    run = out / "run"
    env = os.environ | {"TINY_OUT": str(run), "TINY_DATA": str(out / "data")}
    seeds = [f"trainer.seed={seed}", f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
    subprocess.run(["bash", HERE / "grpo.sh", *seeds, *overrides], env=env, check=True)
    return run


def merge(run: Path, target: Path) -> Path:
    """The newest checkpoint of a run as a Hugging Face folder."""
    step = (run / "latest_checkpointed_iteration.txt").read_text().strip()
    actor = run / f"global_step_{step}" / "actor"
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    subprocess.run([*command, "--local_dir", actor, "--target_dir", target], check=True)
    return target


def validation_scores(run: Path) -> tuple[float, float]:
    """Held-out accuracy before the first and after the last step, as the trainer logged it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line[SCORE] for line in lines if SCORE in line]
    return scores[0], scores[-1]


def answers_of(folder: Path, pairs: list[Pair]) -> list[str]:
    """Greedy answers of a Hugging Face folder, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from warm_start import answers

    return answers(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), [p for p, _ in pairs]
    )


def share_right(given: list[str], pairs: list[Pair]) -> float:
    return sum(g == a for g, (_, a) in zip(given, pairs)) / len(pairs)


def samples(pairs: list[Pair], before: list[str], after: list[str]) -> list[str]:
    """A table of the first problems that the model got wrong before."""
    wrong = [i for i, (_, right) in enumerate(pairs) if before[i] != right][:SHOWN]
    lines = [f"  {'problem':<10}{'before':>8}{'after':>8}{'right':>8}"]
    return lines + [f"  {pairs[i][0]:<10}{before[i]:>8}{after[i]:>8}{pairs[i][1]:>8}" for i in wrong]


def peak_gigabytes() -> float:
    """Largest resident memory of any one process that this one has waited for, or of itself."""
    used = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return used * (1 if sys.platform == "darwin" else 1024) / 1e9  # Linux counts kibibytes, macOS bytes


def shown(path: Path) -> Path:
    """The path from the working directory, where it lies within."""
    here = Path.cwd().resolve()
    return path.relative_to(here) if path.is_relative_to(here) else path


def summary(out: Path, run: Path, model: Path, started: float) -> str:
    """What came out, checked on the merged model itself."""
    from transformers.utils import logging

    from verl.tracking.curve import learning_curve

    logging.disable_progress_bar()
    pairs = make_data.distinct_problems(TESTS, make_data.SEED, held_out=True)
    before, after = answers_of(WARM_START, pairs), answers_of(model, pairs)
    first, last = validation_scores(run)
    return "\n".join(
        [
            learning_curve(run),
            "",
            f"Three of the {TESTS} held-out problems that the model got wrong before:",
            *samples(pairs, before, after),
            "",
            f"held-out accuracy   before {first:.3f}, after {last:.3f} ({last - first:+.3f})",
            f"merged model        {shown(model)} (held-out accuracy with transformers alone: {share_right(after, pairs):.3f})",
            f"report              {shown(run / 'report.html')}",
            f"time                {time.monotonic() - started:.0f} s",
            f"peak memory         {peak_gigabytes():.2f} GB (the largest process)",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model with GRPO and show what it learned.")
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder (default: ./%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the run; the problems stay the same (default: 0)")
    parser.add_argument(
        "overrides", nargs="*", help="further config overrides, such as trainer.total_training_steps=20"
    )
    args = parser.parse_args()
    started, out = time.monotonic(), args.out.resolve()
    for stale in (out / "run", out / "model"):
        shutil.rmtree(stale, ignore_errors=True)
    make_data.write(out / "data", test=TESTS)
    run = train(out, args.seed, args.overrides)
    print(summary(out, run, merge(run, out / "model"), started))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command that failed has said why
