"""What every rollout engine takes and gives: token ids in, token ids and log-probs out; nothing is ever re-tokenised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    n: samples a prompt, which computes the prompt once. temperature: 0 is greedy. top_k: -1 is all. stop_token_ids: end a
    sample (the stop token is kept as its last token). ignore_eos: go on to max_tokens whatever comes. seed: two calls with
    equal seed, uids and weights give the same tokens; samples of one prompt have different streams.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One prompt.

    stream: number that, with the sampling seed, selects the random streams of its samples. first: number of the first
    sample; one that goes on after an abort keeps its number, and with it its random stream.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    stream: int = 0
    first: int = 0


@dataclass(frozen=True)
class Feed:
    """Requests that join a stream while it runs.

    take: the stream calls it between decode steps, in the thread that iterates, with True when there is nothing left to
    generate. It returns the requests that join, which are numbered on from those before them; [] for none as yet (it may
    block where there is nothing to generate); or None: no more will come, and the stream ends with what it has.
    sampling: temperature, top_k, top_p and stop tokens are those of every request, max_tokens is no less than any's.
    longest: bound of prompt plus response, in tokens. samples: of how many to make room for at once; more wait.
    watched: numbers of requests whose samples are looked at while they are drawn: `show` gets (request, sample, token ids,
    log-probs) of what each of them drew since the last time, in the same thread. The owner may change the set at any time.
    """

    take: Callable[[bool], list[Request] | None]
    sampling: SamplingParams
    longest: int
    samples: int
    show: Callable[[int, int, list[int], list[float]], None] | None = None
    watched: set[int] = field(default_factory=set)


@dataclass
class Completion:
    """One sample.

    token_ids, log_probs: equally long; log_probs are of the whole distribution at the sampling temperature (temperature 0:
    at 1), before top_k and top_p cut it. finish_reason: "stop" (a stop token), "length", "abort". version: the policy
    version that sampled it.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    version: int = 0


@dataclass
class RolloutStats:
    """Of one generate call. Seconds and counts of tokens."""

    prompt_tokens: int = 0
    response_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """A generation engine.

    version: int, set by load_weights. stats: of the last generate call.
    """

    version: int
    stats: RolloutStats

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in order."""

    def stream(self, requests: list[Request], feed: Feed | None = None) -> Iterator[tuple[int, int, Completion]]:
        """(request index, sample index, completion) as samples finish, in any order. feed: requests that come later."""

    def abort(self, requests: Iterable[int]) -> None:
        """Stop these requests (by index) of the stream in progress, which yields what their samples have so far."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the weights, named as in the Hugging Face checkpoint, and clear whatever was computed with the old ones."""

    def sleep(self) -> None:
        """Give back the memory that only generation needs."""

    def wake(self) -> None:
        """Undo sleep."""

    def close(self) -> None:
        """Stop processes and free memory."""
