"""Scores from a judge: a model is asked about each response, and its answer read, by two functions of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.core.rollout_engine.api import Completion, Request, RolloutEngine, SamplingParams
from verl.errors import RewardError
from verl.rewards.custom import load_module
from verl.rewards.outcome import call_arguments, failure, raised, read_outcome
from verl.rewards.types import Outcome, RewardInput

RUBRIC = """You rate how well an assistant answers. Consider whether the answer is right, whether it does what was asked, \
and whether it is clear; length is no merit.

The conversation:
{conversation}

The answer to rate:
{answer}
{reference}
Give your reasons in a few sentences. Then end with one line of the form
Rating: N
where N is a whole number from 0 (useless) to 10 (could not be better)."""

_RATING = re.compile(r"rating\W{0,5}(\d+(?:\.\d+)?)", re.IGNORECASE)


def rubric_prompt(solution_str: str, ground_truth: Any, messages: list[dict[str, Any]], **_: Any) -> str:
    """The built-in question: rate the answer from 0 to 10; the ground truth is shown where there is one."""
    return RUBRIC.format(
        conversation="\n".join(f"[{message['role']}] {message['content']}" for message in messages),
        answer=solution_str,
        reference="" if ground_truth is None else f"\nThe reference, which is right:\n{ground_truth}\n",
    )


def rubric_score(judgement: str, **_: Any) -> float:
    """The last rating that the judge wrote, divided by 10.

    Raises:
        ValueError: there is none, or it is not from 0 to 10.

    >>> rubric_score("Mostly right. Rating: 3? No:\\n**Rating:** 7")
    0.7
    """
    found = _RATING.findall(judgement)
    if not found or not 0 <= float(found[-1]) <= 10:
        raise ValueError(f"no line 'Rating: N' with N from 0 to 10 in the judgement: …{judgement[-200:]!r}")
    return float(found[-1]) / 10


@dataclass(frozen=True)
class JudgeFunctions:
    """ask: keyword arguments of a reward function and messages=PROMPT -> a text or chat messages. read: the same but
    judgement=TEXT in the place of messages -> what a reward function returns."""

    ask: Callable[..., Any] = rubric_prompt
    read: Callable[..., Any] = rubric_score

    @classmethod
    def load(cls, path: str | None, prompt_function: str, score_function: str) -> JudgeFunctions:
        """Those of a Python file; without one the built-in rubric.

        Raises:
            RewardError: the file or a function is not there.
        """
        if path is None:
            return cls()
        module = load_module(path, "reward_model.judge.path")
        for key, name in (("prompt_function", prompt_function), ("score_function", score_function)):
            if not callable(getattr(module, name, None)):
                raise RewardError(
                    f"reward_model.judge.{key}={name} is not a function of {path}. Add it, or name another: "
                    "def judge_prompt(data_source, solution_str, ground_truth, extra_info, messages) and "
                    "def judge_score(judgement, data_source, solution_str, ground_truth, extra_info)."
                )
        return cls(getattr(module, prompt_function), getattr(module, score_function))


class Judge:
    """Asks a model on a rollout engine about every response, all at once."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        functions: JudgeFunctions,
        sampling: SamplingParams,
        max_prompt_length: int,
    ):
        self._engine, self._tokenizer, self._functions = engine, tokenizer, functions
        self._sampling, self._max_prompt_length = sampling, max_prompt_length

    def score(self, samples: list[RewardInput]) -> list[Outcome]:
        """What the user's function reads from each judgement; where a function raises, or a question is too long, a failure."""
        outcomes: list[Outcome | None] = [None] * len(samples)
        questions: dict[int, list[int]] = {}
        for number, sample in enumerate(samples):
            asked = self._question(sample)
            if isinstance(asked, Outcome):
                outcomes[number] = asked
            else:
                questions[number] = asked
        for number, judgement in zip(questions, self._ask(list(questions.values())), strict=True):
            outcomes[number] = self._read(judgement, samples[number])
        return outcomes

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _question(self, sample: RewardInput) -> list[int] | Outcome:
        """Token ids of the question, or why there is none."""
        try:
            asked = self._functions.ask(**call_arguments(sample), messages=sample.messages)
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "content" in m for m in messages):
                raise TypeError(f"return a text or a list of chat messages, not {asked!r:.200}")
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            return failure(raised(error, "the function that asks the judge (reward_model.judge)"), sample)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not 0 < len(ids) <= self._max_prompt_length:
            limit = f"reward_model.rollout.prompt_length={self._max_prompt_length}"
            return failure(f"the question to the judge has {len(ids)} tokens; it takes 1 to {limit}", sample)
        return ids

    def _ask(self, questions: list[list[int]]) -> list[Completion]:
        """The judgement of each question. The cache is given back: the policy's engine works on the same device."""
        if not questions:
            return []
        self._engine.wake()
        try:
            requests = [Request(ids, self._sampling, number) for number, ids in enumerate(questions)]
            return [completions[0] for completions in self._engine.generate(requests)]
        finally:
            self._engine.sleep()

    def _read(self, judgement: Completion, sample: RewardInput) -> Outcome:
        text = self._tokenizer.decode(judgement.token_ids, skip_special_tokens=True)
        try:
            outcome = read_outcome(self._functions.read(judgement=text, **call_arguments(sample)), sample)
        except Exception as error:
            outcome = failure(raised(error, "the function that reads the judgement (reward_model.judge)"), sample)
        cut = judgement.finish_reason == "length"
        if outcome.score is None and cut:
            limit = self._sampling.max_tokens
            note = f"the judgement was cut at reward_model.rollout.response_length={limit} tokens; "
            return outcome._replace(error=note + outcome.error)
        return outcome
