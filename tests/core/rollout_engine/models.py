"""Small random models of each family, whose every weight matters, and the reference that engines are held to."""

from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from verl.core.rollout_engine.api import Completion, Request, SamplingParams

VOCAB = 50
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral": (MistralConfig, {"sliding_window": None, "num_key_value_heads": 4}),
}


def tiny_config(family: str, **overrides: object) -> PretrainedConfig:
    config_class, further = FAMILIES[family]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config_class(**{**shape, **further, **overrides})


def tiny_model(family: str, **overrides: object) -> PreTrainedModel:
    """A new random model; biases and norms differ from their usual 0 and 1, so that leaving one out shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@cache
def shared_model(family: str) -> PreTrainedModel:
    """One model for all tests that only read it."""
    return tiny_model(family)


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def requests(*lengths: int, first_stream: int = 0, **sampling: object) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return [Request(ids, params, first_stream + i) for i, ids in enumerate(prompts(*lengths))]


@torch.no_grad()
def reference_log_probs(
    model: PreTrainedModel, prompt_ids: list[int], token_ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """What transformers' own forward gives for the tokens of one response: [tokens]."""
    ids = torch.tensor([prompt_ids + token_ids], device=model.device)
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0].cpu()


def worst_log_prob_error(
    model: PreTrainedModel, asked: list[Request], answers: list[list[Completion]], temperature: float = 1.0
) -> float:
    return max(
        float(
            (reference_log_probs(model, r.prompt_ids, c.token_ids, temperature) - torch.tensor(c.log_probs)).abs().max()
        )
        for r, completions in zip(asked, answers)
        for c in completions
    )


def tokens(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids for c in completions] for completions in answers]
