"""Everything that the native engine has to show on a GPU, in one go: kernels against plain torch, start-up, ms a decode step
by rows, GSM8K.

    python benchmarks/gpu_check.py --model Qwen2.5-0.5B-Instruct --gsm8k data/gsm8k
    python benchmarks/gpu_check.py --shape 7b        # random weights; no GSM8K
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from rollout import SHAPES  # the script beside this one
from transformers import AutoConfig, AutoModelForCausalLM

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.engine import NativeEngine

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="135m", help="random weights, without --model")
    parser.add_argument("--gsm8k", help="folder with test.jsonl")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 512, 1024, 1319])
    parser.add_argument("--skip-tests", action="store_true")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not args.skip_tests:
        tests = HERE.parent / "tests" / "core" / "rollout_engine"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(tests)]
        print(
            "kernel tests:", "passed" if subprocess.run(command, check=False).returncode == 0 else "FAILED", flush=True
        )
    engine = start(args)
    step_times(engine, args.rows)
    engine.close()
    del engine
    if args.model and args.gsm8k:
        command = [sys.executable, str(HERE / "rollout.py"), "--model", args.model, "--gsm8k", args.gsm8k]
        subprocess.run([*command, "--device", "cuda", "--temperature", "0", "1", "--repeats", "2"], check=True)


def start(args: argparse.Namespace) -> NativeEngine:
    """The engine, and how long it takes from nothing to its first tokens."""
    if args.model:
        config = AutoConfig.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda()
    else:
        config = SHAPES[args.shape]
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    began = time.perf_counter()
    rollout = RolloutConfig(max_num_seqs=2048, gpu_memory_utilization=0.8)
    engine = NativeEngine(config, device="cuda", config=rollout)
    engine.load_weights(model.named_parameters(), version=0)
    torch.cuda.synchronize()
    built = time.perf_counter()
    engine.generate([Request([5] * 100, SamplingParams(8, ignore_eos=True, n=16))])
    first = time.perf_counter()
    began_load = time.perf_counter()
    engine.load_weights(model.named_parameters(), version=1)
    torch.cuda.synchronize()
    print(
        f"engine built in {built - began:.2f} s, first tokens after {first - built:.2f} s more, weights updated in "
        f"{1000 * (time.perf_counter() - began_load):.1f} ms"
    )
    return engine


def step_times(engine: NativeEngine, rows: list[int], prompt_tokens: int = 300, steps: int = 128) -> None:
    """ms a decode step with all rows near position 300, at temperature 1, and with top_p."""
    vocab = engine.spec.vocab_size
    print(
        f"{'rows':>6} {'ms/step':>8} {'top_p':>8} {'tokens/s':>9} {'prefill s':>9} {'prompt tokens/s':>16} {'capture s':>9}"
    )
    for count in rows:
        prompts = torch.randint(0, vocab, (count, prompt_tokens)).tolist()
        figures = {}
        for top_p in (1.0, 0.9):
            sampling = SamplingParams(steps, top_p=top_p, ignore_eos=True)
            requests = [Request(ids, sampling, i) for i, ids in enumerate(prompts)]
            engine.generate(requests)
            captured = engine.stats.extra["graph_capture_seconds"]
            engine.generate(requests)
            figures[top_p] = engine.stats
        stats, cut = figures[1.0], figures[0.9]
        step, cut_step = stats.decode_seconds / stats.decode_steps, cut.decode_seconds / cut.decode_steps
        print(
            f"{count:6} {1000 * step:8.2f} {1000 * cut_step:8.2f} {count / step:9.0f} {stats.prefill_seconds:9.3f} "
            f"{stats.prompt_tokens / stats.prefill_seconds:16.0f} {captured:9.2f}",
            flush=True,
        )
    free, total = torch.cuda.mem_get_info()
    print(f"GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak, {free / total:.0%} free now")


if __name__ == "__main__":
    main()
