"""A case of multi_gpu.py's `sync`, in a process for each device; prints one JSON line for each way.

python benchmarks/multi_gpu_sync.py tiny|0.5b|7b shared|separate ... [--device cpu] [--ranks 2] [--bucket MEGABYTES]

shared: weights that are sharded over all ranks, into a rollout engine's buffers on each. separate: from the first rank, which
has the whole model, to the others. Weights are float32 in training and bfloat16 in generation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
ROUNDS = 5
HALF = torch.bfloat16


def shape_config(shape: str):
    from transformers import Qwen2Config

    return Qwen2Config(**SHAPES[shape], max_position_embeddings=2048)


def engine_of(shape: str, device: torch.device):
    """An FSDP engine of this shape, without an optimizer, sharded over the process group."""
    from transformers import AutoModelForCausalLM

    from verl.config.schema import FSDPConfig
    from verl.core.model_engine import attention
    from verl.core.model_engine.api import MicroBatching
    from verl.core.model_engine.fsdp_engine import FSDPEngine
    from verl.core.model_engine.models import PolicyModel

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), attn_implementation=attention.NAME)
    model.to_empty(device="cpu")
    model.tie_weights()
    if dist.get_rank() == 0:  # the others get theirs from it, and never touch this memory
        for number, parameter in enumerate(model.parameters()):
            parameter.data.fill_(number % 13 / 8)
    limit = MicroBatching(16384)
    options = {"dtype": HALF, "train_limit": limit, "infer_limit": limit, "gradient_checkpointing": False}
    return FSDPEngine(PolicyModel(model), device=device, fsdp=FSDPConfig(), **options)


def rollout_buffers(shape: str, device: torch.device):
    """What the native rollout engine generates with."""
    from verl.core.rollout_engine.config import ModelSpec
    from verl.core.rollout_engine.weights import WeightBuffers

    return WeightBuffers(ModelSpec.from_hf(shape_config(shape)), device, HALF)


def timed(update, device: torch.device) -> tuple[float, float]:
    """(median seconds, most extra GPU bytes) of `update` after one round to warm up; all ranks call it together."""
    seconds, extra = [], 0.0
    for number in range(ROUNDS + 1):
        dist.barrier()
        before = _device_bytes(device, reset=True)
        started = time.perf_counter()
        update()
        after = _device_bytes(device)
        if number:
            seconds.append(time.perf_counter() - started)
            extra = max(extra, after - before)
    return statistics.median(seconds), extra


def _device_bytes(device: torch.device, reset: bool = False) -> int:
    """Bytes allocated now (reset) or at the most since; waits for the device."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def shared(rank: int, device: torch.device, shape: str, bucket: int, folder: str) -> dict:
    """Gathered on the devices that train and generate."""
    from verl.core.checkpoint_engine.checksum import Sums, checksum, differing
    from verl.core.checkpoint_engine.gather import Traffic, _all_gather

    engine, buffers = engine_of(shape, device), rollout_buffers(shape, device)
    sums, traffic = Sums(HALF), Traffic()
    buffers.load(sums.watch(engine.export_weights(dtype=HALF, bucket_bytes=bucket, traffic=traffic)))
    if wrong := differing(sums.by_name, {name: checksum(t) for name, t in buffers.named().items()}):
        raise RuntimeError(f"weights differ: {wrong[:5]}")
    update = lambda: buffers.load(engine.export_weights(dtype=HALF, bucket_bytes=bucket))  # noqa: E731
    figures = timed(update, device)
    world = dist.get_world_size()
    received = torch.empty(bucket // world * world, dtype=torch.uint8, device=device)
    own = torch.ones(bucket // world, dtype=torch.uint8, device=device)
    link, _ = timed(lambda: _all_gather(received, own), device)
    return report(figures, traffic.received, traffic.peak_extra, (received.nbytes - own.nbytes) / link, buffers.nbytes)


def separate(rank: int, device: torch.device, shape: str, bucket: int, folder: str) -> dict:
    """From the first rank, which trains alone, to the others."""
    from verl.core.checkpoint_engine.broadcast import WeightChannel
    from verl.core.checkpoint_engine.gather import Traffic

    world = dist.get_world_size()
    probe = torch.ones(bucket, dtype=torch.uint8, device=device)
    link, _ = timed(lambda: dist.broadcast(probe, src=0), device)
    weights = [(name, _weight(number, size, device)) for number, (name, size) in enumerate(_sizes(shape))]
    channel = WeightChannel(dist.FileStore(f"{folder}/channel", world), rank, world, device, bucket, 300)
    traffic, bytes_moved = Traffic(), 0
    if rank == 0:
        bytes_moved = channel.send(weights, HALF, traffic)
        figures = timed(lambda: channel.send(weights, HALF), device)
    else:
        del weights
        buffers = rollout_buffers(shape, device)
        buffers.load(channel.receive(traffic))
        if any(int(t.flatten()[0] * 8) != n % 13 for n, t in enumerate(map(buffers.named().get, dict(_sizes(shape))))):
            raise RuntimeError("weights differ")
        figures = timed(lambda: buffers.load(channel.receive()), device)
    return report(figures, bytes_moved, traffic.peak_extra, bucket / link, bytes_moved)


def _sizes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    from verl.core.rollout_engine.config import ModelSpec
    from verl.core.rollout_engine.weights import expected_shapes

    return list(expected_shapes(ModelSpec.from_hf(shape_config(shape))).items())


def _weight(number: int, size: tuple[int, ...], device: torch.device) -> Tensor:
    here = device if dist.get_rank() == 0 else torch.device("meta")
    return torch.full(size, number % 13 / 8, device=here)


def report(figures: tuple[float, float], moved: int, reckoned: int, bytes_per_second: float, weights: int) -> dict:
    """received_gb: by a rank. least_seconds: that over the link's bandwidth."""
    seconds, extra = figures
    return {
        "seconds": round(seconds, 5),
        "received_gb": round(moved / 1e9, 4),
        "link_gb_per_second": round(bytes_per_second / 1e9, 2),
        "least_seconds": round(moved / bytes_per_second, 5),
        "rollout_weights_gb": round(weights / 1e9, 3),
        "peak_extra_gb": round((extra or reckoned) / 1e9, 4),
        "peak_extra_gb_reckoned": round(reckoned / 1e9, 4),
    }


def rank_of(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One rank of a case."""
    from verl.core.model_engine.parallel import join_process_group

    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    join_process_group(device, store, rank, arguments.ranks, 300, "127.0.0.1")
    for way in arguments.ways:
        work = {"shared": shared, "separate": separate}[way]
        figures = work(rank, device, arguments.shape, arguments.bucket << 20, folder)
        if rank == 0:
            print(json.dumps({"way": way, **figures}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("ways", nargs="+", choices=("shared", "separate"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket", type=int, default=2048, help="megabytes (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
