"""Train the tiny task with many algorithms, a few seeds each, and write docs/results.md with one picture.

    python benchmarks/algorithms.py                    # all; runs that are done are not repeated
    python benchmarks/algorithms.py --only rloo gspo --seeds 0
    python benchmarks/algorithms.py --report           # the page alone, from the runs that there are

Runs go to outputs/algorithms/NAME-SEED. One takes half a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from verl.tracking.files import METRICS, read_lines, series
from verl.tracking.scales import tick_label, ticks

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "outputs" / "algorithms"
PAGE, PICTURE = ROOT / "docs" / "results.md", ROOT / "docs" / "img" / "algorithms.svg"
SCORE = "val/test_score/tiny/arithmetic"
STEPS, EVERY = 20, 4

A = "actor_rollout_ref.actor"
LOSS = f"{A}.policy_loss.loss_mode"
# Label, and what is set beside examples/tiny/grpo.sh.
ALGORITHMS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("GRPO", []),
    "dr_grpo": (
        "Dr. GRPO",
        ["algorithm.norm_adv_by_std_in_grpo=False", f"{A}.loss_agg_mode=seq-mean-token-sum-norm"],
    ),
    "dapo": (
        "DAPO",
        ["algorithm.filter_groups.enable=True", f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28"],
    ),
    "rloo": ("RLOO", ["algorithm.adv_estimator=rloo"]),
    "reinforce_plus_plus_baseline": (
        "REINFORCE++ baseline",
        ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
    ),
    "remax": ("ReMax", ["algorithm.adv_estimator=remax"]),
    "opo": ("OPO", ["algorithm.adv_estimator=opo"]),
    "ppo": (
        "PPO",
        ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.model.enable_gradient_checkpointing=False"],
    ),
    "gspo": ("GSPO", [f"{LOSS}=gspo"]),
    "gmpo": ("GMPO", [f"{LOSS}=geo_mean", f"{A}.clip_ratio=0.4"]),
    "cispo": ("CISPO", [f"{LOSS}=cispo", f"{A}.clip_ratio_low=10", f"{A}.clip_ratio_high=0.2"]),
    "sapo": ("SAPO", [f"{LOSS}=sapo"]),
}

Curve = list[tuple[float, float]]


def train(name: str, seed: int, out: Path) -> None:
    """One run, unless it is there already."""
    folder = out / f"{name}-{seed}"
    if len(curve(folder)) == STEPS // EVERY + 1:
        return
    words = [f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={EVERY}", "trainer.logger=[]"]
    words += [f"{key}={seed}" for key in ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")]
    env = os.environ | {"TINY_OUT": str(folder), "TINY_DATA": str(out / "data"), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    script = ROOT / "examples" / "tiny" / "grpo.sh"
    subprocess.run(["bash", script, *ALGORITHMS[name][1], *words], env=env, check=True, stdout=subprocess.DEVNULL)


def curve(folder: Path) -> Curve:
    """(step, held-out accuracy) of a run; [] where there is none."""
    path = folder / METRICS
    return series(read_lines(path), SCORE) if path.is_file() else []


def collect(out: Path) -> dict[str, list[Curve]]:
    """The curves of each algorithm that has whole runs, by seed."""
    found = {}
    for name in ALGORITHMS:
        curves = [curve(folder) for folder in sorted(out.glob(f"{name}-[0-9]*"))]
        whole = [c for c in curves if c and c[-1][0] == STEPS]
        if whole:
            found[name] = whole
    return found


# --- the page -----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, COLUMNS = 230, 150, 4
LEFT, TOP, RIGHT, BOTTOM = 36, 24, 10, 24


def picture(runs: dict[str, list[Curve]]) -> str:
    """A panel for each algorithm: its seeds, and in grey the mean of GRPO's."""
    rows = -(-len(runs) // COLUMNS)
    reference = mean(runs["grpo"]) if "grpo" in runs else []
    lowest = min(y for curves in runs.values() for c in curves for _, y in c)
    marks = ticks(lowest, 1.0, 8)
    style = (
        "text{font:11px sans-serif;fill:#777} .t{font-weight:600} polyline{fill:none;stroke-width:1.6} "
        ".ref{stroke:#9a9a9a;stroke-dasharray:4 3} .run{stroke:#2f74c0;stroke-opacity:.75} line{stroke:#9a9a9a;stroke-opacity:.4}"
    )
    panels = [
        _panel(ALGORITHMS[name][0], curves, reference, marks, (i % COLUMNS) * WIDTH, (i // COLUMNS) * HEIGHT)
        for i, (name, curves) in enumerate(runs.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDTH} {rows * HEIGHT}" role="img" '
        f'aria-label="Held-out accuracy by step, for each algorithm and seed"><style>{style}</style>'
        + "".join(panels)
        + "</svg>\n"
    )


def mean(curves: Sequence[Curve]) -> Curve:
    return [(points[0][0], statistics.mean(y for _, y in points)) for points in zip(*curves)]


def _panel(title: str, curves: Sequence[Curve], reference: Curve, marks: list[float], dx: int, dy: int) -> str:
    def line(points: Curve, kind: str) -> str:
        place = " ".join(f"{_x(x):.1f},{_y(y, marks):.1f}" for x, y in points)
        return f'<polyline class="{kind}" points="{place}"/>'

    parts = [f'<text class="t" x="{LEFT}" y="15">{escape(title)}</text>']
    for value in marks:
        y = _y(value, marks)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if value in marks[-1::-2]:
            label = tick_label(value, marks[1] - marks[0])
            parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step in (0, STEPS // 2, STEPS):
        parts.append(f'<text x="{_x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step}</text>')
    parts += [line(reference, "ref"), *(line(c, "run") for c in curves)]
    return f'<g transform="translate({dx} {dy})">{"".join(parts)}</g>'


def _x(step: float) -> float:
    return LEFT + step / STEPS * (WIDTH - LEFT - RIGHT)


def _y(value: float, marks: list[float]) -> float:
    return TOP + (marks[-1] - value) / (marks[-1] - marks[0]) * (HEIGHT - TOP - BOTTOM)


def table(runs: dict[str, list[Curve]]) -> str:
    """Held-out accuracy by step: mean over seeds, and the spread of the last."""
    steps = list(range(0, STEPS + 1, EVERY))
    lines = [
        f"| algorithm | {' | '.join(f'step {s}' for s in steps)} | seeds at step {STEPS} | set beside the script |",
        f"|---|{'---|' * (len(steps) + 2)}",
    ]
    for name, curves in runs.items():
        values = " | ".join(f"{y:.3f}" for _, y in mean(curves))
        last = ", ".join(f"{c[-1][1]:.3f}" for c in curves)
        settings = " ".join(f"`{word}`" for word in ALGORITHMS[name][1]) or "nothing"
        lines.append(f"| {ALGORITHMS[name][0]} | {values} | {last} | {settings} |")
    return "\n".join(lines)


def write_report(out: Path) -> None:
    """Put table and picture into docs/results.md, between its markers; the words around them are written by hand."""
    runs = collect(out)
    if not runs:
        sys.exit(f"{out} holds no whole runs")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture(runs))
    begin, end = "<!-- figures -->\n", "<!-- end of figures -->"
    text = PAGE.read_text()
    head, _, rest = text.partition(begin)
    PAGE.write_text(f"{head}{begin}\n{table(runs)}\n\n{end}{rest.partition(end)[2]}")
    record = {name: [[list(p) for p in c] for c in curves] for name, curves in runs.items()}
    (ROOT / "benchmarks" / "results" / "algorithms_tiny.json").write_text(json.dumps(record) + "\n")
    print(f"{PAGE}, {PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), help="these algorithms (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--out", type=Path, default=OUT, help="where the runs go (default: outputs/algorithms)")
    parser.add_argument("--report", action="store_true", help="write the page from the runs that there are")
    args = parser.parse_args()
    if not args.report:
        # Seed by seed, so that an interrupted set is whole for some seeds.
        for seed in args.seeds:
            for name in args.only or ALGORITHMS:
                train(name, seed, args.out)
                print(
                    f"{name} {seed}: {' '.join(f'{y:.3f}' for _, y in curve(args.out / f'{name}-{seed}'))}", flush=True
                )
    write_report(args.out)


if __name__ == "__main__":
    main()
