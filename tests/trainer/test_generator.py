"""The generator on an engine that draws one token a permit, and writes down what it was asked."""

import io
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.fakes import FakeTokenizer, config

from verl.core.rollout_engine.api import Completion
from verl.core.transfer_queue.api import QueueClosed, QueueEnded
from verl.core.transfer_queue.local import LocalTransferQueue
from verl.data.batch import Ragged
from verl.data.prompts import PromptDataset
from verl.data.sampler import PromptSampler
from verl.data.schema import PromptRow
from verl.rewards.types import Outcome
from verl.trainer.arrivals import SCORED, staleness_metrics, unpack
from verl.trainer.generator import Generator

N = 2
MOST = 4  # tokens of a response
SECONDS = 20


class Engine:
    """Every permit draws one token for each sample in generation: 10 x order + its number. A sample ends at its length.

    lengths: by order, of both samples; 3 where there is none.
    """

    def __init__(self, lengths=None):
        self.version, self.lengths = 0, lengths or {}
        self.permits = threading.Semaphore(0)
        self.asked = []
        self.aborted = set()
        self.fails = None

    def abort(self, numbers):
        self.aborted.update(numbers)
        self.permits.release()

    def stream(self, requests, feed):
        self.aborted = set()
        running, taken, fed = [], 0, True
        while fed or running:
            if self.fails:
                raise self.fails
            more = feed.take(not running) if fed else []
            fed = more is not None
            for request in more or []:
                self.asked.append((list(request.prompt_ids), request.stream, request.first, request.sampling.n))
                running += [[taken, i, request, []] for i in range(request.sampling.n)]
                taken += 1
            if running:
                assert self.permits.acquire(timeout=SECONDS)
            for sample in list(running):
                number, i, request, tokens = sample
                stopped = number in self.aborted
                if not stopped:
                    tokens.append(10 * request.stream + request.first + i)
                drawn_before = MOST - request.sampling.max_tokens
                done = drawn_before + len(tokens) == self.lengths.get(request.stream, 3)
                if done or stopped:
                    running.remove(sample)
                    reason = "stop" if done else "abort"
                    yield number, i, Completion(tokens, [-float(self.version)] * len(tokens), reason, self.version)


class Rewards:
    """Scores a text by its length, at once or when `answer` is called."""

    def __init__(self, at_once=True):
        self.at_once, self.held = at_once, []

    def submit(self, samples, listener):
        for i, sample in enumerate(samples):
            self.held.append((listener, i, Outcome(float(len(sample.solution_str)), {"known": sample.ground_truth})))
        if self.at_once:
            self.answer()

    def answer(self):
        while self.held:
            listener, index, outcome = self.held.pop(0)
            listener.scored(index, outcome)


def make_run(engine, rewards=None, prompts=8, batch=2):
    rows = [PromptRow(f"row {i}", [], "d", float(i)) for i in range(prompts)]
    data = PromptDataset(rows, Ragged.from_rows([[100 + i] for i in range(prompts)]), "train", [])
    words = ("actor_rollout_ref.rollout.n=2", f"data.max_response_length={MOST}", "data.max_prompt_length=1")
    return SimpleNamespace(
        config=config(*words),
        roles=SimpleNamespace(rollout=engine, actor=SimpleNamespace()),
        tokenizer=FakeTokenizer(),
        prompts=data,
        sampler=PromptSampler(prompts, batch, shuffle=False),
        rewards=rewards or Rewards(),
    )


def make(run, *, prompts=8, staleness=0.0, partial=True, queue=None):
    queue = queue or LocalTransferQueue(staleness=staleness, groups_per_version=2)
    queue.register("trainer", SCORED)
    return Generator(run, queue, prompts=prompts, samples=8, partial=partial)


def until(true):
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_samples_come_with_everything_that_training_reads():
    engine = Engine()
    engine.permits.release(3)
    with make(make_run(engine)) as generator:
        taken = generator.queue.take("trainer", 2, timeout=SECONDS)
        until(lambda: generator.busy.spans)
    assert engine.asked == [([100], 0, 0, 2), ([101], 1, 0, 2)]  # and no more: the policy is still the first
    assert taken["uid"] == ["train-1-0-0"] * 2 + ["train-1-1-1"] * 2
    assert taken["prompt"].tolist() == [0, 0, 1, 1]
    assert [row.tolist() for row in taken["response_ids"].rows()] == [[0] * 3, [1] * 3, [10] * 3, [11] * 3]
    assert taken["policy_versions"].values.tolist() == [0] * 12
    assert taken["outcome"][2] == [8.0, {"known": 1.0}, "", None]  # "10 10 10"
    assert 0 < generator.busy.seconds < SECONDS


def test_a_batch_is_what_generate_would_have_given(monkeypatch):
    engine = Engine()
    engine.permits.release(3)
    run = make_run(engine)
    run.rewards.finish = lambda samples, outcomes: ([s.solution_str for s in samples], outcomes)
    with make(run) as generator:
        batch, rewards = unpack(run, generator.queue.take("trainer", 2, timeout=SECONDS))
    assert batch["ground_truth"] == [0.0, 0.0, 1.0, 1.0]
    assert batch["prompt_ids"].values.tolist() == [100, 100, 101, 101]
    assert batch["response_mask"].values.tolist() == [True] * 12
    assert batch["policy_version"].tolist() == [0] * 4
    texts, outcomes = rewards.result()
    assert texts == ["0 0 0", "1 1 1", "10 10 10", "11 11 11"]
    assert outcomes[0] == Outcome(5.0, {"known": 0.0})


def test_a_pause_stops_what_runs_and_it_goes_on_under_the_new_weights():
    engine = Engine()
    with make(make_run(engine)) as generator:
        until(lambda: len(engine.asked) == 2)
        engine.permits.release(2)
        until(lambda: engine.permits._value == 0)
        generator.pause()
        assert [len(begun.token_ids) for begun in generator._begun.values()] == [2] * 4
        engine.version, engine.asked = 1, []
        generator.resume()
        engine.permits.release(9)
        taken = generator.queue.take("trainer", 2, timeout=SECONDS)
    # With its tokens behind the prompt, alone, and under its own number.
    assert engine.asked == [
        ([100, 0, 0], 0, 0, 1),
        ([100, 1, 1], 0, 1, 1),
        ([101, 10, 10], 1, 0, 1),
        ([101, 11, 11], 1, 1, 1),
    ]
    assert [row.tolist() for row in taken["response_ids"].rows()] == [[0] * 3, [1] * 3, [10] * 3, [11] * 3]
    assert [row.tolist() for row in taken["policy_versions"].rows()] == [[0, 0, 1]] * 4
    assert [row.tolist() for row in taken["rollout_log_probs"].rows()] == [[0.0, 0.0, -1.0]] * 4


def test_what_has_no_tokens_yet_goes_together_again():
    engine = Engine()
    with make(make_run(engine)) as generator:
        until(lambda: len(engine.asked) == 2)
        generator.pause()
        engine.asked = []
        generator.resume()
        until(lambda: len(engine.asked) == 2)
    assert engine.asked == [([100], 0, 0, 2), ([101], 1, 0, 2)]


def test_without_partial_rollouts_a_pause_waits_for_what_runs_and_lets_nothing_begin():
    engine = Engine({0: 1})
    with make(make_run(engine), staleness=0.5, partial=False) as generator:
        until(lambda: len(engine.asked) == 3)
        pausing = threading.Thread(target=generator.pause)
        pausing.start()
        until(lambda: generator._paused)
        generator.queue.advance(1)  # there would be room for two more
        engine.permits.release(2)
        pausing.join(0.1)
        assert pausing.is_alive()
        engine.permits.release(5)
        pausing.join(SECONDS)
        assert not pausing.is_alive()
        assert len(engine.asked) == 3
        assert generator.queue.stats()["groups_complete"] == 3
        generator.resume()
        until(lambda: len(engine.asked) == 5)


def round_trip(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("scored", [True, False])
def test_a_state_holds_everything_and_nothing_comes_twice(scored):
    """Group 0 is finished (scored or not), group 1 in generation, group 2 drawn, the rest not drawn."""
    engine, rewards = Engine({0: 1}), Rewards(at_once=scored)
    run = make_run(engine, rewards)
    with make(run, prompts=6) as generator:
        until(lambda: len(engine.asked) == 2)
        engine.permits.release(2)
        until(lambda: generator.queue.stats()["puts"] >= (4 if scored else 2) and engine.permits._value == 0)
        generator.pause()
        state, sampler = round_trip(generator.state_dict()), run.sampler.state_dict()
    assert len(state["prompts"]) == 3
    assert [b[2] for b in state["begun"]] == [[10, 10], [11, 11]]

    again = Engine({0: 1})
    again.version = 1
    run = make_run(again)
    run.sampler.load_state_dict(sampler)
    resumed = make(run, prompts=6)
    resumed.load_state_dict(state, version=0, trained_since=0)
    again.permits.release(100)
    seen = []
    with resumed:
        for version in range(3):
            resumed.queue.advance(version)
            seen.append(resumed.queue.take("trainer", 2, timeout=SECONDS))
            resumed.queue.release(dict.fromkeys(seen[-1]["uid"]))
        with pytest.raises(QueueEnded):
            resumed.queue.take("trainer", 1, timeout=SECONDS)
    assert [uid for batch in seen for uid in batch["uid"][::2]] == [f"train-{1 + i // 2}-{i % 2}-{i}" for i in range(6)]
    assert [row.tolist() for row in seen[0]["policy_versions"].rows()] == [[0], [0], [0, 0, 1], [0, 0, 1]]
    assert seen[0]["outcome"][0][0] == 1.0  # "0"
    assert again.asked[0] == ([101, 10, 10], 1, 0, 1)  # group 0 is not generated again


def test_the_last_batch_may_be_short_and_then_there_is_no_more():
    engine = Engine()
    engine.permits.release(100)
    with make(make_run(engine), prompts=3, staleness=9) as generator:
        assert len(generator.queue.take("trainer", 2, timeout=SECONDS)) == 2 * N
        assert len(generator.queue.take("trainer", 2, timeout=SECONDS)) == 1 * N
        with pytest.raises(QueueEnded):
            generator.queue.take("trainer", 2, timeout=SECONDS)


def test_an_engine_that_fails_ends_the_wait_for_samples():
    engine = Engine()
    engine.fails = RuntimeError("the engine is on fire")
    with make(make_run(engine)) as generator:
        with pytest.raises(QueueClosed, match="on fire") as closed:
            generator.queue.take("trainer", 1, timeout=SECONDS)
        assert closed.value.error is engine.fails
        generator.pause()  # does not hang either


def test_reward_workers_that_fail_end_the_wait_for_samples():
    engine, rewards = Engine(), Rewards(at_once=False)
    engine.permits.release(3)
    with make(make_run(engine, rewards)) as generator:
        until(lambda: len(rewards.held) == 4)
        assert generator.doing() == "0 samples are in generation, 4 rewards are under way"
        assert not generator.stuck  # a reward is still to come
        rewards.held[0][0].stopped(RuntimeError("no workers"))
        with pytest.raises(QueueClosed, match="no workers"):
            generator.queue.take("trainer", 1, timeout=SECONDS)


def test_closing_does_not_wait_for_room_or_for_long_samples():
    engine = Engine()
    generator = make(make_run(engine))
    with generator:
        until(lambda: len(engine.asked) == 2)
    assert not generator._thread.is_alive()
    blocked = make(make_run(Engine()), queue=LocalTransferQueue(capacity=1))
    blocked.queue.add_group("other", 1, 0, 0)
    with blocked:
        until(lambda: blocked.queue.waiting())
        assert blocked.stuck
    assert not blocked._thread.is_alive()


def test_staleness_by_hand():
    versions = Ragged.from_rows([[3, 3], [2, 3]])
    assert staleness_metrics(versions, step=4) == {
        "training/staleness_mean": 1.25,
        "training/staleness_max": 2,
        "training/partial_samples": 0.5,
    }
