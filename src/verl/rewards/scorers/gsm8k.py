"""GSM8K: grade-school word problems whose answer is one number after `####`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from verl.rewards.registry import register_scorer

# A minus sign counts where no operand stands before it: "5-3" holds 5 and 3.
NUMBER = r"(?:(?<![\w).])[-−+])?(?:\\?[$£€¥][-−+]?)?(?:\d[\d,]*(?:\{,\}\d+)*(?:\.\d+)?|\.\d+)"
# What may stand between the mark and the number: space, Markdown emphasis, a LaTeX box or maths delimiter.
DECORATION = r"(?:\\boxed\{|\\text\{|\\[(\[]|\\ |[\s*_`({\[=:]|\$(?=[\s\\*({$]))*"
STRICT = re.compile(rf"####{DECORATION}({NUMBER})")
ANY_NUMBER = re.compile(NUMBER)
NOT_DIGITS = re.compile(r"[^\d.]")


def strict_answer(text: str) -> Decimal | None:
    """The number after the last `####` that has one.

    >>> [str(strict_answer(t)) for t in ("#### 42.", "####$1,000 in all", r"#### **$\\boxed{-3}$**", "it is 42")]
    ['42', '1000', '-3', 'None']
    """
    found = STRICT.findall(text)
    return as_decimal(found[-1]) if found else None


def flexible_answer(text: str) -> Decimal | None:
    """The last number in the text, wherever it stands."""
    found = ANY_NUMBER.findall(text)
    return as_decimal(found[-1]) if found else None


def as_decimal(number: str) -> Decimal:
    """The value of a text that NUMBER matches: signs are kept, currency and thousands separators are not."""
    negative = "-" in number or "−" in number
    value = Decimal(NOT_DIGITS.sub("", number))
    return -value if negative else value


def answer_text(text: str) -> str | None:
    """`strict_answer` in its shortest form, so that 42 and 42.0 are one vote."""
    value = strict_answer(text)
    return None if value is None else f"{value.normalize():f}"


@register_scorer("openai/gsm8k", "gsm8k", quick=True, answer=answer_text)
def score_gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, float]:
    """Score 1 if the number after the last `####` equals the ground truth.

    Metrics: `format` is 1 if there is such a number; `acc` is 1 if the last number anywhere is right, so that a model
    that reasons well and forgets the mark can be told from one that does neither.
    """
    truth = flexible_answer(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth!r} holds no number")
    strict = strict_answer(solution_str)
    right = strict is not None and strict == truth
    return {
        "score": float(right),
        "acc": float(right or flexible_answer(solution_str) == truth),
        "format": float(strict is not None),
    }
