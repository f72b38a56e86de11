"""What goes into a reward function and what comes out of a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

ScoreFunction = Callable[..., Any]
"""`f(*, data_source, solution_str, ground_truth, extra_info)`, sync or async, to a number or a dict with `score`."""


@dataclass(frozen=True)
class RewardInput:
    """One sample to score: the response's text and what the prompt's row says about it.

    response_length: tokens that the policy chose; None where it is not known. messages: the prompt, as chat messages.
    """

    data_source: str
    solution_str: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    response_length: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)


class Outcome(NamedTuple):
    """Of one sample: a score with further metrics, or (score None) why there is none.

    answer: the text that the reward function took for the answer (`pred` in its dict), for votes among samples.
    """

    score: float | None
    metrics: dict[str, float]
    error: str = ""
    answer: str | None = None


class ScoringModel(Protocol):
    """A model that scores responses: a classifier or a judge."""

    def score(self, samples: list[RewardInput]) -> list[Outcome]:
        """One outcome a sample, in order; failures are outcomes too."""

    def close(self) -> None:
        """Free its memory."""


@dataclass
class RewardResult:
    """Of one batch of B samples.

    scores: B floats, in the order of the samples; a failed sample has `reward.failure_score`.
    metrics: name -> B values; None where that sample's function did not report it.
    failed: indices of the samples that failed. failure_messages: the first few, with the user's traceback.
    answers: what each sample was taken to answer, None where that is not known.
    """

    scores: list[float]
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    failure_messages: list[str] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return len(self.failed)

    def metric_means(self) -> dict[str, float]:
        """Mean of each metric over the samples that have it.

        >>> RewardResult([1.0, 0.0], {"acc": [1.0, None]}).metric_means()
        {'acc': 1.0}
        """
        present = {name: [v for v in values if v is not None] for name, values in self.metrics.items()}
        return {name: sum(values) / len(values) for name, values in present.items() if values}
