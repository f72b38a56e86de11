"""Training steps of this trainer, timed; grpo_step.py starts it with a task file and reads the result file that it writes.

python benchmarks/step_ours.py TASK.json RESULT.json
"""

from __future__ import annotations

import json
import resource
import sys
import time

import psutil


def cpu_seconds() -> float:
    """Processor time of this process and of its reward workers so far."""
    process = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


def main(task_file: str, result_file: str) -> None:
    with open(task_file, encoding="utf-8") as f:
        task = json.load(f)

    from verl.config.compose import compose
    from verl.config.validate import validate

    config = compose(task["overrides"])
    notices = validate(config)

    from verl.trainer.pipelines.sync import train_step
    from verl.trainer.run import prepare
    from verl.trainer.steplog import StepLog

    run = prepare(config, notices)
    run.roles.sync_weights(version=0)
    began = time.time() - psutil.Process().create_time()
    steps = []
    for _ in range(task["steps"]):
        log, processor, started = StepLog(), cpu_seconds(), time.perf_counter()
        batch = train_step(run, log)
        phases = {name.removeprefix("timing/"): s for name, s in log.metrics.items() if name.startswith("timing/")}
        step = {"step": time.perf_counter() - started, "processor": cpu_seconds() - processor, **phases}
        step["response_tokens"] = int(batch["response_ids"].lengths.sum())
        if "actor/mfu" in log.metrics:
            step["mfu"] = log.metrics["actor/mfu"]
        steps.append(step)
        run.step += 1
    result = {"steps": steps, "ready_seconds": began, "peak_rss_gb": peak_rss_gb(), **gpu_memory()}
    run.close("finished")
    with open(result_file, "w", encoding="utf-8") as f:
        json.dump(result, f)


def peak_rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)


def gpu_memory() -> dict[str, float]:
    import torch

    return {"peak_gpu_gb": torch.cuda.max_memory_reserved() / 2**30} if torch.cuda.is_available() else {}


if __name__ == "__main__":
    main(*sys.argv[1:])
