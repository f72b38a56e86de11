"""Which sample is in which slot: new ones enter free slots, finished ones leave, the rest stay in slots 0..n-1."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutStats
from verl.core.rollout_engine.requests import take_from
from verl.core.rollout_engine.runner import Runner, Start
from verl.core.rollout_engine.sampling import SamplingRule, stream_key
from verl.core.rollout_engine.slots import Drawn

# New samples wait until this share of the slots is free, so that prompts are computed in batches.
ADMIT_SHARE = 8
# Finished samples stay in the batch until they are this share of it: moving the others costs, and so do idle rows.
COMPACT_SHARE = 16


@dataclass
class Sample:
    """A sample in a slot. drawn: tokens so far, as of the last look at the device; shown: of these, to who watches it."""

    request: int
    index: int
    start: Start
    drawn: int = 0
    shown: int = 0

    @property
    def position(self) -> int:
        return len(self.start.prompt_ids) - 1 + self.drawn


class Schedule:
    """One generation run over requests that share a `SamplingRule`.

    slots: sequences at once. check_every: decode steps between looks at the device. token_budget: prompt tokens computed
    at once. aborted: request numbers to stop, shared with the engine, which may add to it at any time. feed: where further
    requests come from.
    """

    def __init__(
        self,
        runner: Runner,
        requests: dict[int, Request],
        rule: SamplingRule,
        *,
        slots: int,
        check_every: int,
        token_budget: int,
        version: int,
        stats: RolloutStats,
        aborted: set[int],
        feed: Feed | None = None,
    ):
        self._runner, self._requests, self._rule = runner, requests, rule
        self._slots, self._check_every, self._token_budget = slots, check_every, token_budget
        self._version, self._stats, self._aborted = version, stats, aborted
        self._feed, self._taken = feed, len(requests)
        self._watched, self._show = (feed.watched, feed.show) if feed is not None else (set(), None)
        self._waiting: deque[tuple[int, int]] = deque()
        self._left: dict[int, int] = {}  # samples of each request that have not come yet
        self._active: list[Sample] = []  # by slot
        for number, request in requests.items():
            self._queue(number, request)

    def run(self) -> Iterator[tuple[int, int, Completion]]:
        """(request, sample, completion) as samples finish.

        While the caller works on what is yielded, the device is already drawing the next tokens of the others.
        """
        leaving: list[Sample] = []
        drawn: Drawn | None = None
        while True:
            self._take_in(idle=not self._active and not self._waiting and drawn is None)
            yield from self._drop_aborted_waiting()
            self._admit()
            context = self._decode()
            if drawn is not None:
                yield from self._completions(leaving, drawn)
            if self._active:
                leaving, drawn = self._retire(context)
            elif self._feed is None:
                return
            else:
                leaving, drawn = [], None

    def _take_in(self, idle: bool) -> None:
        """Requests that have come meanwhile."""
        if self._feed is None:
            return
        requests = take_from(self._feed, idle)
        if requests is None:
            self._feed = None
        for request in requests or ():
            self._requests[self._taken] = request
            self._queue(self._taken, request)
            self._taken += 1

    def _queue(self, number: int, request: Request) -> None:
        self._left[number] = request.sampling.n
        self._waiting.extend((number, i) for i in range(request.sampling.n))

    def _hand_over(self, request: int) -> None:
        """One of its samples has come. A stream that is fed for hours keeps nothing of what is done."""
        self._left[request] -= 1
        if self._left[request] == 0:
            del self._left[request], self._requests[request]

    def _decode(self) -> int:
        """Launch decode steps; returns a bound above every position they reach."""
        if not self._active:
            return 0
        left = max(s.start.max_tokens - s.drawn for s in self._active)
        steps = min(self._check_every, left)
        context = max(s.position for s in self._active) + steps
        self._runner.decode(len(self._active), steps, context)
        self._stats.decode_steps += steps
        return context

    def _admit(self) -> None:
        free = self._slots - len(self._active)
        enough = min(len(self._waiting), max(1, self._slots // ADMIT_SHARE))
        if not self._waiting or (self._active and free < enough):
            return
        began = time.perf_counter()
        holders = {s.request: s.start for s in self._active}  # slots that hold a request's prompt already
        fresh: list[Start] = []
        copies: list[tuple[Start, Start]] = []
        new: list[Sample] = []
        while self._waiting and len(new) < free:
            sample = self._place(*self._waiting.popleft(), slot=len(self._active) + len(new))
            new.append(sample)
            if sample.request in holders:
                copies.append((holders[sample.request], sample.start))
            else:
                holders[sample.request] = sample.start
                fresh.append(sample.start)
        self._prefill(fresh)
        self._runner.copy_prompts(
            [source.slot for source, _ in copies],
            [target.slot for _, target in copies],
            max((len(target.prompt_ids) - 1 for _, target in copies), default=0),
        )
        self._runner.start([s.start for s in new])
        self._active += new
        self._stats.prefill_seconds += time.perf_counter() - began

    def _place(self, request: int, index: int, slot: int) -> Sample:
        asked = self._requests[request]
        key = stream_key(asked.sampling.seed, asked.stream, asked.first + index)
        return Sample(request, index, Start(slot, asked.prompt_ids, asked.sampling.max_tokens, key))

    def _prefill(self, starts: list[Start]) -> None:
        """Prompts of similar length together, within the token budget (a longer prompt goes alone)."""
        batch: list[Start] = []
        tokens = 0
        for start in sorted(starts, key=lambda s: len(s.prompt_ids)):
            if batch and tokens + len(start.prompt_ids) > self._token_budget:
                self._runner.prefill(batch)
                batch, tokens = [], 0
            batch.append(start)
            tokens += len(start.prompt_ids)
        if batch:
            self._runner.prefill(batch)
        self._stats.prompt_tokens += sum(len(s.prompt_ids) for s in starts)

    def _retire(self, context: int) -> tuple[list[Sample], Drawn | None]:
        """Take finished and aborted samples out of their slots, and close the gaps."""
        done, counts = self._runner.progress(len(self._active))
        for sample, count in zip(self._active, counts):
            sample.drawn = count
        if self._watched:
            self._show_drawn()
        out = [slot for slot, s in enumerate(self._active) if done[slot] or s.request in self._aborted]
        if not out or (len(out) < len(self._active) and len(out) * COMPACT_SHARE < len(self._active)):
            return [], None
        leaving = [self._active[slot] for slot in out]
        drawn = self._runner.collect(out, [s.drawn for s in leaving])
        self._close_gaps(set(out), context)
        return leaving, drawn

    def _show_drawn(self) -> None:
        new = {slot: s for slot, s in enumerate(self._active) if s.request in self._watched and s.drawn > s.shown}
        if not new or self._show is None:
            return
        rows = self._runner.peek(list(new), [(s.shown, s.drawn) for s in new.values()])
        for sample, (tokens, log_probs) in zip(new.values(), rows):
            sample.shown = sample.drawn
            self._show(sample.request, sample.index, tokens, log_probs)

    def _close_gaps(self, out: set[int], context: int) -> None:
        left = len(self._active) - len(out)
        targets = sorted(slot for slot in out if slot < left)
        sources = [slot for slot in range(left, len(self._active)) if slot not in out]
        self._runner.compact(sources, targets, left, context)
        for source, target in zip(sources, targets):
            sample = self._active[source]
            sample.start = replace(sample.start, slot=target)
            self._active[target] = sample
        del self._active[left:]

    def _completions(self, leaving: list[Sample], drawn: Drawn) -> Iterator[tuple[int, int, Completion]]:
        for sample, (tokens, log_probs) in zip(leaving, drawn.rows()):
            if tokens and tokens[-1] in self._rule.stop_token_ids:
                reason = "stop"
            else:
                reason = "length" if len(tokens) >= sample.start.max_tokens else "abort"
            self._stats.response_tokens += len(tokens)
            self._hand_over(sample.request)
            yield sample.request, sample.index, Completion(tokens, log_probs, reason, self._version)

    def _drop_aborted_waiting(self) -> Iterator[tuple[int, int, Completion]]:
        if not self._aborted:
            return
        dropped = [entry for entry in self._waiting if entry[0] in self._aborted]
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in self._aborted)
        for request, index in dropped:
            self._hand_over(request)
            yield request, index, Completion([], [], "abort", self._version)
