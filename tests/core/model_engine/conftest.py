"""A tiny random Qwen2 with a plain copy to compare with, and a ragged batch."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from verl.core.model_engine import attention
from verl.core.model_engine.parallel import ensure_process_group
from verl.data.batch import Ragged, SampleBatch

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make_config(family="qwen2", tied=True):
    classes = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
    extra = {"head_dim": 8} if family == "qwen3" else {}
    return classes[family](**SIZES, **extra, tie_word_embeddings=tied)


def make_pair(family="qwen2", tied=True, seed=0):
    """(model with packed attention, the same weights with transformers' plain attention)."""
    torch.manual_seed(seed)
    config = make_config(family, tied)
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.NAME)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    plain.load_state_dict(packed.state_dict())
    return packed, plain.eval()


def make_batch(prompts=(3, 5, 1, 4), responses=(2, 6, 3, 1), seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.randint(3, 37, (n,), generator=generator) for n in lengths] for lengths in (prompts, responses)]
    return SampleBatch({"prompt_ids": Ragged.from_rows(rows[0]), "response_ids": Ragged.from_rows(rows[1])})


def reference_log_probs(plain, batch, temperature=1.0):
    """Log-probs and entropies, one sample at a time, without packing: lists of tensors."""
    log_probs, entropies = [], []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        logits = plain(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = torch.log_softmax(logits, -1)
        log_probs.append(log_p.gather(1, response[:, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


@pytest.fixture(autouse=True)
def process_group():
    """Of one process; made anew where a test elsewhere has ended it."""
    ensure_process_group(torch.device("cpu"), 60)
