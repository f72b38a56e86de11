"""Options of generation."""

from dataclasses import dataclass

from verl.config.schema.options import LARGEST_SEED, opt


@dataclass
class ValSamplingConfig:
    n: int = opt(1, "samples a validation prompt", min=1)
    do_sample: bool = opt(False, "False: greedy, whatever temperature says")
    temperature: float = opt(0.0, "validation temperature; 0 is greedy", min=0)
    top_k: int = opt(-1, "keep the k likeliest tokens; -1: all", min=-1)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", above=0, max=1)


@dataclass
class WeightSyncConfig:
    update_weights_bucket_megabytes: int = opt(
        2048, "weights move to the rollout engine in buckets of at most this size", min=1
    )
    verify: bool = opt(False, "compare checksums of the weights on both sides after each update of the rollout engine")


@dataclass
class RolloutServerConfig:
    urls: list[str] = opt([], "with name=server: addresses of `verl serve`, such as [http://host:8000]")
    token_env: str = opt("VERL_SERVE_TOKEN", "environment variable that holds the servers' token")
    weights_folder: str | None = opt(
        None, "folder that the servers see too: weights travel through it; null: over HTTP, from a copy in memory"
    )
    shares_devices: bool = opt(False, "the servers run on the trainer's devices, so they sleep while it trains")
    silence_seconds: float = opt(30.0, "a server that says nothing for so long is taken for dead", min=11)
    wait_seconds: float = opt(300.0, "when no server answers, wait so long for one before the run ends", above=0)


@dataclass
class RolloutConfig:
    name: str = opt("native", "generation engine", choices=("native", "hf", "vllm", "server", "sglang"))
    n: int = opt(5, "samples a prompt", min=1)
    temperature: float = opt(1.0, "sampling temperature", above=0)
    top_k: int = opt(-1, "keep the k likeliest tokens; -1: all", min=-1)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", above=0, max=1)
    ignore_eos: bool = opt(False, "go on to the length limit (for timing)")
    seed: int = opt(0, "seed of sampling; each sample and step has its own stream", min=0, max=LARGEST_SEED)
    dtype: str | None = opt(
        None,
        "precision of generation; null: bfloat16 on a GPU, the trainer's on a CPU",
        choices=("float32", "bfloat16"),
    )
    max_num_seqs: int = opt(1024, "sequences in generation at once", min=1)
    max_num_batched_tokens: int = opt(16384, "prompt tokens computed at once", min=1)
    gpu_memory_utilization: float = opt(
        0.5, "share of the GPU's memory that generation may use, weights included", above=0, max=1
    )
    enforce_eager: bool = opt(False, "no CUDA graphs")
    free_cache_engine: bool = opt(True, "give the KV cache's memory back while training")
    nnodes: int = opt(0, "machines for generation alone; 0: generation shares the trainer's devices", min=0)
    n_gpus_per_node: int = opt("${trainer.n_gpus_per_node}", "with rollout.nnodes: devices on each of them", min=1)  # type: ignore[assignment]
    tensor_model_parallel_size: int = opt(1, "devices that share one copy of the rollout model", min=1)
    calculate_log_probs: bool = opt(True, "log how far rollout and trainer log-probs are apart")
    mismatch_alarm: float | None = opt(
        0.05, "say so when rollout and trainer probabilities differ by more than this on average; null: never", above=0
    )
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None, "samples an old-log-prob forward on one device; null: packed by tokens", min=1
    )
    log_prob_use_dynamic_bsz: bool = opt(
        "${actor_rollout_ref.actor.use_dynamic_bsz}", "pack old-log-prob forwards by tokens"
    )  # type: ignore[assignment]
    log_prob_max_token_len_per_gpu: int = opt(
        "${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}",
        "tokens a packed old-log-prob forward holds at most",
        min=1,
    )  # type: ignore[assignment]
    val_kwargs: ValSamplingConfig = opt(ValSamplingConfig, "sampling at validation")
    checkpoint_engine: WeightSyncConfig = opt(WeightSyncConfig, "weights from the trainer")
    server: RolloutServerConfig = opt(RolloutServerConfig, "rollout servers")
