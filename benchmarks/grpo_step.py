"""How long a GRPO step takes, phase by phase, beside TRL's GRPOTrainer on the same work in the same run.

    python benchmarks/grpo_step.py --reference trl --trl-python TRLVENV/bin/python        # W2, a CPU
    python benchmarks/grpo_step.py --work w1 --model FOLDER --gsm8k FOLDER                # W1, a GPU
    python benchmarks/grpo_step.py --work w1 --model FOLDER --gsm8k FOLDER --shape 7b --steps 2 --warmup 1 --rounds 1
    python benchmarks/grpo_step.py --smoke                                                # seconds: does it run?

Each side runs in a process of its own, one after the other, `--rounds` times in turn, so that a busy machine is busy for
both. The first `--warmup` steps of each process are left out, and the median of the rest counts. `processor` is the time
that the step's processes had the processor for; on a machine that does other work it is steadier than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from step_workloads import HERE, OFFLOAD, Workload, cpu_workload, gpu_workload, with_random_shape

PHASES = {
    "gen": "generate",
    "score_and_log_probs": "rewards, reference and old log-probs",
    "update_actor": "update",
    "update_weights": "weights to the rollout",
    "step": "step",
    "processor": "step, processor time",
}
# What TRL does between generation and update, in this trainer's phases. Rewards are computed beside them.
BETWEEN = ("reward", "ref", "old_log_prob", "adv")

Steps = list[dict[str, float]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", choices=("w1", "w2"), default="w2", help="w2: CPU, tiny model; w1: GPU, GSM8K")
    parser.add_argument("--model", help="w1: a Hugging Face folder")
    parser.add_argument("--gsm8k", help="w1: a folder with train.jsonl and test.jsonl")
    parser.add_argument("--shape", choices=("7b",), help="w1: random weights of this shape, with --model's tokenizer")
    parser.add_argument("--reference", choices=("none", "trl"), default="none", help="what to compare with")
    parser.add_argument("--trl-python", help="Python of an environment in which TRL is installed")
    parser.add_argument("--steps", type=int, default=8, help="steps a process (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="of these, steps left out (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", help="OMP_NUM_THREADS, one table each (default: as it is)")
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="further options of ours")
    parser.add_argument("--json", metavar="OUT", help="write every number here")
    parser.add_argument("--smoke", action="store_true", help="a smaller model, few samples and steps")
    args = parser.parse_args()
    if args.work == "w1" and not (args.model and args.gsm8k):
        parser.error("--work w1 needs --model FOLDER and --gsm8k FOLDER")
    if args.warmup >= args.steps:
        parser.error(f"--warmup {args.warmup} leaves none of --steps {args.steps}")
    if args.smoke:
        args.steps, args.warmup, args.rounds = 2, 1, 1
    return args


def main() -> None:
    args = parse_arguments()
    sides = ["ours"]
    if args.reference == "trl":
        if args.trl_python and Path(args.trl_python).is_file():
            sides.append("trl")
        else:
            print(
                f"no comparison: --trl-python {args.trl_python} is not a Python. Make a venv with TRL and give its own."
            )
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = cpu_workload(folder, args.smoke) if args.work == "w2" else gpu_workload(folder, args.model, args.gsm8k)
        if args.shape:
            from rollout import (
                SHAPES,  # the script beside this one; not imported unless asked for, since torch comes with it
            )

            with_random_shape(work, SHAPES[args.shape], folder / "shape")
            work.overrides += OFFLOAD
        work.overrides += args.override
        for threads in args.threads or [None]:
            runs: dict[str, list[dict]] = {side: [] for side in sides}
            for _ in range(args.rounds):
                for side in sides:
                    runs[side].append(run_side(side, work, args, folder, threads))
            print_table(runs, args.warmup, threads)
            results.append({"threads": threads, **runs})
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


def run_side(side: str, work: Workload, args: argparse.Namespace, folder: Path, threads: int | None) -> dict:
    """One process of one side; returns what it measured."""
    task, result, log = folder / "task.json", folder / "result.json", folder / f"{side}.log"
    common = {"steps": args.steps, "model": work.model, "train_file": work.train_file, "output": str(folder / "out")}
    reward = {"reward_file": work.reward_file, "reward_name": work.reward_name}
    ours = {"overrides": work.our_overrides(folder / "out")}
    task.write_text(json.dumps({**common, **reward, **(ours if side == "ours" else {"trl": work.trl_settings()})}))
    result.unlink(missing_ok=True)
    script = "step_ours.py" if side == "ours" else "trl_reference.py"
    python = sys.executable if side == "ours" else args.trl_python
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("w", encoding="utf-8") as out:
        command = [python, str(HERE / script), str(task), str(result)]
        status = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if status:
        sys.exit(f"{script} failed with status {status}; the end of what it printed:\n{log.read_text()[-3000:]}")
    return json.loads(result.read_text())


def counted_steps(runs: list[dict], warmup: int) -> Steps:
    """The steps that count, with the phases between generation and update added up under TRL's name for them."""
    steps = [dict(step) for run in runs for step in run["steps"][warmup:]]
    for step in steps:
        step.setdefault("score_and_log_probs", sum(step.get(name, 0.0) for name in BETWEEN))
    return steps


def median(steps: Steps, name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return statistics.median(values) if values else None


def print_table(runs: dict[str, list[dict]], warmup: int, threads: int | None) -> None:
    """Medians of each phase for each side, and how many times as long TRL takes."""
    steps = {side: counted_steps(of_side, warmup) for side, of_side in runs.items()}
    head = f"{threads} thread{'s' * (threads > 1)}, " if threads else ""
    print(f"\n{head}median of {len(steps['ours'])} steps, seconds")
    print(f"{'':40}" + "".join(f"{side:>10}" for side in steps) + ("     ratio" if "trl" in steps else ""))
    for name, title in PHASES.items():
        row = [median(of_side, name) for of_side in steps.values()]
        cells = "".join(f"{'-' if value is None else f'{value:.3f}':>10}" for value in row)
        both = len(row) == 2 and None not in row
        print(f"{title:40}{cells}" + (f"{row[1] / row[0]:9.2f}x" if both else ""))
    for side, of_side in runs.items():
        memory = max(run["peak_rss_gb"] for run in of_side)
        print(f"{side}: peak memory {memory:.2f} GB" + _further(of_side, steps[side]))


def _further(of_side: list[dict], steps: Steps) -> str:
    """Peak of the GPU's memory, seconds until the first step, model FLOPs utilisation: where known."""
    text = ""
    if "peak_gpu_gb" in of_side[0]:
        text += f", GPU {max(run['peak_gpu_gb'] for run in of_side):.1f} GB"
    if "ready_seconds" in of_side[0]:
        text += f", ready to generate after {min(run['ready_seconds'] for run in of_side):.1f} s"
    if (mfu := median(steps, "mfu")) is not None:
        text += f", update at {mfu:.1%} of the GPU's dense bf16 peak"
    return text + (f", {of_side[0]['version']}" if "version" in of_side[0] else "")


if __name__ == "__main__":
    main()
