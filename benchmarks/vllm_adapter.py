"""vLLM through the rollout engine against bare vLLM, in one run: tokens a second, start-up, seconds for a weight update.

    python benchmarks/vllm_adapter.py                                    # 135M Llama shape, random weights, 64 x 64 tokens
    python benchmarks/vllm_adapter.py --model FOLDER --gsm8k FOLDER --max-tokens 512      # GSM8K's test questions
    python benchmarks/vllm_adapter.py --smoke                            # a tiny model, seconds: keeps this script alive

Bare vLLM is `LLM.generate` on token ids, without detokenisation, once without log-probs and once with the sampled token's.
Rounds alternate, so that a busy machine is busy for all; the best round of each counts. On a CPU, where all run in this
process, ratios are of tokens per second of this process's CPU time, which a busy machine disturbs least. On a GPU bare vLLM runs as it does
by default, in its own engine process.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine import vllm_setup
from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.vllm_engine import VLLMEngine


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder), args)
        prompts, answers, stops = make_prompts(model, args)
        args.max_model_len = max(map(len, prompts)) + args.max_tokens
        # The bare one first: an engine in this process makes vLLM keep the variables it was started with.
        bare = bare_vllm(model, args)
        started = time.perf_counter()
        engine = make_engine(model, args)
        start_seconds = time.perf_counter() - started
        runs: dict[str, Callable[[int], list[list[int]]]] = {
            "bare vLLM": lambda tokens: run_bare(bare, prompts, stops, args, tokens, log_probs=False),
            "bare vLLM with log-probs": lambda tokens: run_bare(bare, prompts, stops, args, tokens, log_probs=True),
            "rollout engine": lambda tokens: run_engine(engine, prompts, stops, args, tokens),
        }
        result = measure(runs, answers, model, args)
        result["start_seconds"] = round(start_seconds, 2)
        result["load_weights_seconds"] = update_weights(engine, model, args)
        engine.close()
    report(result, args)


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: a 135M Llama shape with random weights")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's test.jsonl; default: random prompts")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 where the device computes it"
    )
    parser.add_argument("--prompts", type=int, help="default: 64, or all of GSM8K's")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of random prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.35, help="of each of the two engines")
    parser.add_argument("--engine-process", action="store_true", help="the rollout engine in a process of its own")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few tokens")
    args = parser.parse_args()
    if args.dtype is None:
        # Without instructions for it, a CPU computes bfloat16 several times slower than float32.
        native = cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        args.dtype = "bfloat16" if native else "float32"
    if args.smoke:
        args.prompts, args.max_tokens, args.rounds, args.max_num_seqs = args.prompts or 4, 8, 1, 8
    return args


def random_model(folder: Path, args: argparse.Namespace) -> str:
    """A Llama with random weights: 135M parameters, or under 1M with --smoke."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    if args.smoke:
        shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=2048, tie_word_embeddings=True))
    model.to(getattr(torch, args.dtype)).save_pretrained(folder)
    return str(folder)


def make_prompts(model: str, args: argparse.Namespace) -> tuple[list[list[int]], list[str], list[int]]:
    """Prompts as token ids, GSM8K's answers (or none), and stop tokens."""
    if args.gsm8k is None:
        from transformers import AutoConfig

        vocabulary = AutoConfig.from_pretrained(model).vocab_size
        generator = torch.Generator().manual_seed(1)
        shape = (args.prompts or 64, args.prompt_tokens)
        return torch.randint(vocabulary, shape, generator=generator).tolist(), [], []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in (args.gsm8k / "test.jsonl").read_text().splitlines()][: args.prompts]
    ending = ' Let\'s think step by step and output the final answer after "####".'
    chats = [[{"role": "user", "content": row["question"] + ending}] for row in rows]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return prompts, [row["answer"].split("####")[-1].strip() for row in rows], [tokenizer.eos_token_id]


def make_engine(model: str, args: argparse.Namespace) -> VLLMEngine:
    config = RolloutConfig(
        name="vllm",
        temperature=args.temperature or 1.0,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    return VLLMEngine(
        model,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        config=config,
        max_model_len=args.max_model_len,
        in_process=not args.engine_process,
    )


def bare_vllm(model: str, args: argparse.Namespace) -> Any:
    on_gpu = args.device != "cpu"
    with vllm_setup.environment(in_process=not on_gpu):
        from vllm import LLM

        return LLM(
            model,
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enforce_eager=not on_gpu,
            kv_cache_memory_bytes=None if on_gpu else 1 << 30,
        )


def run_bare(
    llm: Any, prompts: list[list[int]], stops: list[int], args: argparse.Namespace, tokens: int, log_probs: bool
) -> list[list[int]]:
    from vllm import SamplingParams as VLLMSamplingParams

    options = VLLMSamplingParams(
        max_tokens=tokens,
        temperature=args.temperature,
        stop_token_ids=stops,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if log_probs else None,
        flat_logprobs=log_probs,
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], options, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_engine(
    engine: VLLMEngine, prompts: list[list[int]], stops: list[int], args: argparse.Namespace, tokens: int
) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=tokens, temperature=args.temperature, stop_token_ids=tuple(stops))
    results = engine.generate([Request(p, sampling, stream=i) for i, p in enumerate(prompts)])
    return [completions[0].token_ids for completions in results]


def measure(runs: dict, answers: list[str], model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each way, in alternating rounds after one short warm-up each."""
    for run in runs.values():
        run(min(8, args.max_tokens))
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_speeds: dict[str, list[float]] = {name: [] for name in runs}
    figures: dict[str, Any] = {}
    for _ in range(args.rounds):
        for name, run in runs.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            samples = run(args.max_tokens)
            tokens = sum(map(len, samples))
            speeds[name].append(tokens / (time.perf_counter() - began))
            cpu_speeds[name].append(tokens / (time.process_time() - cpu_began))
            if answers:
                figures.setdefault(name, {})["accuracy"] = round(accuracy(samples, answers, model), 4)
    for name, values in speeds.items():
        median = round(statistics.median(values), 1)
        figures.setdefault(name, {}).update(tokens_per_second=round(max(values), 1), median=median)
        if args.device == "cpu" and not args.engine_process:
            figures[name]["tokens_per_cpu_second"] = round(max(cpu_speeds[name]), 1)
    return {"ways": figures}


def accuracy(samples: list[list[int]], answers: list[str], model: str) -> float:
    """Share of samples whose last number is the answer."""
    from transformers import AutoTokenizer

    texts = AutoTokenizer.from_pretrained(model).batch_decode(samples, skip_special_tokens=True)
    numbers = [re.findall(r"-?\d[\d,]*\.?\d*", text) for text in texts]
    last = [found[-1].replace(",", "").rstrip(".") if found else "" for found in numbers]
    return sum(a == b.replace(",", "") for a, b in zip(last, answers)) / len(answers)


def update_weights(engine: VLLMEngine, model: str, args: argparse.Namespace) -> float:
    """Seconds of the second update of all weights from a transformers model on the same device."""
    from transformers import AutoModelForCausalLM

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype)).to(args.device)
    for version in (1, 2):
        engine.load_weights(((name, p.detach()) for name, p in trainer.named_parameters()), version)
    return round(engine.load_stats["seconds"], 3)


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    ways = result["ways"]
    unit = "tokens_per_cpu_second" if "tokens_per_cpu_second" in ways["rollout engine"] else "tokens_per_second"
    for name in ("bare vLLM", "bare vLLM with log-probs"):
        result[f"ratio to {name}"] = round(ways["rollout engine"][unit] / ways[name][unit], 3)
    result["settings"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    print(f"{'':28}{'tokens/s, best':>16}{'median':>10}{'per CPU s':>11}{'correct':>10}")
    for name, way in ways.items():
        cpu, correct = way.get("tokens_per_cpu_second", "-"), way.get("accuracy", "-")
        print(f"{name:28}{way['tokens_per_second']:16.1f}{way['median']:10.1f}{cpu!s:>11}{correct!s:>10}")
    for key, value in result.items():
        if key not in ("ways", "settings"):
            print(f"{key}: {value}")
    print(f"{args.device}, {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
