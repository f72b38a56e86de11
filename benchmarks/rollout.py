"""How fast an engine generates.

Without a model: shapes with random weights, the native engine against transformers' padded `generate` in one run, with
equal and uneven response lengths.

    python benchmarks/rollout.py                                # 20M and 135M, 16 and 64 prompts, float32 and bfloat16
    python benchmarks/rollout.py --shape 20m --prompts 64 --dtype float32
    python benchmarks/rollout.py --smoke                        # seconds; for CI

With a model and GSM8K's test questions (a folder with test.jsonl): tokens/s, ms a decode step, and how many answers' last
number is right.

    python benchmarks/rollout.py --model Qwen2.5-0.5B-Instruct --gsm8k data/gsm8k --device cuda --temperature 0 1
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, Qwen2Config

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Request, RolloutEngine, SamplingParams
from verl.core.rollout_engine.engine import NativeEngine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LLAMA = {"num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True}
SHAPES = {
    "tiny": Qwen2Config(
        vocab_size=40, hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "20m": LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=10, num_attention_heads=6, **LLAMA
    ),
    "135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, **LLAMA
    ),
    "7b": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
    ),
}  # fmt: skip
QUESTION = '{} Let\'s think step by step and output the final answer after "####".'


@dataclass
class Measurement:
    """One engine on one load. seconds: the best of the repeats; tokens: generated ones that a user gets."""

    engine: str
    load: str
    seconds: float
    tokens: int
    prefill_seconds: float | None = None
    ms_per_step: float | None = None
    accuracy: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = list(run_gsm8k(args) if args.gsm8k else run_shapes(args))
    print(machine(args))
    print_table(results)
    if args.json:
        rows = [asdict(r) | {"tokens_per_second": r.tokens_per_second} for r in results]
        Path(args.json).write_text(json.dumps({"machine": machine(args), "results": rows}, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=("native", "transformers", "vllm"), default=None)
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=["20m", "135m"])
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=None)
    parser.add_argument("--prompts", nargs="+", type=int, default=None, help="prompts a call (GSM8K: all questions)")
    parser.add_argument("--n", type=int, default=1, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="length of random prompts")
    parser.add_argument("--max-tokens", type=int, default=None, help="longest response (64; GSM8K: 512)")
    parser.add_argument("--temperature", nargs="+", type=float, default=[1.0])
    parser.add_argument("--model", help="Hugging Face folder or id")
    parser.add_argument("--gsm8k", help="folder with test.jsonl")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-num-seqs", type=int, default=2048)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=2, help="timed calls after a warm-up; the best counts")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: does it run?")
    args = parser.parse_args()
    args.dtype = args.dtype or (["bfloat16"] if args.device.startswith("cuda") else ["float32", "bfloat16"])
    args.engine = args.engine or (["native"] if args.gsm8k else ["native", "transformers"])
    args.prompts = args.prompts or ([100_000] if args.gsm8k else [16, 64])
    args.max_tokens = args.max_tokens or (512 if args.gsm8k else 64)
    if args.smoke:
        args.shape, args.prompts, args.max_tokens, args.dtype, args.repeats = ["tiny"], [4], 8, ["float32"], 1
    return args


# --- random shapes ----------------------------------------------------------------------------------------------------


def run_shapes(args: argparse.Namespace) -> Iterator[Measurement]:
    for shape in args.shape:
        for dtype in args.dtype:
            with torch.device(args.device):
                model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=DTYPES[dtype]).eval()
            engine = build_engine("native", args, model, DTYPES[dtype]) if "native" in args.engine else None
            for prompts in args.prompts:
                for kind in ("equal", "uneven"):
                    requests = random_requests(args, SHAPES[shape].vocab_size, prompts, kind)
                    load = f"{shape} {dtype} {prompts} x {args.n} {kind}"
                    if engine is not None:
                        yield measure_engine("native", engine, load, requests, args)
                    if "transformers" in args.engine:
                        yield measure_transformers(model, load, requests, args)


def random_requests(args: argparse.Namespace, vocab: int, prompts: int, kind: str) -> list[Request]:
    """equal: all responses have max_tokens. uneven: evenly spread from an eighth of it to all, prompts likewise."""
    generator = torch.Generator().manual_seed(prompts)
    requests = []
    for i in range(prompts):
        share = 1.0 if kind == "equal" else 0.125 + 0.875 * float(torch.rand((), generator=generator))
        if i == 0:
            share = 1.0
        length = max(1, round(args.prompt_tokens * share))
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        sampling = SamplingParams(
            max_tokens=max(1, round(args.max_tokens * share)),
            n=args.n,
            temperature=args.temperature[0],
            ignore_eos=True,
        )
        requests.append(Request(ids, sampling, i))
    return requests


def measure_transformers(
    model: PreTrainedModel, load: str, requests: list[Request], args: argparse.Namespace
) -> Measurement:
    """transformers' own `generate` on the prompts padded to the left; it goes on until the longest response is whole."""
    rows = [r for r in requests for _ in range(r.sampling.n)]
    width = max(len(r.prompt_ids) for r in rows)
    ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + r.prompt_ids for r in rows], device=args.device)
    mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in rows], device=args.device)
    longest = max(r.sampling.max_tokens for r in rows)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    temperature = rows[0].sampling.temperature

    def run() -> None:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        model.generate(ids, attention_mask=mask, max_new_tokens=longest, **sampling)

    seconds = best_time(run, args)
    return Measurement("transformers", load, seconds, sum(r.sampling.max_tokens for r in rows))


# --- engines ----------------------------------------------------------------------------------------------------------


def build_engine(name: str, args: argparse.Namespace, model: PreTrainedModel, dtype: torch.dtype) -> RolloutEngine:
    config = RolloutConfig(max_num_seqs=args.max_num_seqs, gpu_memory_utilization=args.gpu_memory_utilization)
    if name == "native":
        weights = {n: p.detach() for n, p in model.named_parameters()}
        return NativeEngine(model.config, device=args.device, dtype=dtype, config=config, weights=weights)
    if name == "vllm":
        from verl.core.rollout_engine.vllm_engine import VLLMEngine

        return VLLMEngine(
            args.model, device=args.device, dtype=dtype, config=config, max_model_len=1024 + args.max_tokens
        )
    from verl.core.rollout_engine.hf_engine import HFEngine

    return HFEngine(model, config=config)


def measure_engine(
    name: str, engine: RolloutEngine, load: str, requests: list[Request], args: argparse.Namespace
) -> Measurement:
    seconds = best_time(lambda: engine.generate(requests), args)
    stats = engine.stats
    return Measurement(
        name,
        load,
        seconds,
        stats.response_tokens,
        prefill_seconds=stats.prefill_seconds,
        ms_per_step=1000 * stats.decode_seconds / max(1, stats.decode_steps),
    )


def best_time(run: Callable[[], Any], args: argparse.Namespace) -> float:
    """Seconds of the fastest of `repeats` calls after one that warms up.

    On one CPU thread, seconds of that thread's work, which other processes on the machine do not stretch.
    """
    clock = time.process_time if uses_cpu_seconds(args) else time.perf_counter
    seconds = []
    for _ in range(args.repeats + 1):
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        began = clock()
        run()
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return min(seconds[1:])


def uses_cpu_seconds(args: argparse.Namespace) -> bool:
    return args.device == "cpu" and torch.get_num_threads() == 1


# --- a real model on GSM8K --------------------------------------------------------------------------------------------


def run_gsm8k(args: argparse.Namespace) -> Iterator[Measurement]:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = (Path(args.gsm8k) / "test.jsonl").read_text().splitlines()[: args.prompts[0]]
    rows = [json.loads(line) for line in lines]
    dtype = DTYPES[args.dtype[0]]
    model = None
    if set(args.engine) != {"vllm"}:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    config = AutoConfig.from_pretrained(args.model)
    stop = stop_tokens(tokenizer, args.model, config)
    prompts = [chat_prompt(tokenizer, QUESTION.format(row["question"])) for row in rows]
    for name in args.engine:
        engine = build_engine(name, args, model, dtype)
        for temperature in args.temperature:
            sampling = SamplingParams(args.max_tokens, n=args.n, temperature=temperature, stop_token_ids=stop)
            requests = [Request(ids, sampling, i) for i, ids in enumerate(prompts)]
            load = f"GSM8K {len(rows)} x {args.n} temperature {temperature:g}"
            measured = measure_engine(name, engine, load, requests, args)
            answers = engine.generate(requests)
            right = [
                last_number(tokenizer.decode(c.token_ids, skip_special_tokens=True)) == truth(row)
                for row, completions in zip(rows, answers)
                for c in completions
            ]
            measured.accuracy = sum(right) / len(right)
            yield measured
        engine.close()


def chat_prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def stop_tokens(tokenizer: Any, path: str, config: Any) -> tuple[int, ...]:
    """The tokenizer's end token and those of the model's generation config."""
    from transformers import GenerationConfig

    try:
        more = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        more = config.eos_token_id
    more = more if isinstance(more, list) else [more]
    return tuple(sorted({tokenizer.eos_token_id, *more} - {None}))


def truth(row: dict) -> str:
    return row["answer"].split("####")[1].strip().replace(",", "")


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "").removesuffix(".00").removesuffix(".0") if numbers else None


# --- output -----------------------------------------------------------------------------------------------------------


def machine(args: argparse.Namespace) -> str:
    if args.device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(args.device)}, torch {torch.__version__}"
    clock = ", seconds of CPU time" if uses_cpu_seconds(args) else ""
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}{clock}"


def print_table(results: list[Measurement]) -> None:
    """One line a measurement; ratio: to transformers on the same load."""
    peers = {r.load: r for r in results if r.engine == "transformers"}
    print(
        f"{'load':44} {'engine':13} {'tokens/s':>9} {'seconds':>8} {'prefill':>8} {'ms/step':>8} {'right':>7} {'ratio':>6}"
    )
    for r in results:
        peer = peers.get(r.load)
        ratio = f"{r.tokens_per_second / peer.tokens_per_second:.2f}" if peer and peer is not r else ""
        prefill = "" if r.prefill_seconds is None else f"{r.prefill_seconds:.3f}"
        step = "" if r.ms_per_step is None else f"{r.ms_per_step:.2f}"
        right = "" if r.accuracy is None else f"{r.accuracy:.2%}"
        print(
            f"{r.load:44} {r.engine:13} {r.tokens_per_second:9.0f} {r.seconds:8.3f} {prefill:>8} {step:>8} {right:>7} {ratio:>6}"
        )


if __name__ == "__main__":
    main()
