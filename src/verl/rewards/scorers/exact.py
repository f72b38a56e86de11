"""Exact text: for small tasks whose answer has one spelling."""

from typing import Any

from verl.rewards.registry import register_scorer


@register_scorer("tiny/*", quick=True, answer=str.strip)
def score_exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> float:
    """1 if the response is the ground truth and nothing else, white space at both ends aside.

    >>> score_exact("tiny/add", " 42\\n", 42, {}), score_exact("tiny/add", "42 or 43", 42, {})
    (1.0, 0.0)
    """
    if not isinstance(ground_truth, (str, int, float)):
        raise ValueError(f"ground_truth {ground_truth!r} is neither a text nor a number")
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)  # pandas makes floats of a column of whole numbers with gaps
    return float(solution_str.strip() == str(ground_truth).strip())
