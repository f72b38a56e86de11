"""The config of `verl.trainer.sft_trainer`."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.actor import ModelConfig
from verl.config.schema.engine import CheckpointConfig, FSDPConfig, OptimConfig
from verl.config.schema.options import LARGEST_SEED, opt


@dataclass
class SFTDataConfig:
    train_files: Any = opt(
        "~/data/gsm8k_sft/train.parquet", "training conversations: a parquet or jsonl file, or a list of them"
    )
    val_files: Any = opt(None, "validation conversations: a file, a list, or null for none")
    messages_key: str = opt("messages", "column with the chat messages; the assistant's turns are trained")
    train_batch_size: int = opt(256, "conversations an update", min=1)
    micro_batch_size_per_gpu: int | None = opt(
        None,
        "conversations a forward and backward on one device; null: packed up to max_token_len_per_gpu tokens",
        min=1,
    )
    max_token_len_per_gpu: int = opt(16384, "tokens a packed micro-batch on one device holds at most", min=1)
    max_length: int = opt(1024, "longest conversation, in tokens", min=2)
    truncation: str = opt(
        "error",
        "what to do with a longer one: stop (error), keep its start (right) or its end (left)",
        choices=("error", "right", "left"),
    )
    shuffle: bool = opt(True, "draw conversations in a seeded random order, anew each epoch")
    seed: int = opt(1, "seed of that order", min=0, max=LARGEST_SEED)
    train_max_samples: int = opt(-1, "use this many training conversations, the first; -1: all", min=-1)
    val_max_samples: int = opt(-1, "use this many validation conversations, the first; -1: all", min=-1)
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "further arguments of the chat template")


@dataclass
class SFTTrainerConfig:
    total_epochs: int = opt(1, "passes over the training conversations", min=1)
    total_training_steps: int | None = opt(None, "stop after this many updates; null: total_epochs decides", min=1)
    project_name: str = opt("verl_sft", "folder and logger project")
    experiment_name: str = opt("sft", "folder and logger run")
    default_local_dir: str = opt(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "where checkpoints, metrics.jsonl and the report go",
    )
    logger: Any = opt(
        ["console"],
        "console, tensorboard, wandb, mlflow, swanlab: one name or a list (metrics.jsonl is always written)",
    )
    device: str | None = opt(None, "cuda or cpu; null: cuda if there is one", choices=("cuda", "cpu"))
    seed: int = opt(0, "seed of everything that has none of its own", min=0, max=LARGEST_SEED)
    save_freq: int = opt(-1, "updates between checkpoints; -1: only the last", min=-1)
    max_ckpt_to_keep: int | None = opt(None, "newest checkpoints to keep; null: all", min=1)
    test_freq: int = opt(-1, "updates between validations; -1: only the last", min=-1)
    resume_mode: str = opt(
        "auto",
        "auto: from the newest checkpoint if there is one; disable: from scratch; resume_path: from resume_from_path",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = opt(None, "a .../global_step_N folder")


@dataclass
class SFTConfig:
    data: SFTDataConfig = opt(SFTDataConfig, "conversations")
    model: ModelConfig = opt(ModelConfig, "the model that learns")
    optim: OptimConfig = opt(lambda: OptimConfig(lr=1e-5), "optimizer")
    engine: FSDPConfig = opt(FSDPConfig, "sharding, precision, offload")
    checkpoint: CheckpointConfig = opt(CheckpointConfig, "checkpoint contents")
    trainer: SFTTrainerConfig = opt(SFTTrainerConfig, "the run")
