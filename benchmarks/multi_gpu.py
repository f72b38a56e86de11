"""Two GPUs in one go: steps on one and on two, weights to the rollout engines, generation on a GPU of its own, vLLM over both.

    python benchmarks/multi_gpu.py --model MODEL --data GSM8K --out OUT              everything
    python benchmarks/multi_gpu.py w1 sync --model MODEL --data GSM8K --out OUT      a part of it
    python benchmarks/multi_gpu.py --smoke                                           anywhere: CPU processes, tiny models

    w1           GSM8K, 256 prompts x 5, 512 + 512 tokens, four updates: seconds a step on one GPU and on all
    sync         weights of a 0.5B and a 7B shape into rollout engines, on the same GPUs and on one of its own, against the
                 link's bandwidth, measured in the same process
    split        w1 with one GPU that trains and one that generates
    fully_async  the same, neither waiting for the other
    vllm_tp2     w1 with vLLM, one engine over two GPUs
    ulysses      w1 with two GPUs that share the tokens of each micro-batch (only where it is named)

Each case is a process of its own with a time limit; one that fails or runs out of time is reported, and the next one starts.
OUT gets multi_gpu.jsonl, a line for each case as soon as it ends, and each case's log and metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from step_workloads import Workload, cpu_workload, gpu_workload

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "4",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # A virtual machine may grow its memory as it is used; Ray would take what it has at first for all.
    "RAY_memory_monitor_refresh_ms": "0",
    # NVLink multicast stays off: on a host that others share, a fault in it takes their GPUs down too.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
PHASES = ("gen", "reward", "ref", "old_log_prob", "adv", "update_actor", "update_weights")


@dataclass
class Bench:
    """What the cases share. ends: time.monotonic() after which none begins."""

    arguments: argparse.Namespace
    folder: Path
    out: Path
    ends: float
    records: list[dict] = field(default_factory=list)
    work: Workload | None = None

    def case(self, group: str, name: str, command: list[str], read: Callable[[str], dict]) -> dict:
        """Run one case and write down what `read` makes of its output."""
        label = f"{group}: {name}"
        log = self.out / f"{label.replace(': ', '-').replace(' ', '_')}.log"
        left = self.ends - time.monotonic()
        record: dict = {"group": group, "case": name}
        if left < 5:
            record |= {"status": "not begun: --total is used up"}
        else:
            print(f"{label} ...", flush=True)
            status, seconds = run(command, log, min(self.arguments.limit, left))
            record |= {"status": status, "wall_seconds": round(seconds, 1)}
            try:
                record |= read(log.read_text(errors="replace"))
            except Exception as error:  # whatever a case left behind, the next one runs
                record |= {"unread": f"{type(error).__name__}: {error}"}
            if status != "done":
                print(f"{label}: {status}; the end of {log}:\n{log.read_text(errors='replace')[-1500:]}", flush=True)
        self.records.append(record)
        with (self.out / "multi_gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record


def run(command: list[str], log: Path, limit: float) -> tuple[str, float]:
    """(status, seconds) of a command that gets `limit` seconds; every process that it started ends with it."""
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT | os.environ, start_new_session=True
        )
        started: dict[int, psutil.Process] = {}
        while process.poll() is None and time.monotonic() - began < limit:
            time.sleep(0.5)
            started |= _descendants(process.pid)
        ended = process.poll()
        for child in [*started.values(), process] if ended is None else started.values():
            try:
                child.kill()  # psutil knows a process that has taken over the number of another
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        process.wait()
    seconds = time.monotonic() - began
    if ended is None:
        return f"out of time after {limit:.0f} s", seconds
    return ("done" if ended == 0 else f"failed with status {ended}"), seconds


def _descendants(pid: int) -> dict[int, psutil.Process]:
    try:
        return {child.pid: child for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}


# ---- steps --------------------------------------------------------------------------------------------------------


def steps_case(bench: Bench, group: str, name: str, words: list[str]) -> dict:
    """A few steps of the trainer with these further overrides; medians leave the first step out, which compiles."""
    arguments = bench.arguments
    out = bench.folder / f"{group}-{name}".replace(" ", "_")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *bench.work.our_overrides(out), *words]
    command += [f"trainer.total_training_steps={arguments.steps}", "trainer.logger=[]", *arguments.override]

    def read(_: str) -> dict:
        text = (out / "metrics.jsonl").read_text()
        (bench.out / f"{group}-{name}.metrics.jsonl".replace(" ", "_")).write_text(text)
        lines = [line for line in map(json.loads, text.splitlines()) if "timing/step" in line]
        counted = lines[1:] or lines

        def middle(key: str) -> float | None:
            values = [line[key] for line in counted if key in line]
            return round(statistics.median(values), 4) if values else None

        seconds = {"step": middle("timing/step")} | {phase: middle(f"timing/{phase}") for phase in PHASES}
        further = {"response_length": "response_length/mean", "mfu": "perf/mfu/actor", "score": "critic/score/mean"}
        further |= {"received_gb": "perf/weights_received_gb", "peak_extra_gb": "perf/weights_peak_extra_gb"}
        further |= {"tokens_per_second": "perf/throughput", "staleness": "training/staleness_mean"}
        further |= {"max_memory_gb": "perf/max_memory_reserved_gb", "probs_diff": "training/rollout_probs_diff_mean"}
        found = {label: middle(key) for label, key in further.items()}
        return {
            "steps": len(lines),
            "seconds": {k: v for k, v in seconds.items() if v is not None},
            "first_step": round(lines[0]["timing/step"], 2) if lines else None,
            **{k: v for k, v in found.items() if v is not None},
        }

    return bench.case(group, name, command, read)


def steps_table(records: list[dict], base: dict | None) -> None:
    """Seconds a step by phase; where the base is known, how many times as fast, and that divided by the devices."""
    print(f"\n{'':28} {'step':>8} " + " ".join(f"{phase:>14}" for phase in PHASES) + "  tokens  speed-up  efficiency")
    for record in records:
        seconds = record.get("seconds", {})
        if not seconds.get("step"):
            print(f"{record['group'] + ': ' + record['case']:28} {record['status']}")
            continue
        cells = [f"{seconds['step']:8.2f}"]
        cells += [f"{seconds[p]:14.3f}" if p in seconds else f"{'-':>14}" for p in PHASES]
        cells.append(f"{record.get('response_length', 0):7.0f}")
        if base and base.get("seconds", {}).get("step"):
            faster = base["seconds"]["step"] / seconds["step"]
            cells.append(f"{faster:9.2f} {faster / record['devices']:11.2f}")
        note = "" if record["status"] == "done" else f"  ({record['status']}, {record['steps']} steps)"
        print(f"{record['group'] + ': ' + record['case']:28} {' '.join(cells)}{note}")


def w1(bench: Bench) -> None:
    gpus = bench.arguments.gpus
    for number in dict.fromkeys((1, gpus)):
        steps_case(bench, "w1", _gpus(number), [f"trainer.n_gpus_per_node={number}"])["devices"] = number
    _print_steps(bench, "w1")


APART = [
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
]


def split(bench: Bench) -> None:
    steps_case(bench, "split", "1 trains 1 generates", APART)["devices"] = 2
    _print_steps(bench, "split")


def fully_async(bench: Bench) -> None:
    words = [*APART, "trainer.pipeline=fully_async", "async_training.staleness_threshold=1"]
    steps_case(bench, "fully_async", "1 trains 1 generates", words)["devices"] = 2
    _print_steps(bench, "fully_async")


def vllm_tp2(bench: Bench) -> None:
    rollout = "actor_rollout_ref.rollout"
    words = ["trainer.n_gpus_per_node=2", f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=2"]
    words += [f"{rollout}.gpu_memory_utilization={0.1 if bench.arguments.device == 'cpu' else 0.5}"]
    steps_case(bench, "vllm_tp2", "vLLM over 2", words)["devices"] = 2
    _print_steps(bench, "vllm_tp2")


def ulysses(bench: Bench) -> None:
    words = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"]
    steps_case(bench, "ulysses", "2 share tokens", words)["devices"] = 2
    _print_steps(bench, "ulysses")


def _print_steps(bench: Bench, group: str) -> None:
    base = next((r for r in bench.records if r["group"] == "w1" and r.get("devices") == 1), None)
    steps_table([r for r in bench.records if r["group"] == group], base)


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number > 1)}"


# ---- weights ------------------------------------------------------------------------------------------------------


def sync(bench: Bench) -> None:
    arguments = bench.arguments
    for shape in ("tiny",) if arguments.smoke else arguments.shape:
        for way in ("shared", "separate"):
            command = [sys.executable, str(HERE / "multi_gpu_sync.py"), shape, way, "--device", arguments.device]
            command += ["--ranks", str(arguments.gpus), "--bucket", str(arguments.bucket)]
            bench.case("sync", f"{shape} {way}", command, _last_json)
    print(f"\n{'':28} {'seconds':>8} {'GB moved':>9} {'link GB/s':>10} {'least s':>8} {'ratio':>6} {'extra GB':>9}")
    for record in (r for r in bench.records if r["group"] == "sync"):
        label = "sync: " + record["case"]
        if "seconds" not in record:
            print(f"{label:28} {record['status']}")
            continue
        figures = (record["seconds"], record["received_gb"], record["link_gb_per_second"], record["least_seconds"])
        cells = "{:8.4f} {:9.3f} {:10.1f} {:8.4f}".format(*figures)
        print(f"{label:28} {cells} {figures[0] / figures[3]:6.2f} {record['peak_extra_gb']:9.3f}")


def _last_json(text: str) -> dict:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


# ---- all ----------------------------------------------------------------------------------------------------------

GROUPS = {
    "w1": w1, "sync": sync, "split": split, "fully_async": fully_async, "vllm_tp2": vllm_tp2, "ulysses": ulysses,
}  # fmt: skip
BY_DEFAULT = [name for name in GROUPS if name != "ulysses"]


def workload(arguments: argparse.Namespace, folder: Path) -> Workload:
    """W1, or sums for a tiny model with --smoke or on a CPU; no checkpoint is written."""
    actor = "actor_rollout_ref.actor"
    if arguments.smoke:
        work = cpu_workload(folder, smoke=False)
        work.prompts, work.samples, work.mini_batch = 4, 2, 2
    else:
        work = gpu_workload(folder, arguments.model, arguments.data)
        work.device = arguments.device
    work.overrides += [f"{actor}.checkpoint.save_contents=[extra]"]
    return work


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], metavar="CASES", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="a folder with GSM8K's train.jsonl and test.jsonl, or train.parquet")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=4, help="of each run, the first not counted (default: %(default)s)"
    )
    parser.add_argument("--shape", nargs="+", default=["0.5b", "7b"], choices=("tiny", "0.5b", "7b"))
    parser.add_argument("--bucket", type=int, default=2048, help="megabytes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one case (default: %(default)s)")
    parser.add_argument("--total", type=float, default=3600, help="seconds for all of them (default: %(default)s)")
    parser.add_argument("--out", default=os.environ.get("OUT", "multi_gpu_out"), help="folder (default: $OUT)")
    parser.add_argument("--override", nargs="*", default=[], help="further options of verl.trainer.main_ppo")
    parser.add_argument("--smoke", action="store_true", help="CPU processes, tiny models, two steps")
    arguments = parser.parse_args(argv)
    arguments.groups = arguments.groups or list(BY_DEFAULT)
    if arguments.smoke:
        arguments.device, arguments.steps, arguments.bucket = "cpu", 2, 8
    elif set(arguments.groups) != {"sync"} and not (arguments.model and arguments.data):
        parser.error("all but sync need --model and --data")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """0 if every case was done."""
    arguments = parse_arguments(argv)
    out = Path(arguments.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(arguments, Path(folder), out, time.monotonic() + arguments.total)
        if set(arguments.groups) != {"sync"}:
            bench.work = workload(arguments, bench.folder)
        for group in arguments.groups:
            GROUPS[group](bench)
    return int(any(record["status"] != "done" for record in bench.records))


if __name__ == "__main__":
    sys.exit(main())
