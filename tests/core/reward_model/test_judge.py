"""A judge: what it is asked, what is read from its answer, and what counts as a failure."""

import re
from pathlib import Path

import pytest

from verl.core.reward_model.judge import Judge, JudgeFunctions, rubric_prompt, rubric_score
from verl.core.rollout_engine.api import Completion, SamplingParams
from verl.errors import RewardError
from verl.rewards.types import RewardInput

FUNCTIONS = """
def ask(data_source, solution_str, ground_truth, extra_info, messages):
    if solution_str == "raise":
        raise ValueError("no question for this")
    if solution_str == "number":
        return 7
    return f"{data_source}|{messages[-1]['content']}|{solution_str}|{ground_truth}|{extra_info['k']}"

def read(judgement, data_source, solution_str, ground_truth, extra_info):
    if judgement == "?":
        return None
    return {"score": float(judgement), "sure": 1, "pred": solution_str}
"""


class LetterTokenizer:
    """A token a letter."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


class Answering:
    """An engine that gives the same answers in turn."""

    def __init__(self, *answers, reason="stop"):
        self.answers, self.reason = answers, reason
        self.asked, self.calls = [], []

    def generate(self, requests):
        self.calls.append("generate")
        self.asked += ["".join(map(chr, r.prompt_ids)) for r in requests]
        return [[Completion([ord(c) for c in text], [], self.reason)] for text in self.answers[: len(requests)]]

    def wake(self):
        self.calls.append("wake")

    def sleep(self):
        self.calls.append("sleep")

    def close(self):
        self.calls.append("close")


def samples(*answers):
    return [RewardInput("d", a, "42", {"k": 5}, messages=[{"role": "user", "content": "Why?"}]) for a in answers]


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "judge.py").write_text(FUNCTIONS)
    return JudgeFunctions.load(str(tmp_path / "judge.py"), "ask", "read")


def judge(engine, functions, length=200):
    return Judge(engine, LetterTokenizer(), functions, SamplingParams(max_tokens=8, temperature=0.0), length)


def test_the_users_functions_write_the_question_and_read_the_answer(functions):
    engine = Answering("0.5", "-2")
    outcomes = judge(engine, functions).score(samples("one", "two"))
    assert engine.asked == ["<user>d|Why?|one|42|5<assistant>", "<user>d|Why?|two|42|5<assistant>"]
    assert [o.score for o in outcomes] == [0.5, -2.0]
    assert (outcomes[0].metrics, outcomes[0].answer) == ({"sure": 1.0}, "one")
    assert engine.calls == ["wake", "generate", "sleep"]  # the policy's engine is on the same device


def test_failures_are_those_of_their_samples_alone(functions):
    engine = Answering("1", "?", "nan", "many")
    outcomes = judge(engine, functions).score(samples("raise", "fine", "number", "none", "nan", "words", "x" * 300))
    assert [o.score for o in outcomes] == [None, 1.0, None, None, None, None, None]
    errors = [o.error for o in outcomes]
    assert "no question for this" in errors[0]
    assert "return a text or a list of chat messages, not 7" in errors[2]
    assert "returned None" in errors[3]
    assert "returned nan" in errors[4]
    assert "could not convert string to float: 'many'" in errors[5]
    assert "it takes 1 to reward_model.rollout.prompt_length=200" in errors[6]
    assert "solution_str: 'raise'" in errors[0]  # the sample is shown


def test_a_judgement_that_was_cut_says_so(functions):
    outcomes = judge(Answering("?", reason="length"), functions).score(samples("one"))
    assert "cut at reward_model.rollout.response_length=8 tokens" in outcomes[0].error


def test_nothing_to_ask_leaves_the_engine_alone(functions):
    engine = Answering()
    assert judge(engine, functions).score(samples("raise"))[0].score is None
    assert engine.calls == []


def test_chat_messages_are_a_question_too():
    def ask(messages, **rest):
        return [{"role": "system", "content": "Judge."}, *messages]

    engine = Answering("Rating: 4")
    outcomes = judge(engine, JudgeFunctions(ask=ask)).score(samples("one"))
    assert engine.asked == ["<system>Judge.<user>Why?<assistant>"]
    assert outcomes[0].score == 0.4


def test_the_rubric_shows_conversation_answer_and_truth():
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2+2?"}]
    text = rubric_prompt(solution_str="Four {so}.", ground_truth="4", messages=messages, data_source="d", extra_info={})
    for part in ("[system] Be kind.\n[user] 2+2?", "Four {so}.", "The reference, which is right:\n4", "Rating: N"):
        assert part in text
    without = rubric_prompt(solution_str="Four.", ground_truth=None, messages=messages, data_source="d", extra_info={})
    assert "reference" not in without


@pytest.mark.parametrize(
    ("judgement", "score"),
    [("Rating: 7", 0.7), ("rating 10", 1.0), ("Rating: 2\nNo: **Rating:** 0", 0.0), ("Good.\nRating: 8/10", 0.8)],
)
def test_the_last_rating_counts(judgement, score):
    assert rubric_score(judgement) == score


@pytest.mark.parametrize("judgement", ["", "Very good.", "Rating: 11", "Rating: high"])
def test_no_rating_is_an_error(judgement):
    with pytest.raises(ValueError, match="no line 'Rating: N'"):
        rubric_score(judgement)


def test_a_file_or_function_that_is_not_there_is_named(tmp_path):
    (tmp_path / "judge.py").write_text(FUNCTIONS)
    with pytest.raises(RewardError, match=r"reward_model\.judge\.path=.*juge\.py: there is no such file"):
        JudgeFunctions.load(str(tmp_path / "juge.py"), "ask", "read")
    with pytest.raises(RewardError, match=r"reward_model\.judge\.score_function=rate is not a function of"):
        JudgeFunctions.load(str(tmp_path / "judge.py"), "ask", "rate")


def test_the_pages_judge_works_as_printed(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "reward_model.md"
    (tmp_path / "judge.py").write_text(re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1])
    functions = JudgeFunctions.load(str(tmp_path / "judge.py"), "judge_prompt", "judge_score")
    engine = Answering("Yes.", "no")
    outcomes = judge(engine, functions).score(samples("one", "two"))
    assert engine.asked[0] == "<user>Question: Why?\nAnswer: one\nIs it right? Write yes or no.<assistant>"
    assert [o.score for o in outcomes] == [1.0, 0.0]
    assert outcomes[0].metrics == {"judgement_length": 4.0}
