"""Which engines a run has, and how they are built on the devices that it gets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.config.batch_plan import BatchPlan
from verl.config.schema import FSDPConfig, PPOConfig
from verl.core.checkpoint_engine.sync import SyncReport, update_shared
from verl.core.controller.resources import check_roles_asked, check_this_machine, cluster_address, is_distributed
from verl.core.model_engine.api import MicroBatching, ModelEngine
from verl.core.model_engine.fsdp_engine import FSDPEngine
from verl.core.model_engine.loading import DTYPES, load_config, load_policy, load_value_model, resolve_model_path
from verl.core.model_engine.lora import BaseReference, add_adapters
from verl.core.model_engine.models import PolicyModel, ValueModel
from verl.core.model_engine.parallel import ensure_process_group
from verl.core.model_engine.sequence_parallel import check_heads
from verl.core.rollout_engine.api import RolloutEngine
from verl.core.rollout_engine.factory import check_engine, make_rollout_engine
from verl.errors import ConfigError


@dataclass
class Roles:
    """The engines of a run. ref and critic are None where the algorithm needs none.

    critic_apart: whether the critic has devices of its own, and so can train while the actor does.
    same_numerics: whether rollout and trainer compute from the same weights in the same precision, so that the rollout's
    log-probs may stand for the trainer's. notices: what the user should know about how they were placed. bucket_bytes: in
    which weights move. verify: compare checksums when they have. sync_metrics: of the last update of the weights.
    """

    actor: ModelEngine
    rollout: RolloutEngine
    ref: ModelEngine | None = None
    critic: ModelEngine | None = None
    critic_apart: bool = False
    same_numerics: bool = False
    notices: list[str] = field(default_factory=list)
    bucket_bytes: int = 1 << 30
    verify: bool = False
    sync_metrics: dict[str, float] = field(default_factory=dict)

    def sync_weights(self, version: int) -> SyncReport:
        """Bring the actor's weights into the rollout engine, which is awake after this."""
        options = {"bucket_bytes": self.bucket_bytes, "verify": self.verify}
        return update_shared(self.actor, self.rollout, version, dtype=getattr(self.rollout, "dtype", None), **options)

    def close(self) -> None:
        self.rollout.close()


def choose_device(wanted: str | None, key: str = "trainer.device") -> torch.device:
    """`wanted`, or cuda where there is one.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key}=cuda: this machine has no usable GPU. Leave {key} out to run on the CPU.")
    return torch.device("cuda", 0) if wanted != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def check_placement(config: PPOConfig, with_critic: bool, with_reference: bool) -> torch.device:
    """Find what `build_roles` would refuse, before anything is loaded.

    Returns:
        the device of a run in one process. (Workers of a cluster that is there already have devices of their own.)

    Raises:
        ConfigError: more devices than this machine has are asked for, or some for a role that there is not, or a rollout
            engine or a GPU that is not there.
    """
    check_roles_asked(config, with_critic, with_reference)
    check_engine(config.actor_rollout_ref.rollout)
    _check_servers(config, model_path=None)
    if is_distributed(config) and cluster_address(config) is not None:
        return torch.device("cpu")
    device = choose_device(config.trainer.device)
    if is_distributed(config):
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        check_this_machine(config, with_critic, with_reference, gpus)
    return device


def build_roles(
    config: PPOConfig,
    plan: BatchPlan,
    device: torch.device,
    model_path: str,
    tokenizer: Any,
    with_critic: bool,
    with_reference: bool,
) -> Roles:
    """All engines: on one device in this process, on more as workers of Ray.

    Raises:
        ConfigError: the devices are not there, or a model cannot be loaded.
    """
    _check_sequences(config, model_path, with_critic)
    _check_servers(config, model_path)
    if is_distributed(config):
        from verl.core.controller.distributed import build_on_ray

        return build_on_ray(config, plan, model_path, tokenizer, with_critic, with_reference)
    ensure_process_group(device, config.actor_rollout_ref.nccl_timeout)
    names = ["actor", *(["ref"] if with_reference else []), *(["critic"] if with_critic else [])]
    engines = build_trainers(config, plan, device, model_path, tokenizer, names)
    actor = engines["actor"]
    notices = [] if device.type == "cuda" else ["no GPU is used: training and generation run on this machine's CPU."]
    rollout, reason = build_rollout(config, device, model_path, tokenizer, dict(actor.export_weights()))
    notices += [reason] if reason else []
    same = same_numerics(config, rollout, device)
    return Roles(
        actor, rollout, engines.get("ref"), engines.get("critic"), False, same, notices, *weight_options(config)
    )


def sequence_ranks(config: PPOConfig) -> dict[str, int]:
    """How many ranks share the tokens of a micro-batch of each engine; with adapters the reference is the actor's model."""
    root = config.actor_rollout_ref
    ref = root.actor if root.model.lora_rank > 0 else root.ref
    sections = {"actor": root.actor, "ref": ref, "critic": config.critic}
    return {name: section.fsdp_config.ulysses_sequence_parallel_size for name, section in sections.items()}


def _check_sequences(config: PPOConfig, model_path: str, with_critic: bool) -> None:
    """ConfigError where a model's attention heads cannot be shared, before workers are started."""
    ranks = sequence_ranks(config)
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    models = [("actor_rollout_ref.actor", ranks["actor"], model_path, policy)]
    models.append(("actor_rollout_ref.ref", ranks["ref"], model_path, policy))
    if with_critic:
        models.append(("critic", ranks["critic"], resolve_model_path(critic.path, "critic.model.path"), critic))
    for section, size, path, model in models:
        if size > 1:
            options = {"trust_remote_code": model.trust_remote_code, "override": model.override_config}
            check_heads(load_config(path, **options), size, section)


def _check_servers(config: PPOConfig, model_path: str | None) -> None:
    """ConfigError if rollout servers are not there, or, with the model's path, if theirs has another vocabulary."""
    data, model, rollout = config.data, config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if rollout.name != "server":
        return
    from verl.core.rollout_engine.service.check import check_servers

    servers = check_servers(rollout.server, data.max_prompt_length + data.max_response_length)
    if model_path is not None:
        servers.check_model(
            load_config(model_path, trust_remote_code=model.trust_remote_code, override=model.override_config)
        )


def build_trainers(
    config: PPOConfig,
    plan: BatchPlan,
    device: torch.device,
    model_path: str,
    tokenizer: Any,
    names: Collection[str],
) -> dict[str, Any]:
    """Those of actor, ref and critic that are named, on this process's device. With adapters the ref is the actor's model."""
    engines: dict[str, Any] = {}
    if "actor" in names:
        engines["actor"] = _build_actor(config, plan, device, model_path, tokenizer)
    if "ref" in names:
        lora = config.actor_rollout_ref.model.lora_rank > 0
        engines["ref"] = BaseReference(engines["actor"]) if lora else _build_ref(config, device, model_path)
    if "critic" in names:
        engines["critic"] = _build_critic(config, plan, device, tokenizer)
    return engines


def build_rollout(
    config: PPOConfig, device: torch.device, model_path: str, tokenizer: Any, weights: dict[str, torch.Tensor] | None
) -> tuple[RolloutEngine, str | None]:
    """The rollout engine of this process's device, and a notice if it is not the one asked for.

    weights: the trainer's, to be read in place where that can be; None: they come later.
    """
    section = config.actor_rollout_ref
    model = section.model
    if section.rollout.checkpoint_engine.verify and section.rollout.name == "vllm":
        raise ConfigError(
            "actor_rollout_ref.rollout.checkpoint_engine.verify=True: vLLM keeps weights in another form, which cannot be "
            "compared. Set it to False, or rollout.name=native."
        )
    hf_config = load_config(model_path, trust_remote_code=model.trust_remote_code, override=model.override_config)
    return make_rollout_engine(
        section.rollout,
        model_path=model_path,
        hf_config=hf_config,
        device=device,
        trainer_weights=weights,
        trainer_dtype=DTYPES[section.actor.fsdp_config.model_dtype],
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        pad_token_id=tokenizer.pad_token_id,
        own_copy=config.trainer.pipeline != "sync",
    )


def weight_options(config: PPOConfig) -> tuple[int, bool]:
    """(bytes of a bucket of weights, whether checksums are compared)."""
    options = config.actor_rollout_ref.rollout.checkpoint_engine
    return options.update_weights_bucket_megabytes << 20, options.verify


def same_numerics(config: PPOConfig, rollout: RolloutEngine, device: torch.device) -> bool:
    """Whether the native engine generates with the actor's weights, in its precision.

    Merged weights are rounded once, adapters apart from them are not.
    """
    section = config.actor_rollout_ref
    # Transformers in the native engine's place has no dtype of its own.
    native = section.rollout.name == "native" or getattr(rollout, "native", False)
    native = native and section.model.lora_rank == 0
    return native and getattr(rollout, "dtype", None) == compute_dtype(section.actor.fsdp_config, device)


def compute_dtype(fsdp: FSDPConfig, device: torch.device) -> torch.dtype:
    """What the model computes in: as set, else bf16 on a GPU and the weights' precision on a CPU."""
    return DTYPES[fsdp.dtype or ("bf16" if device.type == "cuda" else fsdp.model_dtype)]


def _limit(max_tokens: int, max_samples: int | None, dynamic: bool) -> MicroBatching:
    return MicroBatching(max_tokens, None if dynamic else max_samples)


def _build_actor(
    config: PPOConfig, plan: BatchPlan, device: torch.device, model_path: str, tokenizer: Any
) -> FSDPEngine:
    section, model = config.actor_rollout_ref, config.actor_rollout_ref.model
    actor, rollout = section.actor, section.rollout
    hf_config = load_config(model_path, trust_remote_code=model.trust_remote_code, override=model.override_config)
    hf = load_policy(
        model_path,
        hf_config,
        DTYPES[actor.fsdp_config.model_dtype],
        trust_remote_code=model.trust_remote_code,
        override=model.override_config,
    )
    if model.lora_rank > 0:
        add_adapters(hf, model, model_path)
    return FSDPEngine(
        PolicyModel(hf, compiled=actor.use_torch_compile),
        device=device,
        dtype=compute_dtype(actor.fsdp_config, device),
        fsdp=actor.fsdp_config,
        train_limit=_limit(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz),
        infer_limit=_limit(
            rollout.log_prob_max_token_len_per_gpu,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_use_dynamic_bsz,
        ),
        optim=actor.optim,
        total_updates=plan.actor.total_updates,
        checkpoint=actor.checkpoint,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        compiled=actor.use_torch_compile,
        tokenizer=tokenizer,
    )


def _build_ref(config: PPOConfig, device: torch.device, model_path: str) -> FSDPEngine:
    """The frozen policy, kept in the precision that the actor computes in: its log-probs equal the actor's first ones."""
    section, ref = config.actor_rollout_ref, config.actor_rollout_ref.ref
    dtype = compute_dtype(section.actor.fsdp_config, device)
    hf_config = load_config(
        model_path, trust_remote_code=section.model.trust_remote_code, override=section.model.override_config
    )
    hf = load_policy(model_path, hf_config, dtype, trust_remote_code=section.model.trust_remote_code)
    limit = _limit(
        ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz
    )
    return FSDPEngine(
        PolicyModel(hf, compiled=section.actor.use_torch_compile),
        device=device,
        dtype=dtype,
        fsdp=ref.fsdp_config,
        train_limit=limit,
        infer_limit=limit,
    )


def _build_critic(config: PPOConfig, plan: BatchPlan, device: torch.device, tokenizer: Any) -> FSDPEngine:
    critic, model = config.critic, config.critic.model
    path = resolve_model_path(model.path, "critic.model.path")
    hf_config = load_config(
        path, trust_remote_code=model.trust_remote_code, override=model.override_config, key="critic.model.path"
    )
    hf = load_value_model(
        path,
        hf_config,
        DTYPES[critic.fsdp_config.model_dtype],
        trust_remote_code=model.trust_remote_code,
        override=model.override_config,
    )
    limit = _limit(critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz)
    if plan.critic is None:
        raise ValueError("the batch plan has no critic")
    return FSDPEngine(
        ValueModel(hf),
        device=device,
        dtype=compute_dtype(critic.fsdp_config, device),
        fsdp=critic.fsdp_config,
        train_limit=limit,
        infer_limit=limit,
        optim=critic.optim,
        total_updates=plan.critic.total_updates,
        checkpoint=critic.checkpoint,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        tokenizer=tokenizer,
    )
