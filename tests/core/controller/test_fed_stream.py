"""A stream over two workers that run in threads, on the engines that they would have."""

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import pytest
from tests.core.rollout_engine.models import prompts, shared_model, tokens

from verl.config.schema import RolloutConfig
from verl.core.controller.fed_stream import FedStream
from verl.core.controller.proxies import GroupRolloutEngine
from verl.core.controller.worker import Worker
from verl.core.rollout_engine.api import Feed, Request, SamplingParams
from verl.core.rollout_engine.engine import NativeEngine


@dataclass(frozen=True)
class Call:
    future: Any
    rank: int


class Threads:
    """A worker group in this process. A method that runs beside another has a thread of its own."""

    def __init__(self, engines):
        self.workers = [Worker() for _ in engines]
        for worker, engine in zip(self.workers, engines):
            worker.rollout = engine
        self.pool = ThreadPoolExecutor(8)
        self.brought = dict.fromkeys(range(len(engines)), 0)

    def submit(self, method, arguments, ranks, beside=False):
        for rank, args in zip(ranks, arguments):
            self.brought[rank] += len(args[0]) if method == "exchange" else 0
        return [
            Call(self.pool.submit(getattr(self.workers[rank], method), *args), rank)
            for rank, args in zip(ranks, arguments)
        ]

    def next_of(self, calls):
        done = wait([call.future for call in calls], return_when=FIRST_COMPLETED).done
        call = next(call for call in calls if call.future in done)
        return call, call.future.result()


def engine():
    model = shared_model("llama")
    return NativeEngine(model.config, config=RolloutConfig(), weights=dict(model.named_parameters()))


SAMPLING = SamplingParams(max_tokens=24, n=2)


@pytest.fixture
def group():
    threads = Threads([engine(), engine()])
    yield threads
    threads.pool.shutdown(cancel_futures=True)


def asked(count):
    return [Request(ids, SAMPLING, stream) for stream, ids in enumerate(prompts(*[3 + i % 4 for i in range(count)]))]


def test_requests_go_to_whoever_has_least_to_do_and_samples_are_those_of_one_engine(group):
    requests = asked(7)
    later = [requests[1:3], [], requests[3:], None]
    feed = Feed(lambda idle: later.pop(0), SAMPLING, longest=60, samples=14)
    rollout = GroupRolloutEngine(group, [0, 1], None, shared=False)
    got = {(r, i): c.token_ids for r, i, c in rollout.stream(requests[:1], feed)}
    alone = tokens(engine().generate(requests))
    assert got == {(r, i): ids for r, samples in enumerate(alone) for i, ids in enumerate(samples)}
    assert min(group.brought.values()) >= 3
    assert sum(group.brought.values()) == 7
    # And the workers are free for the next.
    again = [[requests[4]], None]
    feed = Feed(lambda idle: again.pop(0), SAMPLING, longest=60, samples=2)
    assert {c.token_ids[0] for _, _, c in rollout.stream([], feed)} == {ids[0] for ids in alone[4]}


def test_an_abort_reaches_the_worker_that_has_the_request(group):
    requests = [Request(ids, SamplingParams(max_tokens=200), i) for i, ids in enumerate(prompts(4, 4, 4))]
    stream, begun = None, time.monotonic()
    taken = iter([requests, []])

    def take(idle):
        stream.abort([0, 2])
        return next(taken, None if time.monotonic() - begun > 0.2 else [])

    stream = FedStream(group, [0, 1], [], Feed(take, requests[0].sampling, longest=210, samples=3))
    got = {r: c for r, _, c in stream.items()}
    assert [got[r].finish_reason for r in range(3)] == ["abort", "length", "abort"]
    assert len(got[1].token_ids) == 200
    assert len(got[0].token_ids) < 200


def test_a_stream_left_early_frees_the_workers(group):
    requests = [Request(ids, SamplingParams(max_tokens=100, n=1), i) for i, ids in enumerate(prompts(4, 4))]
    for _ in range(2):
        stream = FedStream(group, [0, 1], requests, Feed(lambda idle: [], requests[0].sampling, 110, 2)).items()
        next(stream)
        stream.close()
    assert all(not worker.rollout._streaming for worker in group.workers)


def test_a_worker_that_fails_ends_the_stream(group):
    group.workers[1].rollout._weights = None
    feed = Feed(lambda idle: [], SAMPLING, 60, 4)
    with pytest.raises(RuntimeError, match="no weights yet"):
        list(FedStream(group, [0, 1], asked(2), feed).items())
    group.workers[0].exchange([], [], True, 0.0)
