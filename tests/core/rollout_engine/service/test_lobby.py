"""Who may join the running batch, by rule, age and size."""

import asyncio

import pytest

from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.service.jobs import Job
from verl.core.rollout_engine.service.lobby import OVERTAKING_SECONDS, Lobby


def job(n=1, **sampling) -> Job:
    return Job(Request([1], SamplingParams(8, n=n, **sampling)), asyncio.Queue())


def rule(**sampling) -> SamplingRule:
    return SamplingRule.of(SamplingParams(1, **sampling))


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def lobby(clock):
    return Lobby(lambda: clock[0])


def test_the_oldest_of_the_rule_come_as_far_as_there_is_room(lobby):
    jobs = [job(n=2), job(n=1, temperature=0.5), job(n=3), job(n=1)]
    lobby.add(jobs)
    assert lobby.take(rule(), room=4) == [jobs[0]]  # 2 + 3 are too many, and the last may not overtake its like
    assert lobby.take(rule(), room=4) == [jobs[2], jobs[3]]
    assert lobby.jobs == [jobs[1]]
    assert lobby.next_sampling() == jobs[1].request.sampling


def test_another_rule_is_overtaken_for_a_while_and_then_has_its_turn(lobby, clock):
    cold, hot = job(temperature=0.5), job()
    lobby.add([cold])
    clock[0] = OVERTAKING_SECONDS - 0.1
    lobby.add([hot])
    assert lobby.take(rule(), room=1) == [hot]
    lobby.add([hot])
    clock[0] = OVERTAKING_SECONDS + 0.1
    assert lobby.take(rule(), room=1) == []
    assert lobby.take(rule(temperature=0.5), room=1) == [cold]
    assert lobby.take(rule(), room=1) == [hot]


def test_seed_length_and_number_of_samples_are_no_part_of_the_rule(lobby):
    jobs = [job(seed=1), job(seed=2, n=2), Job(Request([1], SamplingParams(99)), asyncio.Queue())]
    lobby.add(jobs)
    assert lobby.take(rule(), room=9) == jobs


def test_jobs_can_be_taken_out(lobby):
    jobs = [job(), job(), job()]
    lobby.add(jobs)
    assert lobby.remove({jobs[1]}) == [jobs[1]]
    assert lobby.remove({jobs[1]}) == []
    assert lobby.clear() == [jobs[0], jobs[2]]
    assert len(lobby) == 0
