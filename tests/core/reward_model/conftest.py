"""Tiny reward models: a classifier in a chat template of its own, and a judge."""

import pytest
import torch
from examples.tiny import make_model
from transformers import AutoModelForSequenceClassification, Qwen2Config

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"


def save_classifier(folder, *, labels=1, template=TEMPLATE, tokenizer=None, **changes):
    """A random Qwen2 with a head of `labels` outputs, over bytes."""
    torch.manual_seed(3)
    tokenizer = tokenizer or make_model.byte_tokenizer()
    tokenizer.chat_template = template
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Qwen2Config(**{**sizes, **changes}, num_labels=labels)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.normal_()  # an untrained head is close to 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("classifier"))
