import pytest

from verl.data.reading import Row
from verl.data.schema import check_rows
from verl.errors import DataError

from .conftest import row


def check(*rows, require_ground_truth=True):
    numbered = [Row(f"data.jsonl, line {i}", fields) for i, fields in enumerate(rows, start=1)]
    return check_rows(numbered, "prompt", "data_source", require_ground_truth)


def test_a_good_row():
    (checked,) = check(row("w1", extra_info={"index": 3}))
    assert checked.messages == [{"role": "user", "content": "w1"}]
    assert (checked.data_source, checked.ground_truth, checked.extra_info) == ("openai/gsm8k", "42", {"index": 3})


def test_a_text_is_one_message_not_its_characters():
    assert check(row("", prompt="What is 1+1?"))[0].messages == [{"role": "user", "content": "What is 1+1?"}]


def test_keys_that_parquet_fills_with_none_are_dropped():
    (checked,) = check(row("", prompt=[{"role": "user", "content": "w1", "name": None}]))
    assert checked.messages == [{"role": "user", "content": "w1"}]


def test_prompt_alone_is_enough_where_no_truth_is_needed():
    (checked,) = check({"prompt": "w1"}, require_ground_truth=False)
    assert (checked.data_source, checked.ground_truth, checked.extra_info) == ("unknown", None, {})


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"question": "w1"}, "column 'prompt' is missing (there are ['question'])"),
        (row("", prompt=5), "column 'prompt' holds a int"),
        (row("", prompt=[]), "column 'prompt' is an empty list"),
        (row("", prompt="  "), "column 'prompt' is an empty text"),
        (row("", prompt=["w1"]), "column 'prompt', message 0 holds a str"),
        (row("", prompt=[{"content": "w1"}]), "message 0: 'role' is missing"),
        (row("", prompt=[{"role": "", "content": "w1"}]), "message 0: 'role' holds ''"),
        (row("", prompt=[{"role": "user", "content": "a"}, {"role": "user"}]), "message 1: 'content' is missing"),
        (row("", prompt=[{"role": "user", "content": ["w1"]}]), "message 0: 'content' holds ['w1']"),
        (row("w1", data_source=3), "column 'data_source' holds a int"),
        (row("w1", extra_info=[1]), "column 'extra_info' holds a list"),
        (row("w1", reward_model="42"), "column 'reward_model' holds a str"),
        (row("w1", reward_model={"style": "rule"}), "'ground_truth' is missing"),
        ({"prompt": "w1"}, "'ground_truth' is missing"),
        (row("w1", reward_model={"ground_truth": float("nan")}), "'ground_truth' is missing"),
    ],
)
def test_a_bad_row_is_named_with_file_row_column_and_mend(bad, said):
    with pytest.raises(DataError) as error:
        check(row("w1"), bad)
    message = str(error.value)
    assert message.startswith("1 of 2 rows do not follow the schema:\n  data.jsonl, line 2, ")
    assert said in message
    assert "Write" in message or "Add" in message


def test_five_bad_rows_are_shown_and_all_are_counted():
    with pytest.raises(DataError) as error:
        check(*[row("", prompt=5)] * 8, *[row("w1")] * 3)
    message = str(error.value)
    assert message.startswith("8 of 11 rows")
    assert [f"line {i}," in message for i in range(1, 9)] == [True] * 5 + [False] * 3
    assert message.endswith("… and 3 more")
