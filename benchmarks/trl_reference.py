"""The same steps in TRL's GRPOTrainer, timed; grpo_step.py starts it with TRL's own Python, so nothing of this project is
imported here.

    TRL_PYTHON benchmarks/trl_reference.py TASK.json RESULT.json

A step is one generation and all updates on it. TRL has no public clock of its phases, so `gen` and the rest of what comes
before the update are taken by a subclass around the methods that do them.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time

import pyarrow.parquet as pq
import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """Adds the seconds of generation, and of generation with scoring and reference, to `phases`."""

    phases: dict[str, float]

    def _generate(self, *args, **kwargs):
        started = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self._add("gen", started)
        return result

    def _generate_and_score_completions(self, *args, **kwargs):
        started = time.perf_counter()
        result = super()._generate_and_score_completions(*args, **kwargs)
        self._add("before_update", started)
        return result

    def _add(self, name: str, started: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started


class Clock(TrainerCallback):
    """Takes the time whenever `updates` optimizer updates are done."""

    def __init__(self, phases: dict[str, float], updates: int):
        self.phases, self.updates = phases, updates
        self.steps: list[dict[str, float]] = []
        self.started = self.processor = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._restart()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.updates:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        before = self.phases.pop("before_update")
        gen = self.phases.pop("gen")
        phases = {"gen": gen, "score_and_log_probs": before - gen, "update_actor": seconds - before}
        self.steps.append({"step": seconds, "processor": time.process_time() - self.processor, **phases})
        self._restart()

    def _restart(self) -> None:
        self.started, self.processor = time.perf_counter(), time.process_time()


def load_rows(path: str) -> Dataset:
    rows = pq.read_table(path).to_pylist()
    return Dataset.from_list([{"prompt": r["prompt"], "answer": r["reward_model"]["ground_truth"]} for r in rows])


def reward_function(path: str, name: str):
    spec = importlib.util.spec_from_file_location("step_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, name)

    def reward(completions, answer, **_):
        return [score("", completion[0]["content"], truth) for completion, truth in zip(completions, answer)]

    return reward


def main(task_file: str, result_file: str) -> None:
    with open(task_file, encoding="utf-8") as f:
        task = json.load(f)
    settings = dict(task["trl"])
    updates = settings.pop("updates_per_step")
    config = GRPOConfig(
        output_dir=task["output"],
        max_steps=task["steps"] * updates,
        save_strategy="no",
        report_to=[],
        logging_steps=1000,
        **settings,
    )
    phases: dict[str, float] = {}
    clock = Clock(phases, updates)
    TimedTrainer.phases = phases
    trainer = TimedTrainer(
        model=task["model"],
        reward_funcs=reward_function(task["reward_file"], task["reward_name"]),
        args=config,
        train_dataset=load_rows(task["train_file"]),
        callbacks=[clock],
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = {"steps": clock.steps, "peak_rss_gb": peak, "version": f"TRL {trl.__version__}, torch {torch.__version__}"}
    if torch.cuda.is_available():
        result["peak_gpu_gb"] = torch.cuda.max_memory_reserved() / 2**30
    with open(result_file, "w", encoding="utf-8") as f:
        json.dump(result, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
