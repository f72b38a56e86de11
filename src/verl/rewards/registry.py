"""Which scorer belongs to which data_source, and which reward managers there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from verl.errors import RewardError
from verl.rewards.types import RewardInput, RewardResult, ScoreFunction

if TYPE_CHECKING:
    from verl.config.schema import RewardConfig

Shaper = Callable[[list[RewardInput], RewardResult], RewardResult]
"""A reward manager's own part: from plain scores to rewards, for instance with a length penalty."""


@dataclass(frozen=True)
class Scorer:
    """A score function and where it runs.

    quick: it takes microseconds and cannot hang, so it runs in the trainer's process. Others run in worker processes.
    timeout: seconds a sample, where that is below `reward.timeout`.
    imports: modules that a worker imports as it starts, so that their loading does not count as a sample's time.
    answer: reads the answer out of a response, for votes among samples; the function may also report it as `pred`.
    """

    function: ScoreFunction
    quick: bool = False
    timeout: float = float("inf")
    imports: tuple[str, ...] = ()
    answer: Callable[[str], str | None] | None = None


_SCORERS: dict[str, Scorer] = {}
_MANAGERS: dict[str, Callable[[RewardConfig], Shaper]] = {}


def register_scorer(
    *data_sources: str,
    quick: bool = False,
    timeout: float = float("inf"),
    imports: tuple[str, ...] = (),
    answer: Callable[[str], str | None] | None = None,
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Decorator: use this function for these data_sources. Names are case-insensitive and may hold `*` and `?`.

    A later registration of the same name replaces the earlier one. A scorer that is not quick is sent to worker
    processes by reference, so it has to live in an importable module.
    """

    def decorate(function: ScoreFunction) -> ScoreFunction:
        for name in data_sources:
            _SCORERS[name.lower()] = Scorer(function, quick, timeout, imports, answer)
        return function

    return decorate


def find_scorer(data_source: str) -> Scorer | None:
    """The scorer of a data_source: of the exact name, else of the longest pattern that fits, else None."""
    name = data_source.lower()
    if name in _SCORERS:
        return _SCORERS[name]
    fitting = [pattern for pattern in _SCORERS if fnmatchcase(name, pattern)]
    return _SCORERS[max(fitting, key=len)] if fitting else None


def check_data_sources(names: Iterable[str], has_custom: bool) -> None:
    """Raise RewardError for data_sources that nothing can score. A custom function scores every data_source."""
    if has_custom:
        return
    known = sorted(_SCORERS)
    unknown = sorted({name for name in names if find_scorer(name) is None})
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0].lower(), known, n=1)
    raise RewardError(
        f"No scorer for data_source {', '.join(repr(name) for name in unknown)}."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" Known: {', '.join(known)}. Correct the column 'data_source' of your data, or give a function of your own "
        "with custom_reward_function.path=FILE.py custom_reward_function.name=FUNCTION."
    )


def register_reward_manager(
    name: str,
) -> Callable[[Callable[[RewardConfig], Shaper]], Callable[[RewardConfig], Shaper]]:
    """Decorator for a factory: from `RewardConfig` to a function `(samples, result) -> result`."""

    def decorate(factory: Callable[[RewardConfig], Shaper]) -> Callable[[RewardConfig], Shaper]:
        _MANAGERS[name] = factory
        return factory

    return decorate


def make_shaper(config: RewardConfig) -> Shaper:
    """The reward manager that `reward.reward_manager.name` names."""
    name = config.reward_manager.name
    if name not in _MANAGERS:
        near = difflib.get_close_matches(name, _MANAGERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RewardError(f"reward.reward_manager.name={name} is unknown.{hint} Known: {', '.join(sorted(_MANAGERS))}.")
    return _MANAGERS[name](config)


@register_reward_manager("naive")
def naive(config: RewardConfig) -> Shaper:
    """The score is the reward."""
    return lambda samples, result: result


@register_reward_manager("dapo")
def dapo(config: RewardConfig) -> Shaper:
    """DAPO: the score, minus up to `penalty_factor` over the last `len` tokens before `max_resp_len` (Yu et al. 2025).

    `acc` is the score before that, where the reward function reports none of its own: groups are to be compared by it.
    """
    buffer, limit = config.reward_kwargs.overlong_buffer_cfg, config.reward_kwargs.max_resp_len

    def shape(samples: list[RewardInput], result: RewardResult) -> RewardResult:
        metrics = {"acc": list(result.scores), **result.metrics}
        if not buffer.enable:
            return replace(result, metrics=metrics)
        import torch  # this module is also imported by workers, which do without

        from verl.algorithms.filtering import overlong_penalty

        lengths = torch.tensor([sample.response_length or 0 for sample in samples], dtype=torch.int64)
        penalties = overlong_penalty(lengths, limit, buffer.len, buffer.penalty_factor).tolist()
        if buffer.log:
            metrics |= {"overlong_reward": penalties, "overlong": [float(p < 0) for p in penalties]}
        return replace(result, scores=[s + p for s, p in zip(result.scores, penalties)], metrics=metrics)

    return shape
