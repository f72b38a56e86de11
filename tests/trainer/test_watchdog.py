"""Who waits for whom, said in time, and a pipeline in which nothing will ever move."""

import threading
import time
from types import SimpleNamespace

from verl.core.transfer_queue.api import QueueClosed
from verl.core.transfer_queue.local import LocalTransferQueue
from verl.trainer.watchdog import Stalled, Watchdog

WORDS = "7 samples are in generation, 1 rewards are under way"


def watched(queue, said, stuck=False, seconds=0.2):
    return Watchdog(queue, SimpleNamespace(stuck=stuck, doing=lambda: WORDS), seconds, said.append)


def make_queue():
    queue = LocalTransferQueue()
    queue.register("trainer", ["outcome"])
    return queue


def take_in_a_thread(queue):
    caught = []

    def take():
        try:
            queue.take("trainer", 2)
        except QueueClosed as closed:
            caught.append(closed.error)

    thread = threading.Thread(target=take)
    thread.start()
    return thread, caught


def test_it_says_who_waits_for_what_and_goes_on():
    queue, said = make_queue(), []
    queue.add_group("a", 1, 0, 0)
    thread, _ = take_in_a_thread(queue)
    with watched(queue, said):
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said[0].startswith("no sample has come or gone for ")
    assert "trainer has waited" in said[0]
    assert WORDS in said[0]
    queue.put("a", 0, {"outcome": 1.0})  # it is still open
    queue.end()
    thread.join(20)
    assert not thread.is_alive()


def test_it_is_silent_while_samples_come():
    queue, said = make_queue(), []
    with watched(queue, said, seconds=0.4):
        for number in range(12):
            queue.add_group(str(number), 1, number, 0)
            time.sleep(0.05)
    assert said == []


def test_a_trainer_that_waits_for_what_no_one_makes_is_told_so():
    queue, said = make_queue(), []
    thread, caught = take_in_a_thread(queue)
    with watched(queue, said, stuck=True):
        thread.join(20)
    assert not thread.is_alive()
    (error,) = caught
    assert isinstance(error, Stalled)
    assert "nothing will move any more: trainer has waited" in str(error)


def test_a_generator_that_waits_for_a_long_training_step_is_not_stuck():
    queue, said = make_queue(), []
    with watched(queue, said, stuck=True):
        time.sleep(0.6)  # no one takes: the trainer is training
    assert "no one waits" in said[0]
    assert queue.add_group("a", 1, 0, 0)  # it is still open
