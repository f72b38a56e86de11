"""From whatever a reward function returns or raises to an `Outcome`."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from numbers import Real
from typing import Any

from verl.rewards.types import Outcome, RewardInput, ScoreFunction

SHOWN_CHARACTERS = 300
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""3.4e38. Scores are trained on in float32, where a larger one would be infinite."""


def call_arguments(sample: RewardInput) -> dict[str, Any]:
    """The four keyword arguments of every reward function."""
    return {
        "data_source": sample.data_source,
        "solution_str": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def score_in_process(function: ScoreFunction, sample: RewardInput) -> Outcome:
    """Call a quick, synchronous scorer here, without a time limit."""
    try:
        return read_outcome(function(**call_arguments(sample)), sample)
    except KeyboardInterrupt:  # this process is the trainer's: Ctrl-C is meant for it
        raise
    except BaseException as error:
        return failure(raised(error), sample)


def read_outcome(value: Any, sample: RewardInput) -> Outcome:
    """Check a returned value: a number that is finite in float32, or a mapping with `score` and further metrics.

    Numbers may be Python, numpy or 0-d tensors. A metric that is not a finite number (a string, None, NaN) counts as
    not reported; a score that is not one makes the sample a failure.

    >>> read_outcome({"score": True, "format": 0, "note": "x"}, RewardInput("d", "s"))
    Outcome(score=1.0, metrics={'format': 0.0}, error='', answer=None)
    """
    metrics: dict[str, float] = {}
    score, answer = value, None
    if isinstance(value, Mapping):
        if "score" not in value:
            return failure(
                f"the reward function returned a dict without 'score': it has {sorted(map(str, value))}", sample
            )
        score = value["score"]
        answer = str(value["pred"]) if value.get("pred") is not None else None
        numbers = {str(name): as_number(item) for name, item in value.items() if name != "score"}
        metrics = {name: number for name, number in numbers.items() if number is not None}
    number = as_number(score)
    if number is None:
        wanted = "return a finite number (at most 3.4e38, as in float32), or a dict with one under 'score'"
        return failure(f"the reward function returned {score!r:.100} ({type(score).__name__}); {wanted}", sample)
    return Outcome(number, metrics, answer=answer)


def with_model_score(rule: Outcome | None, model: Outcome, weight: float) -> Outcome:
    """The outcome of a sample that a model scored too: `rule`'s score, if there is one, plus `weight` times the model's.

    Both scores are reported, as rule_score and rm_score. If either failed, the sample has.

    >>> with_model_score(Outcome(1.0, {"acc": 1.0}), Outcome(-4.0, {}), 0.5)
    Outcome(score=-1.0, metrics={'acc': 1.0, 'rule_score': 1.0, 'rm_score': -4.0}, error='', answer=None)
    """
    for outcome in (rule, model):
        if outcome is not None and outcome.score is None:
            return outcome
    if rule is None:
        return Outcome(weight * model.score, {**model.metrics, "rm_score": model.score}, answer=model.answer)
    metrics = {**rule.metrics, **model.metrics, "rule_score": rule.score, "rm_score": model.score}
    answer = rule.answer if rule.answer is not None else model.answer
    return Outcome(rule.score + weight * model.score, metrics, answer=answer)


def as_number(value: Any) -> float | None:
    """A float that is finite in float32 too, or None. Anything with one element and `.item()` (numpy, torch) is a number."""
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if abs(number) <= FLOAT32_MAX else None  # NaN compares as False


def raised(error: BaseException, who: str = "the reward function") -> str:
    """What `who` raised, as the user's part of the traceback: the first frame is ours."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return f"{who} raised {type(error).__name__}\n{text}"


def failure(reason: str, sample: RewardInput) -> Outcome:
    """A failed outcome whose message shows the sample."""
    head, _, details = reason.partition("\n")
    message = (
        f"{head}\n  data_source: {sample.data_source}\n  ground_truth: {_shown(sample.ground_truth)}\n"
        f"  solution_str: {_shown(sample.solution_str)}"
    )
    return Outcome(None, {}, f"{message}\n{details}" if details else message)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"
