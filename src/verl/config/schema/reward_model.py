"""Options of a model that scores responses."""

from dataclasses import dataclass

from verl.config.schema.options import opt
from verl.config.schema.tools import GenerationModelConfig, GenerationRolloutConfig


@dataclass
class ScoringModelConfig(GenerationModelConfig):
    path: str | None = opt(None, "a Hugging Face directory or model id (must be given)")  # type: ignore[assignment]


@dataclass
class JudgeRolloutConfig(GenerationRolloutConfig):
    prompt_length: int = opt(2048, "generative: longest question to the judge, in tokens; a longer one fails", min=1)
    response_length: int = opt(512, "generative: longest judgement, in tokens", min=1)
    do_sample: bool = opt(False, "generative: False: greedy, whatever temperature says")
    gpu_memory_utilization: float = opt(
        0.3, "share of the GPU's memory that judging may use, weights included", above=0, max=1
    )


@dataclass
class JudgeConfig:
    path: str | None = opt(
        None, "Python file with the two functions; null: a built-in rubric, which asks for a rating from 0 to 10"
    )
    prompt_function: str = opt("judge_prompt", "the function that writes the question to the judge")
    score_function: str = opt("judge_score", "the function that reads its answer")


@dataclass
class RewardModelConfig:
    enable: bool = opt(False, "score responses with a model")
    model_type: str | None = opt(
        None,
        "discriminative: a sequence-classification model, whose one logit is the score; generative: a judge that writes; "
        "null: as the model's config.json says",
        choices=("discriminative", "generative"),
    )
    combine: str = opt(
        "replace",
        "replace: the model's score is the reward; add: it is added to that of the reward function or scorer",
        choices=("replace", "add"),
    )
    weight: float = opt(1.0, "the model's score is multiplied by this")
    gpu_share: float = opt(
        1.0, "on Ray: share of a GPU that its worker claims; below 1 it may run beside another one", above=0, max=1
    )
    model: ScoringModelConfig = opt(ScoringModelConfig, "the model that scores")
    dtype: str | None = opt(
        None,
        "discriminative: precision; null: bfloat16 on a GPU, float32 on a CPU",
        choices=("float32", "bfloat16"),
    )
    max_length: int | None = opt(
        None,
        "discriminative: longest conversation, in the model's own tokens; a longer one fails; null: its positions",
        min=1,
    )
    micro_batch_size_per_gpu: int | None = opt(None, "discriminative: samples a forward; null: packed by tokens", min=1)
    forward_max_token_len_per_gpu: int = opt(
        32768, "discriminative: tokens that a packed forward holds at most (longer samples go alone)", min=1
    )
    rollout: JudgeRolloutConfig = opt(JudgeRolloutConfig, "generative: how the judge writes")
    judge: JudgeConfig = opt(JudgeConfig, "generative: what it is asked")
