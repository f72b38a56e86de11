"""Time what overlap brings: the three pipelines on the same work, with a slow reward and responses of uneven length.

    python3 benchmarks/overlap.py --svg docs/img/overlap.svg      8 prompts x 4 samples a step, 0.5 s a reward, 16 workers
    python3 benchmarks/overlap.py --smoke                         a few steps, to see that it runs

A random model of bytes answers; one token in 24 ends a response, so that most are short and a few reach the limit. The
learning rate is next to 0, so that all three pipelines draw from the same policy, and work alike. fully_async may be two
batches ahead. The first two steps, in which the pipelines fill, are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

REWARD = """
import time

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    return float(len(solution_str) % 2)
"""
PIPELINES = ("sync", "one_step_off", "fully_async")
LEFT_OUT = 2  # steps in which generation and training come up
Span = tuple[str, float, float]


@dataclass(frozen=True)
class Work:
    steps: int = 12
    prompts: int = 8
    samples: int = 4
    most_tokens: int = 160
    reward_seconds: float = 0.5
    workers: int = 16
    staleness: float = 2.0  # of fully_async
    hidden: int = 96
    layers: int = 4

    def words(self) -> str:
        return (
            f"{self.prompts} prompts x {self.samples} samples a step, at most {self.most_tokens} tokens, "
            f"{self.reward_seconds} s a reward, {self.workers} reward workers, {self.steps - LEFT_OUT} steps; "
            f"fully_async {self.staleness:g} batches ahead"
        )


@dataclass(frozen=True)
class Result:
    """Of one pipeline. lines: metrics of its steps. trainer, generator: what each did when."""

    name: str
    lines: list[dict]
    trainer: list[Span]
    generator: list[Span]

    def mean(self, metric: str) -> float:
        return statistics.fmean(line[metric] for line in self.lines[LEFT_OUT:])


def make_files(folder: Path, work: Work) -> None:
    """Model, prompts and reward."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from examples.tiny.make_model import byte_tokenizer, tiny_qwen2
    from transformers import GenerationConfig

    tokenizer = byte_tokenizer()
    tiny_qwen2(tokenizer, hidden=work.hidden, layers=work.layers, max_length=4096).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # So many of the 259 tokens that one in about 24 ends a response.
    GenerationConfig(eos_token_id=list(range(1, 12))).save_pretrained(folder / "model")
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i}?"}], "data_source": "overlap", "reward_model": {}}
        for i in range(4 * work.prompts)
    ]
    pq.write_table(
        pa.Table.from_pylist([{**r, "reward_model": {"ground_truth": "x"}} for r in rows]), folder / "a.parquet"
    )
    (folder / "reward.py").write_text(REWARD.format(seconds=work.reward_seconds))


def overrides(folder: Path, work: Work, pipeline: str) -> list[str]:
    return [
        f"trainer.pipeline={pipeline}",
        *([f"async_training.staleness_threshold={work.staleness}"] if pipeline == "fully_async" else []),
        f"data.train_files={folder}/a.parquet",
        "data.val_files=null",
        f"data.train_batch_size={work.prompts}",
        "data.max_prompt_length=32",
        f"data.max_response_length={work.most_tokens}",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.optim.lr=1e-12",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
        f"actor_rollout_ref.rollout.n={work.samples}",
        f"custom_reward_function.path={folder}/reward.py",
        "custom_reward_function.name=score",
        f"reward.num_workers={work.workers}",
        f"trainer.total_training_steps={work.steps}",
        f"trainer.default_local_dir={folder}/{pipeline}",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
    ]


def measure(folder: Path, work: Work, pipeline: str) -> Result:
    from verl.config.compose import compose
    from verl.config.validate import validate
    from verl.tracking.files import METRICS, read_lines
    from verl.trainer.pipelines import train
    from verl.trainer.run import prepare

    config = compose(overrides(folder, work, pipeline), notify=lambda text: None)
    run = prepare(config, validate(config))
    run.spans = []
    try:
        train(run)
    finally:
        run.close("finished")
    lines = [line for line in read_lines(folder / pipeline / METRICS) if line["step"] > 0]
    if run.ahead is None:
        generator = [("gen", start, stop) for phase, start, stop in run.spans if phase == "gen"]
    else:
        generator = [("gen", *span) for span in run.ahead.busy.spans]  # type: ignore[attr-defined]
    return Result(pipeline, lines, run.spans, generator)


def table(results: Sequence[Result]) -> str:
    rows = [("pipeline", "s/step", "of sync", "generator idle", "trainer idle", "staleness")]
    for result in results:
        seconds = result.mean("timing/step")
        stale = result.mean("training/staleness_mean") if "training/staleness_mean" in result.lines[-1] else 0.0
        rows.append(
            (
                result.name,
                f"{seconds:.2f}",
                f"{seconds / results[0].mean('timing/step'):.2f}",
                f"{100 * result.mean('perf/idle_share_generator'):.0f} %",
                f"{100 * result.mean('perf/idle_share_trainer'):.0f} %",
                f"{stale:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


WIDTH, LEFT, LANE, GAP, TOP = 900, 130, 22, 26, 34
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; } .page { fill: #fff; } .lane { fill: #eaeef2; }
.gen { fill: #2f81f7; } .train { fill: #2da44e; } .weights { fill: #bc4c00; } .tick { stroke: #d0d7de; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .page { fill: #0d1117; } .lane { fill: #21262d; }
.tick { stroke: #30363d; } }
"""
KINDS = {"update_weights": "weights", "gen": "gen"}
WAITS = ("step", "wait", "pause", "gen", "reward", "testing", "save_checkpoint")


def picture(results: Sequence[Result], seconds: float) -> str:
    """A time line of each pipeline: what generation and training did in `seconds` from the third step on, as SVG."""
    height = TOP + len(results) * (2 * LANE + GAP) + 24
    scale = (WIDTH - LEFT - 20) / seconds
    parts = [f'<rect class="page" width="{WIDTH}" height="{height}"/>']
    for tick in range(int(seconds) + 1):
        x = LEFT + tick * scale
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 22}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{tick} s</text>')
    for number, result in enumerate(results):
        y = TOP + number * (2 * LANE + GAP)
        begin = [span for span in result.trainer if span[0] == "step"][LEFT_OUT][1]
        training = [(KINDS.get(p, "train"), a, b) for p, a, b in result.trainer if p not in WAITS]
        parts.append(f'<text x="8" y="{y - 4}" font-weight="600">{escape(result.name)}</text>')
        for lane, (who, spans) in enumerate((("generation", result.generator), ("training", training))):
            top = y + lane * LANE
            parts.append(f'<text x="20" y="{top + 15}">{who}</text>')
            parts.append(f'<rect class="lane" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 20}" height="{LANE - 3}"/>')
            for kind, start, stop in spans:
                start, stop = max(start - begin, 0.0), min(stop - begin, seconds)
                if stop > start:
                    box = f'x="{LEFT + start * scale:.1f}" y="{top}" width="{max((stop - start) * scale, 0.8):.1f}"'
                    parts.append(f'<rect class="{kind}" {box} height="{LANE - 3}"/>')
    title = "Time line of the three pipelines: blue is generation, green training, orange new weights; grey is waiting"
    parts.append(f'<text x="{LEFT}" y="16">{title}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    return f"{head}<title>{title}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Work.steps)
    parser.add_argument("--svg", type=Path, help="file for the picture")
    parser.add_argument("--smoke", action="store_true", help="little work, to see that it runs")
    args = parser.parse_args()
    work = Work(steps=args.steps)
    if args.smoke:
        work = Work(4, prompts=2, samples=2, most_tokens=24, reward_seconds=0.05, workers=1, hidden=32, layers=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, work)
        results = [measure(folder, work, pipeline) for pipeline in PIPELINES]
    print(f"\n{work.words()}\n\n{table(results)}")
    if args.svg:
        args.svg.write_text(picture(results, 4 * results[0].mean("timing/step")))
        print(f"\nthe picture is {args.svg}")


if __name__ == "__main__":
    main()
