"""Options of the run."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.options import LARGEST_SEED, opt


@dataclass
class TrainerConfig:
    pipeline: str = opt(
        "sync",
        "who waits for whom: generation and training in turns (sync), training on a batch while the next is generated "
        "(one_step_off), or each at its own pace (fully_async)",
        choices=("sync", "one_step_off", "fully_async"),
    )
    total_epochs: int = opt(30, "passes over the training prompts", min=1)
    total_training_steps: int | None = opt(None, "stop after this many steps; null: total_epochs decides", min=1)
    project_name: str = opt("verl_examples", "folder and logger project")
    experiment_name: str = opt("gsm8k", "folder and logger run")
    default_local_dir: str = opt(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "where checkpoints, metrics.jsonl and the report go",
    )
    logger: Any = opt(
        ["console"],
        "console, tensorboard, wandb, mlflow, swanlab: one name or a list (metrics.jsonl is always written)",
    )
    nnodes: int = opt(1, "machines", min=1)
    n_gpus_per_node: int = opt(1, "devices a machine; without a GPU a device is a CPU process", min=1)
    gpu_share: float = opt(
        1.0,
        "on Ray: share of each GPU that a worker claims; what is left is for the reward model or a pool of one device",
        above=0,
        max=1,
    )
    max_restarts: int = opt(
        0,
        "on more than one device: how often a run whose worker died goes on from its last checkpoint by itself",
        min=0,
    )
    device: str | None = opt(None, "cuda or cpu; null: cuda if there is one", choices=("cuda", "cpu"))
    seed: int = opt(0, "seed of everything that has none of its own", min=0, max=LARGEST_SEED)
    save_freq: int = opt(-1, "steps between checkpoints; -1: only the last step", min=-1)
    max_actor_ckpt_to_keep: int | None = opt(None, "newest checkpoints to keep; null: all", min=1)
    test_freq: int = opt(-1, "steps between validations; -1: only the last step", min=-1)
    val_before_train: bool = opt(True, "validate before the first step")
    val_only: bool = opt(False, "validate and stop")
    critic_warmup: int = opt(0, "steps in which only the critic learns", min=0)
    resume_mode: str = opt(
        "auto",
        "auto: from the newest checkpoint if there is one; disable: from scratch; resume_path: from resume_from_path",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = opt(None, "a .../global_step_N folder")
    log_val_generations: int = opt(0, "validation samples to show and log", min=0)
    plugins: Any = opt([], "Python files to import first: they may register advantages, losses, scorers")
