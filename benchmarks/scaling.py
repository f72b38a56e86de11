"""Reckon a training step on 8, 64 and 512 GPUs: memory by phase, bytes and seconds of each phase, and what it waits for.

    python3 benchmarks/scaling.py            as text
    python3 benchmarks/scaling.py --markdown what docs/scaling.md holds

Nothing here is run on GPUs. Every constant is stated below with where it comes from; change one and look.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A decoder's shape. parameters: all, input embedding included."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    kv_width: int
    vocabulary: int
    tensor_parallel: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_width * 2


MODELS = (
    Model("Qwen2.5-7B", 7.62e9, 28, 3584, 18944, 512, 152064, tensor_parallel=1),
    Model("Qwen2.5-32B", 32.8e9, 64, 5120, 27648, 1024, 152064, tensor_parallel=2),
)


@dataclass(frozen=True)
class Machine:
    """One H200 and its links."""

    memory: float = 141e9
    """Data sheet."""
    peak: float = 989e12
    """Dense bf16, data sheet."""
    memory_bandwidth: float = 4.8e12
    """Data sheet; KV cache is read at `kv_efficiency` of it."""
    decode_efficiency: float = 0.65
    """Of peak in the matrix products of a decode step. Measured: 31 ms a step for 1,024 rows of the 7B shape."""
    kv_efficiency: float = 0.8
    """Assumed; with the line above it gives that measured step."""
    train_efficiency: float = 0.5
    """Of peak, forward and backward, what is computed twice (checkpointed layers) counted as work. Measured: updates of the
    7B shape at an MFU of 0.37, which counts that once, the way of the moments to the host and back included."""
    node_bandwidth: float = 253e9
    """Bytes a second that a GPU receives in a large all-gather within a node. Measured between two H200s (450e9 is the
    data sheet's; a broadcast reached 340e9)."""
    cluster_bandwidth: float = 150e9
    """The same over nodes with one 400 Gbit/s adapter a GPU, all of them at work in every ring. Assumed."""
    hop_seconds: float = 6e-6
    """Of one step of a ring. Assumed."""
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Work:
    """The workload: 1,024 prompts x 5, 512 + 1,024 tokens at most, one update over all samples, KL loss on."""

    prompts: int = 1024
    samples_per_prompt: int = 5
    mean_prompt: int = 200
    mean_response: int = 600
    longest_response: int = 1024
    tokens_per_micro_batch: int = 16384
    bucket: float = 2 * GIB
    """Of weights on their way (update_weights_bucket_megabytes)."""

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def tokens(self) -> int:
        return self.samples * (self.mean_prompt + self.mean_response)


def memory(model: Model, gpus: int, machine: Machine, work: Work) -> dict[str, float]:
    """Bytes on one GPU in each phase."""
    shard = model.parameters / gpus
    state = 16 * shard  # float32 weights, gradients, two moments
    resting = 12 * shard + 2 * shard  # weights and moments of the actor, the bf16 reference
    layer = model.parameters / model.layers
    gathered = 2 * (2 * model.vocabulary * model.hidden + 2 * layer) + 4 * layer  # root, two layers, a layer's gradient
    tokens = min(work.tokens_per_micro_batch, work.tokens / gpus)
    kept = tokens * model.layers * model.hidden * 2
    inside = tokens * (12 * model.hidden + 4 * model.intermediate) * 2
    logits = 3 * 2**29 * 4
    rollout = 2 * model.parameters / model.tensor_parallel
    rows = work.samples / (gpus / model.tensor_parallel)
    cache = rows * (work.mean_prompt + work.longest_response) * model.kv_bytes_per_token / model.tensor_parallel
    buckets = 2 * work.bucket * (1 + 1 / gpus)
    return {
        "generation": resting + rollout + cache,
        "update": state + 2 * shard + gathered + kept + inside + logits + rollout,
        "weights": resting + rollout + buckets,
    }


def collective(size: float, ranks: int, machine: Machine) -> float:
    """Seconds of an all-gather (or reduce-scatter) of `size` bytes, whole, over a ring of `ranks`."""
    if ranks == 1:
        return 0.0
    bandwidth = machine.node_bandwidth if ranks <= machine.gpus_per_node else machine.cluster_bandwidth
    return size * (ranks - 1) / ranks / bandwidth + ranks * machine.hop_seconds


def sharded_pass(model: Model, ranks: int, machine: Machine, bytes_per_parameter: float) -> float:
    """Seconds of communication of one pass over all layers."""
    layer = model.parameters / model.layers
    return model.layers * collective(bytes_per_parameter * layer, ranks, machine)


def generation(model: Model, gpus: int, machine: Machine, work: Work) -> float:
    """Seconds until the longest sample ends."""
    share = model.parameters / model.tensor_parallel
    rows = work.samples / (gpus / model.tensor_parallel)
    prefill = 2 * share * rows / work.samples_per_prompt * work.mean_prompt / (machine.peak * 0.5)
    products = max(2 * share / machine.memory_bandwidth, 2 * share * rows / (machine.peak * machine.decode_efficiency))
    # Samples end at different times: over the steps, mean_response / longest_response of the rows are alive.
    alive = work.mean_response / work.longest_response
    products = max(2 * share / machine.memory_bandwidth, products * alive)
    position = work.mean_prompt + work.mean_response / 2
    cache = rows * alive * position * model.kv_bytes_per_token / model.tensor_parallel
    reductions = 2 * model.layers * 15e-6 if model.tensor_parallel > 1 else 0.0
    step = products + cache / (machine.memory_bandwidth * machine.kv_efficiency) + reductions
    return prefill + work.longest_response * step


def training(model: Model, gpus: int, machine: Machine, work: Work, shards: int) -> tuple[float, float, float]:
    """(compute of the update, its communication, reference log-probs) in seconds.

    shards: ranks over which parameters are sharded (fsdp_size); gradients are added up over the copies once an update.
    """
    tokens = work.tokens / gpus
    micro_batches = max(1.0, tokens / work.tokens_per_micro_batch)
    flops = 2 * model.parameters * tokens
    rate = machine.peak * machine.train_efficiency
    gathers = 2 * sharded_pass(model, shards, machine, 2)  # forward, backward
    scatter = sharded_pass(model, shards, machine, 4)
    over_copies = 2 * collective(4 * model.parameters / shards, gpus // shards, machine)
    reference = max(flops / rate, micro_batches * gathers / 2)
    return 4 * flops / rate, micro_batches * (gathers + scatter) + over_copies, reference


def fitting_shards(model: Model, gpus: int, machine: Machine) -> int:
    """The least fsdp_size, a whole number of nodes, whose training state takes at most a third of the memory."""
    shards = machine.gpus_per_node
    while shards < gpus and 18 * model.parameters / shards > machine.memory / 3:
        shards *= 2
    return min(shards, gpus)


def rows(machine: Machine, work: Work) -> list[list[str]]:
    out = []
    for model in MODELS:
        for gpus in (8, 64, 512):
            need = memory(model, gpus, machine, work)
            shards = fitting_shards(model, gpus, machine)
            gen = generation(model, gpus, machine, work)
            compute, moved, reference = training(model, gpus, machine, work, gpus)
            _, hybrid, _ = training(model, gpus, machine, work, shards)
            update = max(compute, min(moved, hybrid))
            received = 2 * model.parameters * (1 - 1 / gpus)
            weights = collective(2 * model.parameters, gpus, machine)
            step = gen + reference + update + weights
            out.append(
                [
                    model.name,
                    str(gpus),
                    *(f"{need[phase] / 1e9:.0f}" for phase in ("generation", "update", "weights")),
                    f"{work.samples / gpus:.0f}",
                    f"{gen:.1f}",
                    f"{reference:.1f}",
                    f"{compute:.1f}",
                    f"{moved:.1f}",
                    f"{hybrid:.1f} ({shards})",
                    f"{received / 1e9:.1f}",
                    f"{weights:.2f}",
                    f"{step:.1f}",
                ]
            )
    return out


HEADER = [
    "model",
    "GPUs",
    "GB: generation",
    "GB: update",
    "GB: weights",
    "samples a GPU",
    "s: generation",
    "s: reference",
    "s: update, compute",
    "s: update, links",
    "s: links, hybrid (fsdp_size)",
    "GB received: weights",
    "s: weights",
    "s: step",
]


def markdown(machine: Machine, work: Work) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows(machine, work)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Reckon a step on 8, 64 and 512 GPUs.")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/scaling.md")
    arguments = parser.parse_args()
    machine, work = Machine(), Work()
    if arguments.markdown:
        print(markdown(machine, work))
        return
    table = [HEADER, *rows(machine, work)]
    for i, name in enumerate(HEADER):
        print(f"{name:<30}" + "".join(f"{row[i]:>14}" for row in table[1:]))


if __name__ == "__main__":
    main()
