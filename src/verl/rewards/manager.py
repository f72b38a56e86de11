"""The reward manager: from samples to scores, in this process where that is quick, in worker processes elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import verl.rewards.scorers  # noqa: F401  (registers the built-in scorers)
from verl.config.compose import print_notice
from verl.errors import RewardError
from verl.rewards.custom import CustomFunction
from verl.rewards.outcome import score_in_process, with_model_score
from verl.rewards.pool import START_SECONDS, Listener, PoolJob, WorkerPool
from verl.rewards.registry import Scorer, check_data_sources, find_scorer, make_shaper
from verl.rewards.types import Outcome, RewardInput, RewardResult, ScoringModel
from verl.rewards.worker import is_async

if TYPE_CHECKING:
    from verl.config.schema import CustomRewardConfig, RewardConfig, RewardModelConfig

MESSAGES_KEPT = 5
CONCURRENT_CALLS = 256
"""Calls of an async function that one worker has under way at once."""


NOT_YET = RewardInput("", "")
"""Holds the place of a sample that has not come."""

SLOWER_IN_WORKERS = 10
"""So many times as long as here may the import of the user's file take in a worker, where that is over a minute."""


SLOW_IMPORT_SECONDS = 15.0


@contextlib.contextmanager
def _said_if_slow(path: str) -> Iterator[None]:
    """Tells the user what the run waits for, should the import of their file take long."""
    said = f"custom_reward_function.path={path} is still being imported after {SLOW_IMPORT_SECONDS:g} s."
    timer = threading.Timer(SLOW_IMPORT_SECONDS, print_notice, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RewardHandle:
    """Scores of `count` samples that come together or in parts. `result` waits for them; it may be called again."""

    def __init__(self, manager: RewardManager, count: int):
        self._manager = manager
        self._samples: list[RewardInput] = [NOT_YET] * count
        self._outcomes: list[Outcome | None] = [None] * count
        self._jobs: list[tuple[PoolJob, list[int]]] = []
        self._result: RewardResult | None = None

    def add(self, indices: Sequence[int], samples: list[RewardInput], listener: Listener | None = None) -> None:
        """Start scoring these samples, which have these places among all of them."""
        for index, sample in zip(indices, samples, strict=True):
            self._samples[index] = sample
        done, jobs = self._manager.start(samples, listener)
        for number, outcome in done.items():
            self._outcomes[indices[number]] = outcome
        self._jobs += [(job, [indices[number] for number in numbers]) for job, numbers in jobs]

    def result(self) -> RewardResult:
        """Raises RewardError when more than `reward.max_failure_ratio` of the samples failed."""
        if self._result is None:
            scored = self._manager.model_outcomes(self._samples)  # while functions run in other processes
            for job, indices in self._jobs:
                for index, outcome in zip(indices, job.wait(), strict=True):
                    self._outcomes[index] = outcome
            self._result = self._manager.finish(self._samples, self._outcomes, scored)
        return self._result


class _Renumbered:
    """A listener for some of the samples that were submitted together."""

    def __init__(self, listener: Listener, indices: list[int]):
        self._listener, self._indices = listener, indices

    def scored(self, index: int, outcome: Outcome) -> None:
        self._listener.scored(self._indices[index], outcome)

    def stopped(self, error: BaseException) -> None:
        self._listener.stopped(error)


def _answer(outcome: Outcome, sample: RewardInput) -> str | None:
    """What the reward function says that the sample answers, or else what its scorer reads out of it."""
    if outcome.answer is not None:
        return outcome.answer
    scorer = find_scorer(sample.data_source)
    return scorer.answer(sample.solution_str) if scorer is not None and scorer.answer is not None else None


class RewardManager:
    """Scores samples with the user's function where there is one, else with the scorer of each data_source.

    With a reward model, `attach` brings it; its score stands in the place of those, or is added to them.

    >>> with RewardManager(RewardConfig(), CustomRewardConfig()) as manager:          # doctest: +SKIP
    ...     manager.check({"openai/gsm8k"})          # before training: loads, checks, starts workers if needed
    ...     handle = manager.submit(samples)         # scoring runs while generation goes on
    ...     scores = handle.result().scores
    """

    def __init__(self, reward: RewardConfig, custom: CustomRewardConfig, model: RewardModelConfig | None = None):
        self.config = reward
        self.model_config = model if model is not None and model.enable else None
        self.uses_rules = self.model_config is None or self.model_config.combine == "add"
        self._model: ScoringModel | None = None
        self.custom = CustomFunction(custom.path, custom.name, dict(custom.reward_kwargs)) if custom.path else None
        self._shape = make_shaper(reward)
        self._pool = WorkerPool(reward.num_workers, self.custom)
        self._chunk: int | None = None
        self._checked = False

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self, data_sources: Iterable[str] = ()) -> None:
        """Load the user's function, check its signature, find a scorer for every data_source; RewardError if not.

        Starts the worker processes in the background when one of the functions needs them.
        """
        if not self.uses_rules:
            self._checked = True
            return
        names = set(data_sources)
        limit = max(START_SECONDS, self.config.timeout)
        check_data_sources(names, self.custom is not None)
        if self.custom is not None:
            began = time.monotonic()
            with _said_if_slow(self.custom.path):
                self._chunk = CONCURRENT_CALLS if is_async(self.custom.load()) else None
            # Several workers load it at once, each more slowly than this process alone.
            limit = max(limit, SLOWER_IN_WORKERS * (time.monotonic() - began))
            names = set()
        self._checked = True
        slow = [scorer for scorer in map(find_scorer, names) if not scorer.quick]
        if self.custom is not None or slow:
            self._pool.start(tuple(sorted({module for scorer in slow for module in scorer.imports})), limit)

    def expect(self, count: int) -> RewardHandle:
        """For `count` samples that are to come in parts."""
        return RewardHandle(self, count)

    def submit(self, samples: list[RewardInput], listener: Listener | None = None) -> RewardHandle:
        """Start scoring. Quick built-in scorers are done when this returns. listener: hears of each outcome as it comes;
        of None where a reward model alone scores, which it does in `finish`.
        """
        handle = self.expect(len(samples))
        handle.add(range(len(samples)), samples, listener)
        return handle

    def start(
        self, samples: list[RewardInput], listener: Listener | None = None
    ) -> tuple[dict[int, Outcome], list[tuple[PoolJob, list[int]]]]:
        """(outcomes that are there at once, by the sample's number; work under way, and the samples that it is about)."""
        if not self._checked:
            self.check(sample.data_source for sample in samples)
        if not self.uses_rules:
            for index in range(len(samples) if listener is not None else 0):
                listener.scored(index, None)
            return {}, []
        if self.custom is not None:
            job = self._pool.submit(None, samples, self.config.timeout, self._chunk, listener)
            return {}, [(job, list(range(len(samples))))]
        check_data_sources({sample.data_source for sample in samples}, has_custom=False)
        scorers = {name: find_scorer(name) for name in {sample.data_source for sample in samples}}
        slow: dict[str, list[int]] = {}
        done: dict[int, Outcome] = {}
        for index, sample in enumerate(samples):
            scorer = scorers[sample.data_source]
            if scorer.quick:
                done[index] = score_in_process(scorer.function, sample)
                if listener is not None:
                    listener.scored(index, done[index])
            else:
                slow.setdefault(sample.data_source, []).append(index)
        return done, [self._in_workers(scorers[name], samples, i, listener) for name, i in slow.items()]

    def _in_workers(
        self, scorer: Scorer, samples: list[RewardInput], indices: list[int], listener: Listener | None
    ) -> tuple[PoolJob, list[int]]:
        limit = min(scorer.timeout, self.config.timeout)
        chosen, renumbered = [samples[i] for i in indices], _Renumbered(listener, indices) if listener else None
        return self._pool.submit(scorer.function, chosen, limit, listener=renumbered), indices

    def attach(self, model: ScoringModel) -> None:
        """The reward model; its outcomes are taken when a handle's result is asked for."""
        self._model = model

    def model_outcomes(self, samples: list[RewardInput]) -> list[Outcome] | None:
        """What the reward model says of the samples; None where the config has none."""
        if self.model_config is None:
            return None
        if self._model is None:
            raise RuntimeError("RewardManager: reward_model.enable=True, and no model is attached")
        return self._model.score(samples)

    def score(self, samples: list[RewardInput]) -> RewardResult:
        """Scores of the samples, now."""
        return self.submit(samples).result()

    def finish(
        self, samples: list[RewardInput], outcomes: list[Outcome | None], of_model: list[Outcome] | None = None
    ) -> RewardResult:
        """The result of a batch from what the functions said. of_model: what the reward model said; None: it is asked now."""
        if of_model is None:
            of_model = self.model_outcomes(samples)
        if of_model is not None and self.model_config is not None:
            weight = self.model_config.weight
            outcomes = [with_model_score(*pair, weight) for pair in zip(outcomes, of_model, strict=True)]
        return self.assemble(samples, outcomes)

    def assemble(self, samples: list[RewardInput], outcomes: list[Outcome]) -> RewardResult:
        """Align outcomes with samples, count failures, apply the reward manager's shaping."""
        failed = [i for i, outcome in enumerate(outcomes) if outcome.score is None]
        messages = [f"sample {i}: {outcomes[i].error}" for i in failed[:MESSAGES_KEPT]]
        if len(failed) > self.config.max_failure_ratio * len(samples):
            raise RewardError(
                f"{len(failed)} of {len(samples)} rewards failed, more than "
                f"reward.max_failure_ratio={self.config.max_failure_ratio:g} allows. The first: {messages[0]}"
            )
        names = dict.fromkeys(name for outcome in outcomes for name in outcome.metrics)
        result = RewardResult(
            scores=[self.config.failure_score if o.score is None else o.score for o in outcomes],
            metrics={name: [outcome.metrics.get(name) for outcome in outcomes] for name in names},
            answers=[_answer(outcome, sample) for outcome, sample in zip(outcomes, samples)],
            failed=failed,
            failure_messages=messages,
        )
        return self._shape(samples, result)

    def look_after(self) -> None:
        """Find chunks that were lost with a worker. Whoever has a listener instead of waiting calls this now and then."""
        self._pool.look_after()

    def close(self) -> None:
        """End the worker processes, and free the reward model."""
        self._pool.close()
        if self._model is not None:
            self._model.close()
