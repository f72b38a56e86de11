"""Which tokens of a conversation are trained, by templates of three kinds."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.tiny.make_model import byte_tokenizer, character_tokenizer

from verl.config.schema import SFTDataConfig
from verl.data.conversations import load_conversations
from verl.errors import DataError

# Ends every turn with a token and a line break, as many chat models do.
TURNS = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
# Leaves out what the assistant thought in earlier turns.
THINKING = (
    "{% for m in messages %}{% set last = loop.last %}"
    "{{ '[' + m['role'] + ']' + (m['content'] if last or m['role'] == 'user' else m['content'].split('|')[-1]) + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def load(tmp_path):
    def go(conversations, tokenizer, column="messages", **settings):
        rows = [{column: messages} for messages in conversations]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sft.parquet")
        return load_conversations(tmp_path / "sft.parquet", SFTDataConfig(**settings), tokenizer, split="train")

    return go


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def texts(data, tokenizer, number=0):
    """(prompt, what is trained) of one sample, in words; stretches that are not trained are shown as ~."""
    batch = data.batch([number])
    ids, mask = batch["response_ids"].values.tolist(), batch["response_mask"].values.tolist()
    parts, current = [], None
    for token, trained in zip(ids, mask):
        if trained != current:
            parts.append([] if trained else ["~"])
            current = trained
        if trained:
            parts[-1].append(tokenizer.decode([token]))
    return tokenizer.decode(batch["prompt_ids"].values.tolist()), ["".join(p) for p in parts]


def test_the_answer_and_its_end_token_are_trained(load):
    tokenizer = character_tokenizer()
    data = load([[user("12+3="), assistant("15")], [user("7-7="), assistant("0")]], tokenizer)
    assert len(data) == 2
    assert texts(data, tokenizer) == ("12+3=", ["15<eos>"])
    batch = data.batch([1, 0])
    # An answer has the tokens that a rollout's answer has, and so has the prompt.
    assert [r.tolist() for r in batch["response_ids"].rows()][1] == [
        *tokenizer("15")["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert batch["prompt_ids"].rows()[0].tolist() == tokenizer("7-7=")["input_ids"]
    assert data.notices == []


def test_every_turn_of_the_assistant_and_nothing_after_its_end(load):
    tokenizer = tokenizer_with(TURNS)
    data = load([[{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c"), assistant("d")]], tokenizer)
    prompt, trained = texts(data, tokenizer)
    assert prompt == "[system]s<eos>\n[user]a<eos>\n[assistant]"
    assert trained == ["b<eos>", "~", "d<eos>", "~"]


def test_a_template_that_rewrites_earlier_turns_trains_the_last(load):
    tokenizer = tokenizer_with(THINKING)
    data = load([[user("a"), assistant("hm|b"), user("c"), assistant("so|d")]], tokenizer)
    assert texts(data, tokenizer) == ("[user]a<eos>[assistant]b<eos>[user]c<eos>[assistant]", ["so|d<eos>"])
    assert "1 of 1 conversations are trained on the assistant's last turn alone" in data.notices[0]


def test_without_a_template_contents_are_joined(load):
    tokenizer = tokenizer_with(None)
    data = load([[user("a"), assistant("b"), user("c"), assistant("d")]], tokenizer)
    assert texts(data, tokenizer) == ("a", ["b<eos>", "~", "d<eos>"])


@pytest.mark.parametrize(("policy", "prompt", "trained"), [("right", "12+3=", ["1"]), ("left", "+3=", ["15<eos>"])])
def test_long_conversations_are_cut_on_request(load, policy, prompt, trained):
    tokenizer = character_tokenizer()
    data = load([[user("12+3="), assistant("15")]], tokenizer, max_length=6, truncation=policy)
    assert texts(data, tokenizer) == (prompt, trained)
    assert (
        f"1 of 1 conversations are longer than data.max_length=6 tokens and were cut (data.truncation={policy})"
        in data.notices[0]
    )


def test_what_is_cut_to_nothing_is_left_out_and_counted(load):
    tokenizer = character_tokenizer()
    data = load(
        [[user("12+3="), assistant("15")], [user("1="), assistant("1")]], tokenizer, max_length=4, truncation="right"
    )
    assert len(data) == 1
    assert texts(data, tokenizer) == ("1=", ["1<eos>"])
    assert any("1 of 2 conversations have no token of the assistant" in notice for notice in data.notices)


def test_a_cut_within_the_answer_keeps_a_token_to_predict_from(load):
    tokenizer = character_tokenizer()
    data = load([[user("12+3="), assistant("155")]], tokenizer, max_length=3, truncation="left")
    assert texts(data, tokenizer) == ("5", ["5<eos>"])


@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        ([user("a")], {}, r"sft.parquet, row 0, column 'messages' has roles \['user'\]"),
        ([assistant("a"), user("b")], {}, "begins with another role"),
        ([user("12+3="), assistant("15")], {"max_length": 7}, "8 tokens are more than data.max_length=7"),
        ([user("a"), assistant("b")], {"messages_key": "chat"}, "data.messages_key=chat: "),
    ],
)
def test_what_does_not_fit_is_told(load, messages, settings, message):
    with pytest.raises(DataError, match=message):
        load([messages], character_tokenizer(), **settings)


def test_a_template_that_cannot_be_told_apart_is_an_error(load):
    tokenizer = tokenizer_with("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="cannot be told apart"):
        load([[user("a"), assistant("b")]], tokenizer)
