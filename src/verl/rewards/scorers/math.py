"""Competition mathematics: answers compared as mathematics, not as text, by math-verify."""

from __future__ import annotations

import logging
from typing import Any

from verl.rewards.registry import register_scorer

SECONDS_A_SAMPLE = 10.0


@register_scorer(
    "lighteval/MATH*",
    "DigitalLearningGmbH/MATH*",
    "HuggingFaceH4/MATH*",
    "math*",
    "aime*",
    "*/aime*",
    timeout=SECONDS_A_SAMPLE,
    imports=("math_verify",),
)
def score_math(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, Any]:
    """Score 1 if the response's final answer equals the ground truth; `format` is 1 if it is in a `\\boxed{}`; `pred` is the answer.

    Runs in a worker process: symbolic comparison may take for ever on a strange answer, and is then a counted failure.
    """
    from math_verify import parse, verify

    # Its own limits return "not equal" without a word when they strike; the worker's limit is counted.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    truth_text = str(ground_truth).strip()
    marked = "\\boxed" in truth_text or "$" in truth_text
    truth = parse(truth_text if marked else f"\\boxed{{{truth_text}}}", parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground_truth {ground_truth!r} is no answer that math-verify can read")
    answer = parse(solution_str, parsing_timeout=None)
    return {
        "score": float(bool(verify(truth, answer, timeout_seconds=None))),
        "format": float("\\boxed{" in solution_str),
        "pred": str(answer[-1]) if answer else None,
    }
