"""The schedule alone, on a runner that draws a fixed number of tokens for each request and remembers what it was told."""

import pytest

from verl.core.rollout_engine.api import Feed, Request, RolloutStats, SamplingParams
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.scheduler import Schedule


class CountingRunner:
    """Slots hold (request's first token, tokens drawn); a sample is done after as many tokens as its first token says."""

    def __init__(self, slots):
        self.rows = [None] * slots
        self.prompts = []
        self.batches = []
        self.decoded = []
        self.copies = []

    def prefill(self, starts):
        self.batches.append([s.prompt_ids[0] for s in starts])
        for s in starts:
            self.rows[s.slot] = {"prompt": s.prompt_ids}

    def copy_prompts(self, sources, targets, length):
        for source, target in zip(sources, targets):
            self.copies.append(self.rows[source]["prompt"][0])
            self.rows[target] = dict(self.rows[source])

    def start(self, starts):
        for s in starts:
            assert self.rows[s.slot]["prompt"] == s.prompt_ids, "the slot holds the prompt that starts in it"
            self.rows[s.slot] = {"prompt": s.prompt_ids, "drawn": 0, "end": min(s.max_tokens, s.prompt_ids[0])}

    def decode(self, n, steps, context):
        self.decoded.append(n)
        for row in self.rows[:n]:
            assert len(row["prompt"]) - 1 + row["drawn"] < context
            row["drawn"] = min(row["end"], row["drawn"] + steps)

    def progress(self, n):
        return [r["drawn"] == r["end"] for r in self.rows[:n]], [r["drawn"] for r in self.rows[:n]]

    def collect(self, slots, counts):
        rows = [([self.rows[s]["prompt"][0]] * c, [-1.0] * c) for s, c in zip(slots, counts)]
        return type("Drawn", (), {"rows": lambda self: rows})()

    def compact(self, sources, targets, n, context):
        for source, target in zip(sources, targets):
            self.rows[target] = self.rows[source]


def schedule(ends, *, n=1, slots=4, check_every=1, budget=100, max_tokens=50, aborted=None, prompt_tokens=3, take=None):
    runner = CountingRunner(slots)
    asked = {
        i: Request([end] * prompt_tokens, SamplingParams(max_tokens, n=n, stop_token_ids=(3,)), i)
        for i, end in enumerate(ends)
    }
    sampling = SamplingParams(max_tokens, n=n, stop_token_ids=(3,))
    rule = SamplingRule.of(sampling)
    feed = Feed(take, sampling, longest=prompt_tokens + max_tokens, samples=slots) if take else None
    return runner, Schedule(
        runner, asked, rule, slots=slots, check_every=check_every, token_budget=budget, version=5,
        stats=RolloutStats(), aborted=set() if aborted is None else aborted, feed=feed,
    )  # fmt: skip


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("slots", [1, 3, 8, 100])
def test_every_sample_comes_once_with_its_own_tokens(slots, check_every):
    ends = [3, 17, 1, 9, 9, 2, 30, 5]
    _, run = schedule(ends, n=3, slots=slots, check_every=check_every)
    results = {(r, i): c for r, i, c in run.run()}
    assert len(results) == 24
    for (request, _), completion in results.items():
        end = ends[request]
        assert completion.token_ids == [end] * end
        assert completion.version == 5


def test_finished_rows_leave_the_batch_and_new_requests_take_their_slots():
    runner, run = schedule([2, 9, 9, 9, 4, 4], slots=4)
    order = [request for request, _, _ in run.run()]
    assert order == [0, 4, 3, 1, 2, 5]  # 3 moved into the first slot when 0 left it
    assert max(runner.decoded) == 4
    assert runner.decoded == [4] * 9 + [1]


def test_a_group_s_prompt_is_computed_once_while_a_sample_of_it_is_in_a_slot():
    runner, run = schedule([5, 7], n=4, slots=8)
    list(run.run())
    assert runner.batches == [[5, 7]]
    assert sorted(runner.copies) == [5, 5, 5, 7, 7, 7]


def test_prompts_are_batched_by_length_within_the_token_budget():
    runner, run = schedule([1, 2, 3, 4, 5], slots=8, budget=6)
    list(run.run())
    assert runner.batches == [[1, 2], [3, 4], [5]]
    assert run._stats.prompt_tokens == 15


def test_a_prompt_longer_than_the_budget_goes_alone():
    runner, run = schedule([1, 2], budget=2)
    list(run.run())
    assert runner.batches == [[1], [2]]


def test_new_samples_wait_until_an_eighth_of_the_slots_is_free():
    runner, run = schedule([1] + [10] * 15 + [4] * 6, slots=16)
    list(run.run())
    assert runner.decoded[:3] == [16, 15, 15]  # one free slot of 16 is fewer than two


def test_the_reason_is_stop_length_or_abort():
    _, run = schedule([3, 8], max_tokens=6)
    reasons = {r: (c.finish_reason, len(c.token_ids)) for r, _, c in run.run()}
    assert reasons == {0: ("stop", 3), 1: ("length", 6)}


def test_abort_drops_what_waits_and_cuts_what_runs():
    aborted = set()
    _, run = schedule([2, 9, 9, 9], slots=2, aborted=aborted)
    got = {}
    for request, _, completion in run.run():
        got[request] = (completion.finish_reason, len(completion.token_ids))
        aborted.update({1, 3})
    assert got[0][1] == 2
    assert got[1][0] == "abort"
    assert 2 <= got[1][1] < 9
    assert got[3] == ("abort", 0)
    assert got[2][1] == 9


class Script:
    """A feed's `take`: the k-th call gives the k-th entry, a list of the tokens that new samples draw, or None."""

    def __init__(self, *entries):
        self.entries, self.idle = list(entries), []

    def __call__(self, idle):
        self.idle.append(idle)
        entry = self.entries.pop(0)
        return entry and [Request([end] * 3, SamplingParams(50, stop_token_ids=(3,)), end) for end in entry]


def test_requests_that_come_later_join_the_running_batch():
    take = Script([], [2, 6], [], [], [], [], [], [], [], None)
    runner, run = schedule([9], slots=4, take=take)
    got = [(request, len(completion.token_ids)) for request, _, completion in run.run()]
    assert got == [(1, 2), (2, 6), (0, 9)]  # numbered on from the first
    assert runner.decoded == [1, 3, 3, 2, 2, 2, 2, 1, 1]
    assert take.idle == [False] * 10


def test_a_stream_with_nothing_to_do_asks_and_ends_when_told_that_no_more_comes():
    take = Script([1], [], [2], [], [], None)
    _, run = schedule([], slots=4, take=take)
    assert [(request, len(completion.token_ids)) for request, _, completion in run.run()] == [(0, 1), (1, 2)]
    # Idle at first, and again once each sample has been handed over.
    assert take.idle == [True, False, True, False, False, True]


def test_what_runs_is_finished_after_the_last_request_has_come():
    take = Script([4], None)
    _, run = schedule([], slots=4, take=take)
    assert [len(completion.token_ids) for _, _, completion in run.run()] == [4]
    assert take.entries == []


def test_a_stream_keeps_nothing_of_requests_that_are_done():
    aborted = set()
    take = Script([1] * 30, *([[]] * 20), None)
    _, run = schedule([], slots=4, take=take, aborted=aborted)
    for _ in run.run():
        aborted.add(29)
    assert (run._requests, run._left) == ({}, {})


def test_a_request_that_does_not_fit_its_feed_is_refused():
    def too_long(idle):
        return [Request([1] * 4, SamplingParams(50, stop_token_ids=(3,)))]

    with pytest.raises(ValueError, match="may reach 54 tokens, 50 of them new; its feed says at most 53"):
        list(schedule([], take=too_long)[1].run())
    with pytest.raises(ValueError, match="sampled in another way"):
        list(schedule([], take=lambda idle: [Request([1], SamplingParams(50, temperature=0.5))])[1].run())
