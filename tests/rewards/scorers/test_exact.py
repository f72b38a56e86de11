import pytest

from verl.rewards.scorers.exact import score_exact


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (" 42\n", "42", 1.0),
        ("42", 42, 1.0),
        ("42", 42.0, 1.0),
        ("42.0", 42.0, 0.0),
        ("4.5", 4.5, 1.0),
        ("42 or 43", "42", 0.0),
    ],
)
def test_text_and_numbers_are_compared_as_they_are_written(response, truth, score):
    assert score_exact("tiny/x", response, truth, {}) == score


@pytest.mark.parametrize("truth", [["42"], {"a": "42"}, b"42"])
def test_a_truth_that_no_response_could_equal_is_a_failure_not_a_score_of_0(truth):
    with pytest.raises(ValueError, match="is neither a text nor a number"):
        score_exact("tiny/x", "42", truth, {})
