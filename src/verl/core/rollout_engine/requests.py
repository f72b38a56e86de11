"""What all engines do with a list of requests before and after they generate."""

from __future__ import annotations

import math
from collections.abc import Iterable

from verl.core.rollout_engine.api import Completion, Feed, Request
from verl.core.rollout_engine.sampling import SamplingRule
from verl.errors import UserError


def check_requests(requests: list[Request]) -> None:
    """ValueError for a request that nothing can be generated for."""
    for i, request in enumerate(requests):
        if not request.prompt_ids:
            raise ValueError(f"request {i} has an empty prompt")
        if request.sampling.max_tokens < 1:
            raise ValueError(f"request {i}: max_tokens is {request.sampling.max_tokens}, it must be at least 1")


def check_fits(requests: list[Request], feed: Feed) -> None:
    """ValueError for a request that does not fit what the feed says of all of them."""
    rule = SamplingRule.of(feed.sampling)
    for i, request in enumerate(requests):
        if SamplingRule.of(request.sampling) != rule:
            raise ValueError(f"request {i} is sampled in another way than its feed says")
        most = request.sampling.max_tokens
        longest = len(request.prompt_ids) + most
        if longest > feed.longest or most > feed.sampling.max_tokens:
            raise ValueError(
                f"request {i} may reach {longest} tokens, {most} of them new; its feed says at most {feed.longest}, "
                f"{feed.sampling.max_tokens} of them new"
            )


def take_from(feed: Feed, idle: bool) -> list[Request] | None:
    """What `feed.take` gives, checked."""
    requests = feed.take(idle)
    if requests:
        check_requests(requests)
        check_fits(requests, feed)
    return requests


def check_finite(completion: Completion) -> None:
    """UserError for a sample with a log-prob that is not a number: the weights have diverged.

    Looked at here, on numbers that are on the host already, so that no decode step waits for an answer.
    """
    if not math.isfinite(sum(completion.log_probs)):
        raise UserError(
            "The policy's logits are not finite: its weights have diverged. Lower the learning rate "
            "(actor_rollout_ref.actor.optim.lr), and go on from a checkpoint from before that with "
            "trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N, or start anew with "
            "trainer.resume_mode=disable."
        )


def by_rule(requests: list[Request]) -> dict[SamplingRule, dict[int, Request]]:
    """Requests by what a decode step has to have in common: rule -> {index in the list: request}."""
    groups: dict[SamplingRule, dict[int, Request]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(SamplingRule.of(request.sampling), {})[i] = request
    return groups


def assemble(requests: list[Request], stream: Iterable[tuple[int, int, Completion]]) -> list[list[Completion]]:
    """Completions of a stream in the order of the requests and of their samples."""
    found = {(request, sample): completion for request, sample, completion in stream}
    return [[found[r, i] for i in range(request.sampling.n)] for r, request in enumerate(requests)]
