"""A word-level tokenizer and files of prompts, small enough to count tokens by hand."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<user>", "<system>", "<assistant>", "<think>", *(f"w{i}" for i in range(100)), "<bos>"]
BOS = WORDS.index("<bos>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% if thinking %}<think> {% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """`w7` is token 12: every word is its place in WORDS. Begins plain texts, not chats, with <bos>."""
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    model.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer(tokenizer):
    """Without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="<unk>")


def words(*numbers):
    return " ".join(f"w{i}" for i in numbers)


def row(content, **changes):
    """One row of the usual schema; a change to None leaves the column out."""
    columns = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 0},
    }
    return {name: value for name, value in {**columns, **changes}.items() if value is not None}


@pytest.fixture
def write(tmp_path):
    def write_file(rows, name="train.parquet"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return str(path)

    return write_file
