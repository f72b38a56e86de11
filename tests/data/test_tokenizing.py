import pytest

from verl.data.schema import PromptRow
from verl.data.tokenizing import tokenize_rows, truncate
from verl.errors import DataError

from .conftest import BOS


def prompt(*messages):
    return PromptRow("f.jsonl, line 1", [{"role": r, "content": c} for r, c in messages], "d", "42")


def test_template_is_applied_up_to_the_answer(tokenizer):
    rows = [prompt(("system", "w0"), ("user", "w1 w2")), prompt(("user", "w3"))]
    assert tokenize_rows(rows, tokenizer, {}) == [[2, 5, 1, 6, 7, 3], [1, 8, 3]]


def test_ids_are_those_of_apply_chat_template(tokenizer):
    row = prompt(("system", "w0"), ("user", "w1 w2"))
    expected = tokenizer.apply_chat_template(row.messages, add_generation_prompt=True)["input_ids"]
    assert tokenize_rows([row], tokenizer, {}) == [expected]


def test_template_arguments(tokenizer):
    assert tokenize_rows([prompt(("user", "w0"))], tokenizer, {"thinking": True}) == [[1, 5, 3, 4]]


def test_without_a_template_contents_are_joined(plain_tokenizer):
    assert tokenize_rows([prompt(("system", "w0 "), ("user", "w1"))], plain_tokenizer, {}) == [[BOS, 5, 6]]


def test_a_template_that_rejects_a_row_names_it(tokenizer):
    with pytest.raises(DataError, match=r"f.jsonl, line 1: .* rejects the prompt \(roles \['tool'\]\): no tools here"):
        tokenize_rows([prompt(("tool", "w0"))], tokenizer, {})


def test_a_prompt_without_tokens_names_its_row(plain_tokenizer):
    with pytest.raises(DataError, match=r"f.jsonl, line 1: the prompt has no tokens"):
        tokenize_rows([prompt(("user", "  "))], plain_tokenizer, {})


@pytest.mark.parametrize(
    ("policy", "limit", "expected"),
    [
        ("left", 2, [4, 5]),
        ("right", 2, [1, 2]),
        ("middle", 2, [1, 5]),
        ("middle", 3, [1, 4, 5]),
        ("middle", 4, [1, 2, 4, 5]),
        ("left", 1, [5]),
        ("right", 1, [1]),
        ("middle", 1, [5]),
        ("left", 5, [1, 2, 3, 4, 5]),
        ("right", 9, [1, 2, 3, 4, 5]),
    ],
)
def test_truncate(policy, limit, expected):
    assert truncate([1, 2, 3, 4, 5], limit, policy) == expected
