"""Keys of existing veRL scripts that are named otherwise here, or that nothing needs to read: tables alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

# Old key -> new key. "x.*" moves everything under x.
RENAMED: dict[str, str] = {
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_micro_batch_size": f"{_REF}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": f"{_ACTOR}.fsdp_config.dtype",
    f"{_REF}.fsdp_config.mixed_precision.param_dtype": f"{_REF}.fsdp_config.dtype",
    "critic.fsdp_config.mixed_precision.param_dtype": "critic.fsdp_config.dtype",
    "critic.model.fsdp_config.mixed_precision.param_dtype": "critic.fsdp_config.dtype",
    "critic.model.fsdp_config.*": "critic.fsdp_config.*",
    f"{_ACTOR}.ulysses_sequence_parallel_size": f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    f"{_REF}.ulysses_sequence_parallel_size": f"{_REF}.fsdp_config.ulysses_sequence_parallel_size",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp_config.ulysses_sequence_parallel_size",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.target_modules": f"{_MODEL}.target_modules",
    f"{_MODEL}.lora.exclude_modules": f"{_MODEL}.exclude_modules",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "data.tokenizer": f"{_MODEL}.tokenizer_path",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    f"{_ACTOR}.tau_pos": f"{_ACTOR}.policy_loss.tau_pos",
    f"{_ACTOR}.tau_neg": f"{_ACTOR}.policy_loss.tau_neg",
    "rollout.nnodes": f"{_ROLLOUT}.nnodes",
    "rollout.n_gpus_per_node": f"{_ROLLOUT}.n_gpus_per_node",
    "ray_init.*": "ray_kwargs.ray_init.*",
    "reward.custom_reward_function.*": "custom_reward_function.*",
    "reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    "reward_model.overlong_buffer.*": "reward.reward_kwargs.overlong_buffer_cfg.*",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward.reward_model.*": "reward_model.*",
}

# These counted the samples of all devices together; their successors count those of one.
PER_DEVICE = {old for old in RENAMED if old.endswith("micro_batch_size")}

# Other spellings of a value. The keys are patterns.
VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "*.fsdp_config.dtype": {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "torch.float32": "fp32"},
    "*.fsdp_config.model_dtype": {"bfloat16": "bf16", "float32": "fp32"},
    f"{_ROLLOUT}.dtype": {"bf16": "bfloat16", "fp32": "float32", "auto": None},
    "algorithm.filter_groups.metric": {"seq_reward": "score", "seq_final_reward": "score"},
    "custom_reward_function.name": {None: "compute_score"},
    "custom_reward_function.reward_kwargs": {None: {}},
}

# What to write instead of a value that the schema does not know.
VALUE_HINTS: dict[tuple[str, str], str] = {
    (f"{_ACTOR}.strategy", "megatron"): "Megatron is not in this version; fsdp trains the same model.",
    (f"{_ROLLOUT}.name", "trtllm"): "TensorRT-LLM is not supported; native and vllm generate on NVIDIA GPUs.",
    ("trainer.device", "npu"): "Ascend devices are not in this version.",
}


@dataclass(frozen=True)
class Retired:
    """Keys that are accepted and not read.

    pattern: `*` stands for anything, dots included. reason: why nothing reads them. allowed: the values that this
    version agrees with, besides null (None: any value). instead: what to do instead of setting another value.
    """

    pattern: str
    reason: str
    allowed: tuple | None = None
    instead: str = ""


_ALWAYS = "this version does what the value says, and nothing else"
_ENGINE = "the rollout engine decides this itself in this version"
_LORA = "LoRA trains the policy's model alone (actor_rollout_ref.model.lora_rank); leave the key out"
_MEGATRON = "Megatron is not in this version; train with actor_rollout_ref.actor.strategy=fsdp"
_TURNS = "multi-turn rollouts and tools are not in this version; leave the key out"
_SANDBOX = (
    "sandboxes are not in this version; score with a function of yours: custom_reward_function.path=FILE "
    "custom_reward_function.name=FUNCTION"
)
_REWARD_POOL = "the reward model takes one device: the trainer's, or on Ray one of its own; leave the key out"

# The first pattern that fits counts.
RETIRED: tuple[Retired, ...] = (
    # data
    Retired("data.return_raw_chat", "nothing needs a second copy of the prompt"),
    Retired("data.return_raw_input_ids", "nothing needs a second copy of the prompt"),
    Retired("data.return_full_prompt", "nothing needs a second copy of the prompt"),
    Retired("data.return_multi_modal_inputs", "text only in this version"),
    Retired("data.image_key", "text only in this version"),
    Retired("data.video_key", "text only in this version"),
    Retired("data.filter_overlong_prompts_workers", "prompts are tokenized without worker processes"),
    Retired("data.dataloader_num_workers", "prompts are read without worker processes"),
    Retired("data.use_shm", "files are read where they lie"),
    Retired("data.validation_shuffle", "validation has no order"),
    Retired("data.custom_cls.path", _ALWAYS, (), "write your prompts to a parquet file (data.train_files) instead"),
    Retired("data.custom_cls.*", "only read with data.custom_cls.path"),
    Retired("data.sampler.class_path", _ALWAYS, (), "the order of prompts is data.shuffle and data.seed"),
    Retired("data.sampler.*", "only read with data.sampler.class_path"),
    Retired("data.datagen.path", _ALWAYS, (), "write your prompts to a parquet file (data.train_files) instead"),
    Retired("data.datagen.*", "only read with data.datagen.path"),
    Retired("data.tool_config_path", _ALWAYS, (), _TURNS),
    # algorithm
    Retired(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "bounds are given together",
        (),
        "write both bounds as algorithm.rollout_correction.rollout_rs_threshold=LOW_HIGH, such as 0.5_2.0",
    ),
    Retired(
        "algorithm.rollout_correction.loss_type",
        "the policy loss is the actor's",
        ("ppo_clip",),
        "choose the loss with actor_rollout_ref.actor.policy_loss.loss_mode (gpg is REINFORCE without a ratio)",
    ),
    Retired(
        "algorithm.rollout_correction.*",
        _ALWAYS,
        (False,),
        "of rollout correction this version has rollout_is, rollout_rs and their thresholds",
    ),
    # model
    Retired("*.use_remove_padding", "padding is always left out"),
    Retired("*.use_fused_kernels", "log-probs are always computed in chunks, without a matrix of all logits"),
    Retired("*.fused_kernel_options.*", "log-probs are always computed in chunks, without a matrix of all logits"),
    Retired("*.entropy_from_logits_with_chunking", "entropy is always computed in chunks"),
    Retired("*.entropy_checkpointing", "entropy is always recomputed in the backward pass, chunk by chunk"),
    Retired("*.use_liger", "the fused loss is built in"),
    Retired("*.use_shm", "files are read where they lie"),
    Retired("*.lora_rank", _ALWAYS, (0,), _LORA),
    Retired("*.lora.rank", _ALWAYS, (0,), _LORA),
    Retired(
        "*.lora_adapter_path",
        _ALWAYS,
        (),
        "adapters start anew; merge the adapter into the model that training starts from",
    ),
    Retired("critic.model.lora_alpha", "only read with LoRA, which the critic has not"),
    Retired("critic.model.target_modules", "only read with LoRA, which the critic has not"),
    Retired("critic.model.exclude_modules", "only read with LoRA, which the critic has not"),
    Retired("*.lora.*", "adapters are merged into the weights on their way to the rollout"),
    Retired(
        "*.enable_activation_offload", _ALWAYS, (False,), "use enable_gradient_checkpointing and fsdp_config.*_offload"
    ),
    Retired("*.external_lib", _ALWAYS, (), "name the Python file in trainer.plugins"),
    Retired("*.hf_config_path", _ALWAYS, (), "put config.json beside the weights, or use override_config"),
    Retired("*.custom_chat_template", _ALWAYS, (), "put the template into the tokenizer's folder (tokenizer_path)"),
    Retired("critic.model.tokenizer_path", "the critic reads the tokens of actor_rollout_ref.model"),
    Retired(
        "actor_rollout_ref.hybrid_engine",
        "generation has devices of its own where actor_rollout_ref.rollout.nnodes says so",
    ),
    # training
    Retired("*.megatron.*", "only read by Megatron", (), _MEGATRON),
    Retired("*.strategy", "follows actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2"), _MEGATRON),
    Retired("*.fsdp_config.mixed_precision.*", "gradients are always reduced in fp32"),
    Retired("*.fsdp_config.wrap_policy.*", "every layer is sharded on its own"),
    Retired("*.fsdp_config.use_orig_params", "FSDP2 has no such choice"),
    Retired("*.fsdp_config.use_torch_compile", "follows actor_rollout_ref.actor.use_torch_compile"),
    Retired("*.fsdp_config.forward_only", "follows from the model's role"),
    Retired("*.fsdp_config.seed", "follows trainer.seed"),
    Retired("*.fsdp_config.full_determinism", _ALWAYS, (False,), "runs repeat on the same devices without it"),
    Retired(f"{_REF}.use_torch_compile", "follows actor_rollout_ref.actor.use_torch_compile"),
    Retired("*.optim.total_training_steps", "follows from the batch plan"),
    Retired("*.optim.optimizer", _ALWAYS, ("AdamW",), "the optimizer is AdamW"),
    Retired("*.optim.optimizer_impl", _ALWAYS, ("torch.optim",), "the optimizer is AdamW"),
    Retired("*.optim.override_optimizer_config", _ALWAYS, (), "set optim.betas, optim.eps and optim.weight_decay"),
    Retired("*.optim.num_cycles", _ALWAYS, (0.5,), "the cosine schedule falls once, to optim.min_lr_ratio"),
    Retired("*.checkpoint.strict", "loading is always strict"),
    Retired(
        f"{_ACTOR}.tis_imp_ratio_cap",
        _ALWAYS,
        (-1,),
        "write algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=CAP",
    ),
    Retired("critic.forward_micro_batch_size*", "values are computed in the micro-batches of critic.ppo_*"),
    Retired("critic.forward_max_token_len_per_gpu", "values are computed in the micro-batches of critic.ppo_*"),
    Retired("critic.shuffle", _ALWAYS, (False,), "the critic takes its mini-batches in the order of the samples"),
    Retired("critic.data_loader_seed", "the critic takes its mini-batches in the order of the samples"),
    Retired("critic.enable", "the critic follows algorithm.adv_estimator"),
    Retired("*.rollout_n", "follows actor_rollout_ref.rollout.n"),
    # rollout
    Retired(f"{_ROLLOUT}.mode", "there is one mode"),
    Retired(f"{_ROLLOUT}.do_sample", _ALWAYS, (True,), "training needs samples; greedy is for val_kwargs"),
    Retired(f"{_ROLLOUT}.repetition_penalty", _ALWAYS, (1,), "penalties change the policy; train without them"),
    Retired(f"{_ROLLOUT}.multi_turn.enable", _ALWAYS, (False,), _TURNS),
    Retired(f"{_ROLLOUT}.multi_turn.*_path", _ALWAYS, (), _TURNS),
    Retired(f"{_ROLLOUT}.multi_turn.*", "only read with multi-turn rollouts"),
    Retired(f"{_ROLLOUT}.agent.default_agent_loop", _ALWAYS, ("single_turn_agent",), _TURNS),
    Retired(f"{_ROLLOUT}.agent.agent_loop_config_path", _ALWAYS, (), _TURNS),
    Retired(f"{_ROLLOUT}.agent.*", "generation is batched without agent workers"),
    Retired(f"{_ROLLOUT}.quantization*", _ALWAYS, (), "quantized rollouts are not in this version"),
    Retired(f"{_ROLLOUT}.checkpoint_engine.*", "the way of the weights follows from where the engines run"),
    *(
        Retired(f"{_ROLLOUT}.{name}", _ENGINE)
        for name in (
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "load_format",
            "max_model_len",
            "data_parallel_size",
            "expert_parallel_size",
            "pipeline_model_parallel_size",
            "layered_summon",
            "multi_stage_wake_up",
            "enable_sleep_mode",
            "disable_log_stats",
            "disable_mm_preprocessor_cache",
            "limit_images",
            "logprobs_mode",
            "scheduling_policy",
            "skip_tokenizer_init",
            "cudagraph_capture_sizes",
            "use_fire_sampling",
            "micro_batch_size*",
            "engine_kwargs.*",
            "trace.*",
            "prometheus.*",
        )
    ),
    # reward
    Retired("reward_model.sandbox_fusion.url", _ALWAYS, (), _SANDBOX),
    Retired("reward.sandbox_fusion.url", _ALWAYS, (), _SANDBOX),
    Retired("reward_model.sandbox_fusion.*", "only read with a sandbox, which is off"),
    Retired("reward_model.enable_resource_pool", _ALWAYS, (False,), _REWARD_POOL),
    Retired("reward_model.nnodes", "only read with a pool of reward models, of which there is none"),
    Retired("reward_model.n_gpus_per_node", "only read with a pool of reward models, of which there is none"),
    Retired("reward_model.strategy", "a reward model is not trained, and so not sharded"),
    Retired("reward_model.model.input_tokenizer", "conversations always go to it as text, in its own template"),
    Retired("reward_model.model.fsdp_config.*", "a reward model is not trained, and so not sharded"),
    Retired("reward_model.model.use_remove_padding", "micro-batches are always without padding"),
    Retired("reward_model.model.use_fused_kernels", "its head has one output"),
    Retired("reward_model.use_dynamic_bsz", "follows reward_model.micro_batch_size_per_gpu"),
    Retired("reward_model.use_reward_loop", "rewards are computed while the step goes on"),
    Retired("reward_model.launch_reward_fn_async", "rewards are computed while the step goes on"),
    Retired(
        "reward_model.ulysses_sequence_parallel_size", _ALWAYS, (1,), "a reward model reads each text on one device"
    ),
    Retired("reward_model.rollout.*", _ENGINE),
    Retired("reward.sandbox_fusion.*", "only read with a sandbox, which is off"),
    # run
    Retired("trainer.balance_batch", "samples are always balanced by tokens"),
    Retired("trainer.use_legacy_worker_impl", "there is one implementation"),
    Retired("trainer.remove_previous_ckpt_in_save", "trainer.max_actor_ckpt_to_keep says how many are kept"),
    Retired("trainer.del_local_ckpt_after_load", _ALWAYS, (False,), "set trainer.max_actor_ckpt_to_keep"),
    Retired("trainer.default_hdfs_dir", _ALWAYS, (), "checkpoints are local; mount the store into default_local_dir"),
    Retired("trainer.rollout_data_dir", _ALWAYS, (), "set trainer.log_val_generations to see samples"),
    Retired("trainer.validation_data_dir", _ALWAYS, (), "set trainer.log_val_generations to see samples"),
    Retired("trainer.esi_redundant_time", _ALWAYS, (0,), "an interrupted run saves a checkpoint by itself"),
    Retired("trainer.ray_wait_register_center_timeout", "no process has to register"),
    Retired("trainer.profile_steps", _ALWAYS, (), "run the command under a profiler of yours"),
    Retired("trainer.*nsight_options*", "only read by a profiler"),
    Retired("global_profiler.tool", _ALWAYS, (), "run the command under a profiler of yours (py-spy, nsys)"),
    Retired("global_profiler.*", "only read by a profiler"),
    Retired("*.profiler.enable", _ALWAYS, (False,), "run the command under a profiler of yours (py-spy, nsys)"),
    Retired("*.profiler.*", "only read by a profiler"),
    Retired("ray_kwargs.timeline_json_file", "no timeline is written"),
    Retired("ray_kwargs.ray_init.include_dashboard", "Ray's dashboard is off; start a cluster of your own to have it"),
    Retired("ray_kwargs.ray_init.ignore_reinit_error", "there is one Ray session a run"),
    Retired("transfer_queue.enable", _ALWAYS, (False,), "samples move in memory in this version"),
    Retired("transfer_queue.*", "samples move in memory in this version"),
    Retired("hydra.*", "there are no Hydra output folders"),
)
