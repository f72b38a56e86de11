"""Every spelling of an answer that models use, and what it is worth."""

import itertools
import json
import time
from decimal import Decimal
from pathlib import Path

import pytest

from verl.rewards.scorers.gsm8k import flexible_answer, score_gsm8k, strict_answer

REAL = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 42", "42"),
        ("#### 42.", "42"),
        ("#### 42.0", "42"),
        ("####42", "42"),
        ("####\n42", "42"),
        ("#### $42", "42"),
        ("#### \\$42", "42"),
        ("#### $42$", "42"),
        ("#### 1,000", "1000"),
        ("#### 1,000,000.", "1000000"),
        ("#### 1{,}000", "1000"),
        ("#### $1,234.50 in all", "1234.5"),
        ("#### 42 apples, 7 of them red", "42"),
        ("#### 42%", "42"),
        ("#### **42**", "42"),
        ("#### `42`", "42"),
        ("#### \\boxed{42}", "42"),
        ("#### $\\boxed{42}$", "42"),
        ("#### \\(42\\)", "42"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### .5", "0.5"),
        ("4 * 2 = 8\n#### 8\n\nHope that helps with 3 more!", "8"),
        ("#### 1. Add\nso\n#### 42", "42"),
        ("#### 42\n\n#### Explanation: 7", "42"),
    ],
)
def test_strict_answer_reads(text, value):
    assert strict_answer(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "42", "### 42", "#### the answer is 42", "####", "#### x"])
def test_strict_answer_wants_the_number_after_the_mark(text):
    assert strict_answer(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("so 3 and then 42.", "42"), ("it is -7", "-7"), ("it is $1,000!", "1000"), ("5-3", "3"), ("x = -3.50", "-3.5")],
)
def test_flexible_answer_is_the_last_number(text, value):
    assert flexible_answer(text) == Decimal(value)


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("#### 1000.00", "1,000", {"score": 1.0, "acc": 1.0, "format": 1.0}),
        ("#### 41", "42", {"score": 0.0, "acc": 0.0, "format": 1.0}),
        ("it is 42", 42, {"score": 0.0, "acc": 1.0, "format": 0.0}),
        ("#### 42, found in 3 steps", "42", {"score": 1.0, "acc": 1.0, "format": 1.0}),
        ("no idea", "42", {"score": 0.0, "acc": 0.0, "format": 0.0}),
        ("#### 420", "42", {"score": 0.0, "acc": 0.0, "format": 1.0}),
    ],
)
def test_score(solution, truth, expected):
    assert score_gsm8k("openai/gsm8k", solution, truth, {}) == expected


def test_a_truth_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="holds no number"):
        score_gsm8k("openai/gsm8k", "#### 1", "none", {})


@pytest.mark.parametrize("text", ["#### " * 40_000, "####" + " $" * 100_000, "-" * 200_000, "1{,}" * 50_000])
def test_time_grows_with_length_not_its_square(text):
    start = time.process_time()
    strict_answer(text)
    flexible_answer(text)
    assert time.process_time() - start < 2.0  # measured: 0.1 to 0.3 s; quadratic would be minutes


@pytest.mark.skipif(not REAL.is_file(), reason="the real GSM8K is not beside this checkout")
def test_every_reference_solution_is_right_and_no_other_problems_is():
    records = [json.loads(line) for line in REAL.open(encoding="utf-8")]
    truths = [record["answer"].split("####")[1].strip() for record in records]
    scores = [score_gsm8k("", r["answer"], truth, {})["score"] for r, truth in zip(records, truths, strict=True)]
    assert scores == [1.0] * 1319
    shifted = [score_gsm8k("", r["answer"], truth, {})["score"] for r, truth in zip(records, truths[1:], strict=False)]
    assert sum(shifted) == sum(a == b for a, b in itertools.pairwise(truths))
