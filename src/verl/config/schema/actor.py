"""Options of actor_rollout_ref.{model,actor,ref} and of the critic."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.engine import CheckpointConfig, FSDPConfig, OptimConfig
from verl.config.schema.options import LARGEST_SEED, opt

_KL_VALUES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL_VALUES, *(f"{kind}+" for kind in _KL_VALUES))
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass
class ModelConfig:
    path: str = opt(
        "~/models/deepseek-llm-7b-chat",
        "a Hugging Face directory or model id (or a ModelScope id with VERL_USE_MODELSCOPE=True)",
    )
    tokenizer_path: str | None = opt(None, "tokenizer directory or id; null: the model's")
    trust_remote_code: bool = opt(False, "run Python code that comes with the model")
    enable_gradient_checkpointing: bool | None = opt(
        None,
        "recompute layers in the backward pass instead of keeping their activations; null: where those of a micro-batch "
        "would take more than 40 % of the device's memory, or than the model's state leaves",
    )
    override_config: dict[str, Any] = opt({}, "values that replace those of the model's config.json")
    lora_rank: int = opt(
        0, "train adapters of this rank (LoRA) and leave the model as it is; 0: train the model", min=0
    )
    lora_alpha: float = opt(16, "LoRA: the adapters count lora_alpha / lora_rank", above=0)
    target_modules: Any = opt("all-linear", "LoRA: layers that get one: all-linear, or a list such as [q_proj,v_proj]")
    exclude_modules: Any = opt(None, "LoRA: layers that get none, a name or a list")


@dataclass
class PolicyLossConfig:
    loss_mode: str = opt("vanilla", "policy loss, a name in the registry")
    clip_cov_ratio: float | None = opt(None, "clip_cov: share of tokens that lose their gradient", above=0, max=1)
    clip_cov_lb: float | None = opt(None, "clip_cov: they are drawn among tokens with a covariance above this")
    clip_cov_ub: float | None = opt(None, "clip_cov: and below this")
    kl_cov_ratio: float | None = opt(None, "kl_cov: share of tokens that are pulled to the old policy", above=0, max=1)
    ppo_kl_coef: float | None = opt(None, "kl_cov: weight of that pull", min=0)
    tau_pos: float | None = opt(None, "sapo: steepness of the gate where the advantage is positive", above=0)
    tau_neg: float | None = opt(None, "sapo: and elsewhere", above=0)
    dro_beta: float | None = opt(None, "dro: weight of the quadratic pull to the old policy", min=0)
    options: dict[str, Any] = opt({}, "options of a policy loss of your own, by the names that it registered")


@dataclass
class ActorConfig:
    strategy: str = opt("fsdp", "training backend; fsdp and fsdp2 both mean FSDP2", choices=("fsdp", "fsdp2"))
    ppo_mini_batch_size: int = opt(256, "prompts an optimizer update (times rollout.n samples)", min=1)
    ppo_micro_batch_size_per_gpu: int | None = opt(
        None, "samples a forward and backward on one device; null: packed up to ppo_max_token_len_per_gpu tokens", min=1
    )
    use_dynamic_bsz: bool = opt(False, "pack micro-batches by tokens even if ppo_micro_batch_size_per_gpu is set")
    ppo_max_token_len_per_gpu: int = opt(16384, "tokens a packed micro-batch on one device holds at most", min=1)
    ppo_epochs: int = opt(1, "passes over a step's samples", min=1)
    shuffle: bool = opt(False, "draw mini-batches in a seeded random order")
    data_loader_seed: int = opt(42, "seed of that order", min=0, max=LARGEST_SEED)
    clip_ratio: float = opt(0.2, "PPO clip range, below and above", above=0)
    clip_ratio_low: float | None = opt(None, "clip range below; null: clip_ratio", above=0)
    clip_ratio_high: float | None = opt(None, "clip range above; null: clip_ratio", above=0)
    clip_ratio_c: float = opt(3.0, "dual clip: bound of the ratio where the advantage is negative", above=1)
    policy_loss: PolicyLossConfig = opt(PolicyLossConfig, "which policy loss")
    loss_agg_mode: str | None = opt(
        None,
        "how token losses become one number; null: as the policy loss's paper has it (seq-mean-token-mean for gspo and "
        "geo_mean), else token-mean",
        choices=AGGREGATIONS,
    )
    loss_scale_factor: float | None = opt(
        None, "seq-mean-token-sum-norm: the divisor; null: data.max_response_length", above=0
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = opt(False, "add a KL term against the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "weight of that term", min=0)
    kl_loss_type: str = opt(
        "low_var_kl", "its estimator; with + it has the unbiased gradient of k2 at its own value", choices=KL_KINDS
    )
    use_torch_compile: bool = opt(
        True, "compile the decoder layers and the loss kernels on a GPU (some seconds at the first step)"
    )
    optim: OptimConfig = opt(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = opt(FSDPConfig, "sharding, precision, offload")
    checkpoint: CheckpointConfig = opt(CheckpointConfig, "checkpoint contents")


@dataclass
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None, "samples a reference forward on one device; null: packed by tokens", min=1
    )
    log_prob_use_dynamic_bsz: bool = opt(
        "${actor_rollout_ref.actor.use_dynamic_bsz}", "pack reference forwards by tokens"
    )  # type: ignore[assignment]
    log_prob_max_token_len_per_gpu: int = opt(
        "${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}", "tokens a packed reference forward holds at most", min=1
    )  # type: ignore[assignment]
    fsdp_config: FSDPConfig = opt(
        lambda: FSDPConfig(
            ulysses_sequence_parallel_size="${actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size}"  # type: ignore[arg-type]
        ),
        "sharding, precision, offload",
    )
    nnodes: int = opt(0, "machines for the reference alone; 0: it shares the trainer's devices", min=0)
    n_gpus_per_node: int = opt("${trainer.n_gpus_per_node}", "with ref.nnodes: devices on each of them", min=1)  # type: ignore[assignment]
    gpu_share: float = opt(1.0, "with ref.nnodes: share of each GPU that its worker claims", above=0, max=1)


@dataclass
class CriticModelConfig:
    path: str = opt("${actor_rollout_ref.model.path}", "where the value model starts from; its head is new")
    trust_remote_code: bool = opt(
        "${actor_rollout_ref.model.trust_remote_code}", "run Python code that comes with the model"
    )  # type: ignore[assignment]
    enable_gradient_checkpointing: bool | None = opt(
        None, "recompute layers in the backward pass; null: as for the actor, where memory asks for it"
    )
    override_config: dict[str, Any] = opt({}, "values that replace those of the model's config.json")


@dataclass
class CriticConfig:
    ppo_mini_batch_size: int = opt(
        "${actor_rollout_ref.actor.ppo_mini_batch_size}", "prompts an optimizer update", min=1
    )  # type: ignore[assignment]
    ppo_micro_batch_size_per_gpu: int | None = opt(
        None, "samples a forward and backward on one device; null: packed by tokens", min=1
    )
    use_dynamic_bsz: bool = opt("${actor_rollout_ref.actor.use_dynamic_bsz}", "pack micro-batches by tokens")  # type: ignore[assignment]
    ppo_max_token_len_per_gpu: int = opt(32768, "tokens a packed micro-batch on one device holds at most", min=1)
    ppo_epochs: int = opt("${actor_rollout_ref.actor.ppo_epochs}", "passes over a step's samples", min=1)  # type: ignore[assignment]
    cliprange_value: float = opt(0.5, "clip range of the value around its old value", above=0)
    loss_agg_mode: str | None = opt(
        "${actor_rollout_ref.actor.loss_agg_mode}",
        "how token losses become one number; null: token-mean",
        choices=AGGREGATIONS,
    )
    model: CriticModelConfig = opt(CriticModelConfig, "value model")
    optim: OptimConfig = opt(lambda: OptimConfig(lr=1e-5), "optimizer")
    fsdp_config: FSDPConfig = opt(FSDPConfig, "sharding, precision, offload")
    nnodes: int = opt(0, "machines for the critic alone; 0: it shares the trainer's devices", min=0)
    n_gpus_per_node: int = opt("${trainer.n_gpus_per_node}", "with critic.nnodes: devices on each of them", min=1)  # type: ignore[assignment]
    gpu_share: float = opt(1.0, "with critic.nnodes: share of each GPU that its worker claims", above=0, max=1)
    checkpoint: CheckpointConfig = opt(CheckpointConfig, "checkpoint contents")
