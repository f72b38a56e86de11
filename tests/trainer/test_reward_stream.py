"""Samples are scored as they finish; what comes out is in the batch's order."""

from types import SimpleNamespace

from tests.trainer.fakes import EOS, FakeRewards, FakeTokenizer

from verl.core.rollout_engine.api import Completion
from verl.data.batch import SampleBatch
from verl.trainer import reward_stream
from verl.trainer.reward_stream import RewardStream

SCORES = {"1": 0.1, "2 3": 0.2, "4": 0.3, "5": 0.4}
STREAM = [  # of two prompts with two samples each, in the order in which they finish
    (1, 1, Completion([5, EOS], [-1.0, -1.0], "stop")),
    (0, 0, Completion([1, EOS], [-1.0, -1.0], "stop")),
    (1, 0, Completion([4], [-1.0], "length")),
    (0, 1, Completion([2, 3], [-1.0, -1.0], "length")),
]


class Rewards(FakeRewards):
    """Writes down which samples come together."""

    def __init__(self):
        super().__init__(SCORES)
        self.parts = []

    def expect(self, count):
        handle = super().expect(count)
        add = handle.add
        handle.add = lambda indices, samples: (self.parts.append(list(indices)), add(indices, samples))
        return handle


def stream_of(rewards):
    run = SimpleNamespace(rewards=rewards, tokenizer=FakeTokenizer())
    columns = {"data_source": ["a", "b"], "ground_truth": ["x", "y"], "extra_info": [{}, {}], "raw_prompt": [[], []]}
    return RewardStream(run, SampleBatch(columns), n=2)


def test_results_are_in_the_batchs_order_whatever_finishes_first():
    rewards = Rewards()
    stream = stream_of(rewards)
    assert list(stream.through(STREAM)) == STREAM
    assert stream.result().scores == [0.1, 0.2, 0.3, 0.4]
    assert [s.ground_truth for s in rewards.seen] == ["x", "x", "y", "y"]
    assert [s.data_source for s in rewards.seen] == ["a", "a", "b", "b"]
    assert [s.response_length for s in rewards.seen] == [2, 2, 1, 2]  # with the end token


def test_scoring_begins_while_others_are_in_generation(monkeypatch):
    monkeypatch.setattr(reward_stream, "SUBMIT_SECONDS", 0.0)
    rewards = Rewards()
    going = stream_of(rewards).through(STREAM)
    next(going)
    next(going)
    assert rewards.parts == [[3]]  # the first, before the third has finished
    list(going)
    assert rewards.parts == [[3], [0], [2], [1]]


def test_what_finishes_at_once_is_scored_together(monkeypatch):
    monkeypatch.setattr(reward_stream, "SUBMIT_SECONDS", 3600.0)
    rewards = Rewards()
    list(stream_of(rewards).through(STREAM))
    assert rewards.parts == [[3, 0, 2, 1]]
