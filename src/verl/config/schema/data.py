"""Options of the prompts."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.options import LARGEST_SEED, opt


@dataclass
class DataConfig:
    train_files: Any = opt(
        "~/data/rlhf/gsm8k/train.parquet", "training prompts: a parquet or jsonl file, or a list of them"
    )
    val_files: Any = opt("~/data/rlhf/gsm8k/test.parquet", "validation prompts: a file, a list, or null for none")
    prompt_key: str = opt("prompt", "column with the chat messages")
    reward_fn_key: str = opt("data_source", "column that selects the scorer")
    train_batch_size: int = opt(1024, "prompts a step (each gives rollout.n samples)", min=1)
    gen_batch_size: int | None = opt(
        None, "dynamic sampling: prompts drawn at once until a step is full; null: train_batch_size", min=1
    )
    val_batch_size: int | None = opt(None, "prompts a validation batch; null: all at once", min=1)
    max_prompt_length: int = opt(512, "longest prompt, in tokens", min=1)
    max_response_length: int = opt(512, "longest response, in tokens", min=1)
    truncation: str = opt(
        "left",
        "what to do with a longer prompt: keep its end (left), its start (right), both ends (middle), or stop (error)",
        choices=("left", "right", "middle", "error"),
    )
    filter_overlong_prompts: bool = opt(False, "drop longer prompts (counted) instead of cutting them")
    shuffle: bool = opt(True, "draw training prompts in a seeded random order, anew each epoch")
    seed: int = opt(1, "seed of the order of prompts", min=0, max=LARGEST_SEED)
    train_max_samples: int = opt(
        -1, "use this many training prompts (drawn at random if shuffle, else the first); -1: all", min=-1
    )
    val_max_samples: int = opt(-1, "use this many validation prompts; -1: all", min=-1)
    apply_chat_template_kwargs: dict[str, Any] = opt(
        {}, "further arguments of the chat template, such as enable_thinking"
    )
