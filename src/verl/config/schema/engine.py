"""Options of one training engine: optimizer, sharding and precision, checkpoint contents."""

from dataclasses import dataclass

from verl.config.schema.options import opt


@dataclass
class OptimConfig:
    lr: float = opt(1e-6, "learning rate", above=0)
    lr_warmup_steps: int = opt(-1, "linear warm-up, in optimizer updates; below 0: use lr_warmup_steps_ratio")
    lr_warmup_steps_ratio: float = opt(0.0, "linear warm-up as a share of all updates", min=0, max=1)
    lr_scheduler_type: str = opt("constant", "what follows the warm-up", choices=("constant", "cosine"))
    min_lr_ratio: float = opt(0.0, "cosine: the last learning rate as a share of lr", min=0, max=1)
    weight_decay: float = opt(0.01, "AdamW weight decay", min=0)
    betas: list[float] = opt([0.9, 0.999], "AdamW betas")
    eps: float = opt(1e-8, "AdamW epsilon", above=0)
    clip_grad: float = opt(1.0, "largest global gradient norm; 0 turns clipping off", min=0)


@dataclass
class FSDPConfig:
    param_offload: bool = opt(False, "keep parameters in host memory while this model is not in use")
    optimizer_offload: bool = opt(False, "keep optimizer state in host memory outside the update")
    offload_policy: bool = opt(
        False, "FSDP2's own CPU offload: parameters and optimizer stay on the host and are moved layer by layer"
    )
    fsdp_size: int = opt(
        -1, "devices over which parameters are sharded, and copied to every other such group; -1: all", min=-1
    )
    ulysses_sequence_parallel_size: int = opt(
        1,
        "devices that share the tokens of each micro-batch, for long sequences; divides the model's attention heads",
        min=1,
    )
    reshard_after_forward: bool = opt(
        True, "free a layer's gathered parameters after its forward (less memory, one more gather)"
    )
    forward_prefetch: bool = opt(False, "gather the next layer's parameters while this one computes")
    model_dtype: str = opt("fp32", "precision of the master weights", choices=("fp32", "bf16"))
    dtype: str | None = opt(
        None, "precision of the computation; null: bf16 on a GPU, model_dtype on a CPU", choices=("fp32", "bf16")
    )


@dataclass
class CheckpointConfig:
    save_contents: list[str] = opt(
        ["model", "optimizer", "extra"],
        "what a checkpoint holds: model, optimizer, extra (schedule and random state), hf_model",
    )
    load_contents: list[str] = opt(["model", "optimizer", "extra"], "what is read back on resume")
    async_save: bool = opt(
        False, "copy what a checkpoint holds to host memory, and let a thread write it while training goes on"
    )
