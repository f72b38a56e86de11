"""What all engines do with a list of requests before and after they generate."""

from __future__ import annotations

from collections.abc import Iterable

from verl.core.rollout_engine.api import Completion, Request
from verl.core.rollout_engine.sampling import SamplingRule


def check_requests(requests: list[Request]) -> None:
    """ValueError for a request that nothing can be generated for."""
    for i, request in enumerate(requests):
        if not request.prompt_ids:
            raise ValueError(f"request {i} has an empty prompt")
        if request.sampling.max_tokens < 1:
            raise ValueError(f"request {i}: max_tokens is {request.sampling.max_tokens}, it must be at least 1")


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
