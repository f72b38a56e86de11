"""Answers equal as mathematics."""

import pytest

from verl.rewards.scorers.math import score_math


@pytest.mark.parametrize(
    ("truth", "solution", "score", "boxed"),
    [
        ("\\frac{1}{2}", "so it is $\\boxed{0.5}$", 1.0, 1.0),
        ("42", "The answer is 42.", 1.0, 0.0),
        ("x^2+1", "\\boxed{1+x^2}", 1.0, 1.0),
        ("$18$", "\\boxed{18}", 1.0, 1.0),
        ("42", "\\boxed{43}", 0.0, 1.0),
        ("42", "I do not know", 0.0, 0.0),
    ],
)
def test_score(truth, solution, score, boxed):
    got = score_math("math", solution, truth, {})
    assert (got["score"], got["format"]) == (score, boxed)


def test_the_answer_is_reported_for_votes():
    assert score_math("math", "so $x = \\boxed{18}$", "18", {})["pred"] == "18"
    assert score_math("math", "I do not know", "18", {})["pred"] is None


def test_an_unreadable_truth_is_an_error():
    with pytest.raises(ValueError, match="no answer that math-verify can read"):
        score_math("math", "\\boxed{1}", "", {})
