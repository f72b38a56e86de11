"""The loop on an engine that draws what the test lets it draw."""

import asyncio
import threading

import pytest

from verl.core.rollout_engine.api import Completion, Request, SamplingParams
from verl.core.rollout_engine.service.jobs import Failed, Finished, Job, Refused, Weights
from verl.core.rollout_engine.service.loop import EngineLoop


class StepEngine:
    """Each permit of `steps` draws one token for every sample inside. error: what the next step raises."""

    def __init__(self):
        self.steps = threading.Semaphore(0)
        self.version, self.error, self.log = 0, None, []
        self._aborted = set()

    def stream(self, requests, feed=None):
        self._aborted = set()
        return self._stream(feed)

    def _stream(self, feed):
        inside, taken, ended = {}, 0, False
        while True:
            if not ended:
                more = feed.take(not inside)
                ended = more is None
                for request in more or []:
                    self.log.append(f"in {request.prompt_ids[0]}")
                    inside[taken] = (request, [])
                    taken += 1
            for number in [n for n in inside if n in self._aborted]:
                _, drawn = inside.pop(number)
                yield number, 0, Completion(drawn, [0.0] * len(drawn), "abort", self.version)
            if not inside:
                if ended:
                    return
                continue
            if not self.steps.acquire(timeout=0.02):
                continue
            if self.error:
                error, self.error = self.error, None
                raise error
            for number, (request, drawn) in list(inside.items()):
                drawn.append(9)
                if len(drawn) == request.sampling.max_tokens:
                    del inside[number]
                    yield number, 0, Completion(drawn, [0.0] * len(drawn), "length", self.version)

    def abort(self, requests):
        self._aborted.update(requests)

    def load_weights(self, weights, version):
        self.log.append(f"load {version}")
        list(weights)
        self.version = version

    def sleep(self):
        self.log.append("sleep")

    def wake(self):
        self.log.append("wake")


class Bench:
    """A loop, its engine, and the events that its jobs got."""

    def __init__(self, **settings):
        self.engine = StepEngine()
        options = {"longest": 100, "slots": 4, "max_waiting": 10, "weights": Weights(0, "first"), **settings}
        self.loop = EngineLoop(self.engine, **options)

    async def __aenter__(self):
        self.loop.outbox.loop = asyncio.get_running_loop()
        self.loop.start()
        return self

    async def __aexit__(self, *_):
        await asyncio.to_thread(self.loop.close)

    def job(self, prompt, tokens=1, **options) -> Job:
        sampling = {k: options.pop(k) for k in ("temperature",) if k in options}
        return Job(Request([prompt], SamplingParams(tokens, **sampling)), asyncio.Queue(), **options)

    def submit(self, *args, **options) -> Job:
        job = self.job(*args, **options)
        self.loop.submit([job])
        return job

    def step(self, number=1):
        self.engine.steps.release(number)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition(self.loop.state()):
                await asyncio.sleep(0.002)


async def event(job):
    async with asyncio.timeout(10):
        return (await job.events.get())[1]


def check(test):
    """A test that runs a coroutine."""

    def run():
        asyncio.run(test())

    return run


@check
async def test_jobs_join_and_leave_a_running_batch():
    async with Bench() as bench:
        long = bench.submit(1, tokens=3)
        await bench.until(lambda state: state.running == 1)
        short = bench.submit(2, tokens=1)
        await bench.until(lambda state: state.running == 2)
        bench.step()
        assert (await event(short)).completion.token_ids == [9]
        assert bench.loop.state().samples == 1
        bench.step(2)
        assert (await event(long)).completion.token_ids == [9, 9, 9]
        await bench.until(lambda state: state.samples == 0)
        assert bench.loop.totals.response_tokens == 4


@check
async def test_no_more_samples_than_slots_and_a_larger_request_goes_alone():
    async with Bench(slots=2) as bench:
        jobs = [bench.submit(i, tokens=1) for i in (1, 2, 3)]
        await bench.until(lambda state: (state.running, state.waiting) == (2, 1))
        bench.step()
        first = await asyncio.gather(*map(event, jobs[:2]))
        assert [done.completion.token_ids for done in first] == [[9], [9]]
        await bench.until(lambda state: (state.running, state.waiting) == (1, 0))
        bench.step()
        assert (await event(jobs[2])).completion.token_ids == [9]
        large = Job(Request([4], SamplingParams(1, n=3)), asyncio.Queue())
        bench.loop.submit([large])
        await bench.until(lambda state: state.samples == 3)
        bench.loop.abort(None)


@check
async def test_weights_wait_for_what_runs_and_hold_back_what_comes():
    async with Bench() as bench:
        first = bench.submit(1, tokens=2)
        await bench.until(lambda state: state.running == 1)
        loading = bench.loop.load([], Weights(5, "second"), abort=False)
        later, picky = bench.submit(2, expects="second"), bench.submit(3, expects="first")
        bench.step(2)
        assert (await event(first)).weights == Weights(0, "first")
        loading.result(10)
        assert isinstance(await event(picky), Failed)
        bench.step()
        finished = await event(later)
        assert (finished.weights, finished.completion.version) == (Weights(5, "second"), 5)
        assert bench.engine.log == ["in 1", "wake", "load 5", "in 2"]


@check
async def test_weights_that_fail_leave_none_and_refuse_requests():
    def broken():
        raise ValueError("no such weight")
        yield

    async with Bench() as bench:
        loading = bench.loop.load(broken(), Weights(5, "second"), abort=False)
        with pytest.raises(ValueError, match="no such weight"):
            loading.result(10)
        assert bench.loop.state().weights == Weights(0, None)
        with pytest.raises(Refused, match="no whole weights") as refused:
            bench.submit(1)
        assert refused.value.status == 503
        bench.loop.load([], Weights(6, "third"), abort=False).result(10)
        job = bench.submit(1)
        bench.step()
        assert (await event(job)).weights == Weights(6, "third")


@check
async def test_an_engine_that_fails_tells_its_callers_and_is_given_up():
    async with Bench() as bench:
        inside = bench.submit(1)
        await bench.until(lambda state: state.running == 1)
        bench.engine.error = KeyError("slot")
        bench.step()
        told = await event(inside)
        assert (told.status, told.message) == (500, "KeyError: 'slot'")
        assert bench.loop.state().samples == 0
        with pytest.raises(Refused, match="KeyError"):
            bench.submit(2)


@check
async def test_all_of_several_jobs_are_taken_or_none():
    async with Bench(max_waiting=2) as bench:
        bench.loop.pause(abort=False).result(10)
        bench.submit(1)
        with pytest.raises(Refused) as refused:
            bench.loop.submit([bench.job(2), bench.job(3)])
        assert refused.value.status == 429
        assert bench.loop.state().waiting == 1


@check
async def test_closing_ends_what_runs_with_what_it_has_and_fails_what_waits():
    async with Bench(slots=1) as bench:
        runs, waits = bench.submit(1, tokens=5), bench.submit(2)
        await bench.until(lambda state: state.running == 1)
        bench.step(2)
        await asyncio.sleep(0.1)
    ended = await event(runs)
    assert isinstance(ended, Finished)
    assert (ended.completion.token_ids, ended.completion.finish_reason) == ([9, 9], "abort")
    assert (await event(waits)).status == 503
    assert isinstance(bench.loop.call(lambda: None, abort=False).exception(), Refused)


@check
async def test_an_abandoned_job_leaves_and_gets_no_more_events():
    async with Bench() as bench:
        job = bench.submit(1, tokens=5)
        await bench.until(lambda state: state.running == 1)
        bench.loop.abandon([job])
        await bench.until(lambda state: state.samples == 0)
        assert job.events.empty()
