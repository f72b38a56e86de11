"""Two GPUs: seconds to bring weights from training shards to rollout engines, and seconds a step against one GPU.

    python3 benchmarks/multi_gpu.py weights                     0.5B and 7B shapes, sharded over all GPUs, all-gathered
    python3 benchmarks/multi_gpu.py channel                     the same from one GPU to another
    python3 benchmarks/multi_gpu.py step --model MODEL --data FOLDER [--steps 4] [--gpus 1 2] [-- overrides]

`step` runs the GSM8K example (256 prompts x 5, 512 + 512 tokens) on each number of GPUs, and on one trainer GPU beside
one rollout GPU. --device cpu with --shape tiny tries `weights` and `channel` anywhere.
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
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
ROUNDS = 5


def engine_of(shape: str, device: torch.device):
    """An FSDP engine of this shape, without an optimizer, sharded over the process group; float32 weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from verl.config.schema import FSDPConfig
    from verl.core.model_engine import attention
    from verl.core.model_engine.api import MicroBatching
    from verl.core.model_engine.fsdp_engine import FSDPEngine
    from verl.core.model_engine.models import PolicyModel

    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=2048)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    model.to_empty(device="cpu")
    model.tie_weights()
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number % 13 / 8)
    limit = MicroBatching(16384)
    options = {"dtype": torch.bfloat16, "train_limit": limit, "infer_limit": limit, "gradient_checkpointing": False}
    return FSDPEngine(PolicyModel(model), device=device, fsdp=FSDPConfig(), **options), config


def timed(update, device: torch.device) -> tuple[float, float]:
    """(median seconds, most extra GPU memory) of `update` after one round to warm up."""
    seconds, extra = [], 0.0
    for number in range(ROUNDS + 1):
        if dist.get_world_size() > 1:
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        update()
        if device.type == "cuda":
            torch.cuda.synchronize()
            if number:
                extra = max(extra, torch.cuda.max_memory_allocated() - before)
        if number:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), extra


def _device(rank: int, kind: str) -> torch.device:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    return torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")


def gather_rank(rank: int, world: int, kind: str, shape: str, bucket: int, folder: str) -> None:
    """One rank of `weights`."""
    from verl.core.checkpoint_engine.checksum import Sums, checksum, differing
    from verl.core.checkpoint_engine.gather import Traffic
    from verl.core.model_engine.parallel import join_process_group
    from verl.core.rollout_engine.config import ModelSpec
    from verl.core.rollout_engine.weights import WeightBuffers

    device = _device(rank, kind)
    join_process_group(device, dist.FileStore(f"{folder}/store", world), rank, world, 300, "127.0.0.1")
    engine, config = engine_of(shape, device)
    buffers = WeightBuffers(ModelSpec.from_hf(config), device, torch.bfloat16)
    sums, traffic = Sums(torch.bfloat16), Traffic()
    buffers.load(sums.watch(engine.export_weights(dtype=torch.bfloat16, bucket_bytes=bucket, traffic=traffic)))
    wrong = differing(sums.by_name, {name: checksum(t) for name, t in buffers.named().items()})
    if wrong:
        raise RuntimeError(f"weights differ: {wrong[:5]}")
    seconds, extra = timed(
        lambda: buffers.load(engine.export_weights(dtype=torch.bfloat16, bucket_bytes=bucket)), device
    )
    if rank == 0:
        report(f"all-gather {shape} over {world}", seconds, traffic.received, traffic.peak_extra, extra, buffers.nbytes)


def channel_rank(rank: int, world: int, kind: str, shape: str, bucket: int, folder: str) -> None:
    """One end of `channel`: rank 0 trains, the others generate."""
    from transformers import Qwen2Config

    from verl.core.checkpoint_engine.broadcast import WeightChannel
    from verl.core.checkpoint_engine.gather import Traffic
    from verl.core.model_engine.parallel import ensure_process_group
    from verl.core.rollout_engine.config import ModelSpec
    from verl.core.rollout_engine.weights import WeightBuffers

    device = _device(rank, kind)
    ensure_process_group(device, 300)
    channel = WeightChannel(dist.FileStore(f"{folder}/store", world), rank, world, device, bucket, 300)
    if rank == 0:
        engine, _ = engine_of(shape, device)
        seconds, extra = timed(lambda: channel.send(engine.export_weights(), torch.bfloat16), device)
        traffic = Traffic()
        total = channel.send(engine.export_weights(), torch.bfloat16, traffic)
        report(f"broadcast {shape} to {world - 1}", seconds, total, traffic.peak_extra, extra, total)
        return
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=2048)
    buffers = WeightBuffers(ModelSpec.from_hf(config), device, torch.bfloat16)
    for _ in range(ROUNDS + 2):
        buffers.load(channel.receive())


def report(what: str, seconds: float, moved: int, reckoned: int, measured: float, weights: int) -> None:
    line = {
        "what": what,
        "seconds": round(seconds, 4),
        "bytes_received": moved,
        "gb_per_second": round(moved / seconds / 1e9, 2),
        "rollout_weights_gb": round(weights / 1e9, 3),
        "peak_extra_gb_reckoned": round(reckoned / 1e9, 3),
        "peak_extra_gb_measured": round(measured / 1e9, 3),
    }
    print(json.dumps(line), flush=True)


def spawn(function, arguments: argparse.Namespace) -> None:
    world = torch.cuda.device_count() if arguments.device == "cuda" else 2
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(function, (world, arguments.device, shape, arguments.bucket << 20, folder), nprocs=world)


def step(arguments: argparse.Namespace) -> None:
    """Seconds a step on each number of GPUs."""
    layouts = {f"{n} GPU{'s' * (n > 1)}": [f"trainer.n_gpus_per_node={n}"] for n in arguments.gpus}
    if 2 in arguments.gpus:
        own = "actor_rollout_ref.rollout"
        layouts["1 to train + 1 to generate"] = [f"{own}.nnodes=1", f"{own}.n_gpus_per_node=1"]
    base: float | None = None
    for name, words in layouts.items():
        with tempfile.TemporaryDirectory() as out:
            run_once(arguments, out, words)
            lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        seconds = statistics.median(line["timing/step"] for line in lines[1:] if "timing/step" in line)
        base = base or seconds
        phases = {k: round(statistics.median(x[k] for x in lines[1:] if k in x), 3) for k in lines[-1] if k.startswith("timing/") and "per" not in k}  # fmt: skip
        gpus = 1 if name == "1 GPU" else 2
        speedup = {"speedup": round(base / seconds, 2), "efficiency": round(base / seconds / gpus, 2)}
        print(json.dumps({"what": name, "seconds_a_step": round(seconds, 2), **speedup, "phases": phases}), flush=True)


def run_once(arguments: argparse.Namespace, out: str, words: list[str]) -> None:
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo",
        f"data.train_files={arguments.data}/train.parquet", "data.val_files=null", "data.train_batch_size=256",
        "data.max_prompt_length=512", "data.max_response_length=512",
        f"actor_rollout_ref.model.path={arguments.model}", "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.name=native", f"trainer.total_training_steps={arguments.steps}",
        f"trainer.default_local_dir={out}", "trainer.logger=[]", *words, *arguments.overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "4"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weights", "channel", "step"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", nargs="+", default=["0.5b", "7b"], choices=SHAPES)
    parser.add_argument("--bucket", type=int, default=2048, help="megabytes (default: %(default)s)")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--data", help="folder with train.parquet")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    arguments, rest = parser.parse_known_args()
    arguments.overrides = [word for word in rest if word != "--"]
    if arguments.what == "step":
        step(arguments)
    else:
        spawn(gather_rank if arguments.what == "weights" else channel_rank, arguments)


if __name__ == "__main__":
    main()
