"""From `reward_model.*` to a model that scores: first what can be checked in a moment, then the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.config.schema import RewardModelConfig
from verl.core.model_engine import attention
from verl.core.model_engine.api import MicroBatching
from verl.core.model_engine.loading import DTYPES, from_hub, load_config, load_tokenizer, resolve_model_path
from verl.core.reward_model.classifier import Classifier
from verl.core.reward_model.judge import Judge, JudgeFunctions
from verl.core.rollout_engine.factory import check_engine
from verl.core.rollout_engine.standalone import build_engine, engine_config, sampling_params
from verl.errors import ConfigError
from verl.rewards.types import ScoringModel

KEY = "reward_model.model.path"


@dataclass(frozen=True)
class CheckedRewardModel:
    """What the check has read already. functions: of a judge; None for a classifier."""

    path: str
    hf_config: Any
    tokenizer: Any
    functions: JudgeFunctions | None


def check_reward_model(config: RewardModelConfig) -> CheckedRewardModel:
    """Read the model's config.json and tokenizer and the judge's functions; no weights.

    Raises:
        ConfigError: there is no such model, or it is not of the kind that is asked for, or has no chat template.
        RewardError: the judge's functions cannot be loaded.
    """
    model = config.model
    path = resolve_model_path(model.path, KEY)
    hf_config = load_config(path, trust_remote_code=model.trust_remote_code, key=KEY)
    generative = _is_generative(config, hf_config)
    tokenizer = load_tokenizer(model.tokenizer_path or path, trust_remote_code=model.trust_remote_code, key=KEY)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{KEY}={model.path}: its tokenizer has no chat template, so it is not known how the model reads a conversation. "
            "Add chat_template.jinja to its folder, or name another with reward_model.model.tokenizer_path."
        )
    judge = config.judge
    if not generative:
        if judge.path is not None:
            raise ConfigError(
                f"reward_model.judge.path={judge.path} has no effect: {KEY}={model.path} is a sequence-classification model, "
                "which writes nothing. Leave it out, or give a model that generates."
            )
        return CheckedRewardModel(path, hf_config, tokenizer, None)
    check_engine(engine_config(config.rollout), "reward_model.rollout")
    functions = JudgeFunctions.load(judge.path, judge.prompt_function, judge.score_function)
    return CheckedRewardModel(path, hf_config, tokenizer, functions)


def _is_generative(config: RewardModelConfig, hf_config: Any) -> bool:
    architectures = hf_config.architectures or []
    found = {
        "discriminative": any(name.endswith("ForSequenceClassification") for name in architectures),
        "generative": any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures),
    }
    kinds = [kind for kind, fits in found.items() if fits]
    wanted = config.model_type or (kinds[0] if kinds else None)
    if wanted is None or not found[wanted]:
        what = f"reward_model.model_type={wanted} takes" if config.model_type else "a reward model is"
        takes = {"discriminative": "a ...ForSequenceClassification", "generative": "a ...ForCausalLM"}
        fitting = takes[wanted] if wanted else " or ".join(takes.values())
        raise ConfigError(
            f"{KEY}={config.model.path}: {what} {fitting}; its config.json names {architectures or 'none'}."
        )
    if wanted == "discriminative" and hf_config.num_labels != 1:
        raise ConfigError(
            f"{KEY}={config.model.path}: the model has {hf_config.num_labels} labels; a reward model has one, its score."
        )
    if wanted == "discriminative" and (
        getattr(hf_config, "attn_logit_softcapping", None) or hf_config.model_type == "gpt_oss"
    ):
        raise ConfigError(
            f"{KEY}={config.model.path}: {hf_config.model_type} models bound or add to their attention scores, which is not "
            "computed here. Use a Qwen2, Qwen3, Llama or Mistral model."
        )
    return wanted == "generative"


def build_reward_model(
    config: RewardModelConfig, checked: CheckedRewardModel, device: torch.device
) -> tuple[ScoringModel, str | None]:
    """The model on `device`, and a notice for the user if its engine is not the one asked for.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if checked.functions is None:
        return _build_classifier(config, checked, device), None
    placing = {"model_path": checked.path, "device": device, "tokenizer": checked.tokenizer}
    engine, stops, notice = build_engine(config.model, config.rollout, **placing, key=KEY)
    how = sampling_params(config.rollout, stops)
    return Judge(engine, checked.tokenizer, checked.functions, how, config.rollout.prompt_length), notice


def _build_classifier(config: RewardModelConfig, checked: CheckedRewardModel, device: torch.device) -> Classifier:
    from transformers import AutoModelForSequenceClassification

    dtype = DTYPES[config.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    hf, info = from_hub(
        "reward model",
        checked.path,
        KEY,
        lambda: AutoModelForSequenceClassification.from_pretrained(
            checked.path,
            config=checked.hf_config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=config.model.trust_remote_code,
            output_loading_info=True,
        ),
    )
    if not hasattr(hf, "score") or not hasattr(hf.base_model, "layers"):
        raise ConfigError(
            f"{KEY}={config.model.path}: {hf.config.model_type} has no decoder with a head named `score`; use a Qwen2, Qwen3, "
            "Llama or Mistral model."
        )
    if info["missing_keys"]:
        raise ConfigError(
            f"{KEY}={config.model.path}: the checkpoint lacks {', '.join(sorted(info['missing_keys'])[:5])}, which would be "
            "random numbers."
        )
    limit = MicroBatching(config.forward_max_token_len_per_gpu, config.micro_batch_size_per_gpu)
    longest = config.max_length or getattr(hf.config, "max_position_embeddings", None)
    return Classifier(hf, checked.tokenizer, device=device, limit=limit, max_length=longest)
