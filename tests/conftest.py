"""A tiny model and tiny data, made once a session, for every test that trains."""

import json
import os
from pathlib import Path

import pytest

SHARE_A_CLUSTER = "tests/core/transfer_queue/"
LONGEST = ("tests/e2e/", "tests/core/controller/test_ranks.py", SHARE_A_CLUSTER)


def pytest_collection_modifyitems(items):
    """The longest files first, or one process would end with one of them while the others have nothing left."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under --dist loadfile: whole files to a process, and whole folders whose files share a Ray cluster."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadSharing(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return SHARE_A_CLUSTER if nodeid.startswith(SHARE_A_CLUSTER) else super()._split_scope(nodeid)

    return LoadSharing(config, log)


def _save_model(folder: Path, characters: bool, **shape) -> Path:
    """A random Qwen2 and its tokenizer as a Hugging Face folder."""
    from examples.tiny import make_model  # brings transformers, which most tests do without

    tokenizer = make_model.character_tokenizer() if characters else make_model.byte_tokenizer()
    make_model.tiny_qwen2(tokenizer, **{"hidden": 32, "layers": 2, **shape}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random Qwen2 of two layers over the characters of arithmetic."""
    return _save_model(tmp_path_factory.mktemp("tiny_model"), characters=True)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    """A random Qwen2 of two layers that reads any text, one token a byte."""
    return _save_model(tmp_path_factory.mktemp("byte_model"), characters=False, max_length=4096)


@pytest.fixture(scope="session")
def terse_model(tmp_path_factory) -> Path:
    """As `byte_model`, smaller still, with a sixth of its tokens as end tokens: responses are about six tokens long."""
    from transformers import GenerationConfig

    folder = tmp_path_factory.mktemp("terse_model")
    _save_model(folder, characters=False, hidden=16, layers=1, max_length=4096)
    GenerationConfig(eos_token_id=list(range(1, 44))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_classifier(byte_model, tmp_path_factory) -> Path:
    """A random reward model over bytes, with one output and a chat template unlike the policy's."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

    folder = tmp_path_factory.mktemp("tiny_classifier")
    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, pad_token_id=0, num_labels=1, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.normal_()  # an untrained head is close to 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """A folder with train.parquet (256 sums) and test.parquet (32 held-out sums)."""
    from examples.tiny.make_data import write

    folder = tmp_path_factory.mktemp("tiny_data")
    write(folder, train=256, test=32)
    return folder


@pytest.fixture(scope="session")
def gsm8k_data(tmp_path_factory) -> Path:
    """A folder with train.parquet and test.parquet as the GSM8K script writes them.

    Of the real dataset where the environment variable GSM8K names a folder with its train.jsonl and test.jsonl; else of
    problems like it.
    """
    from examples.data_preprocess.gsm8k import main as preprocess

    folder = tmp_path_factory.mktemp("gsm8k")
    source = os.environ.get("GSM8K") or _problems_like_gsm8k(tmp_path_factory.mktemp("gsm8k_source"))
    preprocess(["--local_save_dir", str(folder), "--local_dataset_path", str(source)])
    return folder


def _problems_like_gsm8k(folder: Path) -> Path:
    for split, numbers in (("train", range(2, 302)), ("test", range(302, 334))):
        lines = []
        for i in numbers:
            total = i * (i + 2)
            question = f"Ann has {i} boxes of {i + 2} pens and gives {i} pens away. How many pens are left?"
            answer = f"There are {i} * {i + 2} = <<{i}*{i + 2}={total}>>{total} pens.\nOf these {total - i} are left."
            lines.append(json.dumps({"question": question, "answer": f"{answer}\n#### {total - i:,}"}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder
