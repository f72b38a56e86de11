"""Make a small Qwen2 with random weights and a character tokenizer, as an ordinary Hugging Face folder.

python3 examples/tiny/make_model.py --out model            # arithmetic: digits and signs
python3 examples/tiny/make_model.py --out model --bytes    # any text, one token a byte
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ARITHMETIC = "0123456789+-*="
# The messages as they are, one after the other; an assistant's turn ends with the end token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def character_tokenizer(characters: str = ARITHMETIC) -> Qwen2Tokenizer:
    """One token a character; pad, eos and unk are 0, 1 and 2. Characters that it does not know are left out."""
    return _tokenizer(characters)


def byte_tokenizer() -> Qwen2Tokenizer:
    """One token a byte of UTF-8, so that any text has tokens; pad, eos and unk are 0, 1 and 2."""
    return _tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet()))


def _tokenizer(alphabet: Iterable[str]) -> Qwen2Tokenizer:
    # Transformers loads every folder of a Qwen2 model with this class, whatever the folder names: byte-level BPE.
    # Without merges that is one token a byte.
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_qwen2(
    tokenizer: Qwen2Tokenizer, *, hidden: int = 64, layers: int = 4, max_length: int = 256, seed: int = 0
) -> Qwen2ForCausalLM:
    """A float32 Qwen2 with grouped-query attention, tied embeddings and random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small Qwen2 with random weights and its tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--bytes", action="store_true", help="byte tokenizer for any text, and 4096 positions")
    parser.add_argument("--hidden", type=int, default=64, help="width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="depth (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = byte_tokenizer() if args.bytes else character_tokenizer()
    max_length = 4096 if args.bytes else 256
    model = tiny_qwen2(tokenizer, hidden=args.hidden, layers=args.layers, max_length=max_length, seed=args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
