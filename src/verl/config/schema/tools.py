"""The configs of `verl.trainer.main_eval` and `verl.trainer.main_generation`."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.options import LARGEST_SEED, opt
from verl.config.schema.reward import CustomRewardConfig


@dataclass
class EvalDataConfig:
    path: str | None = opt(None, "parquet or jsonl file with the responses (must be given)")
    response_key: str = opt("responses", "column with each prompt's responses: a list of texts, or one text")
    data_source_key: str = opt("data_source", "column that selects the scorer")
    reward_model_key: str = opt("reward_model", "column with the ground truth")
    output_path: str | None = opt(None, "parquet file to write, the same rows with a column `scores`; null: none")


@dataclass
class EvalRewardConfig:
    num_workers: int = opt(2, "processes that run reward functions", min=1)
    timeout: float = opt(30.0, "seconds one response's reward may take", above=0)
    failure_score: float = opt(0.0, "score of a response whose reward function failed or timed out (counted)")
    max_failure_ratio: float = opt(0.5, "stop when more than this share of the rewards failed", min=0, max=1)


@dataclass
class EvalTrainerConfig:
    plugins: Any = opt([], "Python files to import first: they may register scorers")


@dataclass
class EvalConfig:
    data: EvalDataConfig = opt(EvalDataConfig, "responses")
    reward: EvalRewardConfig = opt(EvalRewardConfig, "rewards")
    custom_reward_function: CustomRewardConfig = opt(CustomRewardConfig, "your own reward function")
    trainer: EvalTrainerConfig = opt(EvalTrainerConfig, "the run")


@dataclass
class GenerationDataConfig:
    path: str | None = opt(None, "parquet or jsonl file with the prompts (must be given)")
    prompt_key: str = opt("prompt", "column with the chat messages, or a text")
    output_path: str | None = opt(
        None, "parquet file to write: the same rows with a column `responses` (must be given)"
    )
    n_samples: int = opt(1, "responses a prompt", min=1)
    batch_size: int = opt(128, "prompts at once", min=1)
    truncation: str = opt(
        "left",
        "what to do with a longer prompt: keep its end (left), its start (right), both ends (middle), or stop (error)",
        choices=("left", "right", "middle", "error"),
    )
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "further arguments of the chat template")


@dataclass
class GenerationModelConfig:
    path: str = opt("~/models/deepseek-llm-7b-chat", "a Hugging Face directory or model id")
    tokenizer_path: str | None = opt(None, "tokenizer directory or id; null: the model's")
    trust_remote_code: bool = opt(False, "run Python code that comes with the model")


@dataclass
class GenerationRolloutConfig:
    name: str = opt("native", "generation engine", choices=("native", "hf", "vllm"))
    prompt_length: int = opt(512, "longest prompt, in tokens", min=1)
    response_length: int = opt(512, "longest response, in tokens", min=1)
    do_sample: bool = opt(True, "False: greedy, whatever temperature says")
    temperature: float = opt(1.0, "sampling temperature; 0 is greedy", min=0)
    top_k: int = opt(-1, "keep the k likeliest tokens; -1: all", min=-1)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", above=0, max=1)
    seed: int = opt(0, "seed of sampling", min=0, max=LARGEST_SEED)
    dtype: str | None = opt(
        None, "precision; null: bfloat16 on a GPU, float32 on a CPU", choices=("float32", "bfloat16")
    )
    max_num_seqs: int = opt(1024, "sequences in generation at once", min=1)
    max_num_batched_tokens: int = opt(16384, "prompt tokens computed at once", min=1)
    gpu_memory_utilization: float = opt(0.8, "share of the GPU's memory to use, weights included", above=0, max=1)
    enforce_eager: bool = opt(False, "no CUDA graphs")
    tensor_model_parallel_size: int = opt(1, "devices that share one copy of the model", min=1)


@dataclass
class GenerationTrainerConfig:
    device: str | None = opt(None, "cuda or cpu; null: cuda if there is one", choices=("cuda", "cpu"))


@dataclass
class GenerationConfig:
    data: GenerationDataConfig = opt(GenerationDataConfig, "prompts and responses")
    model: GenerationModelConfig = opt(GenerationModelConfig, "the model")
    rollout: GenerationRolloutConfig = opt(GenerationRolloutConfig, "generation")
    trainer: GenerationTrainerConfig = opt(GenerationTrainerConfig, "the run")
