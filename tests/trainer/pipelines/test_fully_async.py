"""The loop around a queue that is filled beforehand: what happens between steps, and how it ends."""

import contextlib
import signal
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.fakes import config

from verl.core.transfer_queue.api import QueueClosed
from verl.core.transfer_queue.local import LocalTransferQueue
from verl.trainer import checkpoints, stages, validation
from verl.trainer.arrivals import SCORED
from verl.trainer.busy import Busy
from verl.trainer.interrupt import Interrupt
from verl.trainer.pace import Pace
from verl.trainer.pipelines import fully_async, sync
from verl.trainer.pipelines.fully_async import steps

PACE = Pace(staleness=1, in_order=False, sync_every=1, partial=True, part=2)


class Loop:
    """Every part of a run writes down that it was called. prompts: in the queue, with one sample each; two make a step."""

    def __init__(self, monkeypatch, *overrides, prompts=6, total_steps=3):
        self.calls, self.logged, self.learned = [], [], []
        queue = LocalTransferQueue()
        queue.register("trainer", SCORED)
        for i in range(prompts):
            queue.add_group(f"p{i}", 1, i, 0)
            queue.put(f"p{i}", 0, {"prompt": i, "policy_versions": torch.tensor([0]), **dict.fromkeys(SCORED[1:3], 0)})
            queue.put(f"p{i}", 0, {"finish_reason": "stop", "text": "0", "outcome": [1.0, {}, "", None]})
        if prompts < 2 * total_steps:
            queue.end()
        self.generator = SimpleNamespace(
            queue=queue,
            busy=Busy(),
            pause=lambda: self.note("pause"),
            resume=lambda: self.note("resume"),
            on_engine=contextlib.nullcontext,
        )
        monkeypatch.setattr(queue, "advance", lambda version: self.note(f"version {version}"))
        self.run = SimpleNamespace(
            config=config("data.max_response_length=4", *overrides),
            plan=SimpleNamespace(total_steps=total_steps, prompts_per_step=2),
            sampler=SimpleNamespace(batches_per_epoch=2),
            roles=SimpleNamespace(sync_weights=lambda version: self.note(f"weights {version}"), sync_metrics={}),
            rewards=SimpleNamespace(look_after=lambda: None),
            tracker=SimpleNamespace(log=lambda metrics, step: self.logged.append((step, metrics))),
            val_prompts=["a"],
            owes_validation=False,
            step=0,
            spans=None,
        )
        monkeypatch.setattr(fully_async, "unpack", lambda run, taken: (taken, None))
        monkeypatch.setattr(fully_async, "learn", self.learn)
        monkeypatch.setattr(sync, "batch_metrics", lambda *a: {})
        monkeypatch.setattr(sync, "performance_metrics", lambda *a: {})
        monkeypatch.setattr(validation, "validate", lambda run: (self.note(f"validate {run.step}"), {})[1])
        monkeypatch.setattr(stages, "warn_of_mismatch", lambda run, log: None)
        monkeypatch.setattr(checkpoints, "save", lambda run, metrics: self.note(f"save {run.step}"))
        monkeypatch.setattr(checkpoints, "save_if_new", lambda run, metrics: self.note(f"save if new {run.step}"))
        monkeypatch.setattr(checkpoints, "settle", lambda run, wait=False: None)

    def note(self, what):
        self.calls.append(what)

    def learn(self, run, batch, rewards, log):
        self.learned.append(batch["uid"])
        log.add({"actor/pg_loss": float(len(self.learned)), "timing/adv": 1.0})
        return batch

    def go(self, pace=PACE):
        self.interrupt = Interrupt()
        return steps(self.run, pace, self.generator, self.interrupt)


def test_between_steps_generation_rests_gets_weights_and_goes_on(monkeypatch):
    loop = Loop(monkeypatch, "trainer.test_freq=2", total_steps=3)
    assert loop.go() == "finished"
    rest = ["pause", "weights 1", "version 1", "resume", "pause", "weights 2", "version 2", "validate 2", "resume"]
    assert loop.calls == [*rest, "pause", "weights 3", "version 3", "validate 3", "save 3", "resume"]
    assert loop.learned == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    assert [line["training/staleness_max"] for _, line in loop.logged] == [0, 1, 2]
    assert [line["training/epoch"] for _, line in loop.logged] == [0, 0, 1]
    assert loop.generator.queue.stats()["groups_held"] == 0


def test_weights_move_every_so_many_steps_and_a_checkpoint_rests_too(monkeypatch):
    loop = Loop(monkeypatch, "trainer.save_freq=1", prompts=8, total_steps=4)
    assert loop.go(Pace(1, False, 3, True, 2)) == "finished"
    assert [c for c in loop.calls if c.split()[0] in ("weights", "version")] == [
        "weights 3",
        "version 1",
        "weights 4",
        "version 1",
    ]
    assert loop.calls[:4] == ["pause", "save 1", "resume", "pause"]


def test_a_step_in_parts_is_logged_as_one(monkeypatch):
    loop = Loop(monkeypatch, prompts=2, total_steps=1)
    assert loop.go(Pace(1, False, 1, True, part=1)) == "finished"
    assert loop.learned == [["p0"], ["p1"]]
    ((_, line),) = loop.logged
    assert (line["actor/pg_loss"], line["timing/adv"]) == (1.5, 2.0)


def test_prompts_that_run_out_make_a_shorter_last_step_and_the_end(monkeypatch):
    loop = Loop(monkeypatch, prompts=3, total_steps=5)
    assert loop.go() == "finished"
    assert loop.learned == [["p0", "p1"], ["p2"]]
    assert loop.calls[-2:] == ["pause", "save if new 2"]


def test_ctrl_c_while_waiting_saves_at_once_and_trains_on_nothing_more(monkeypatch):
    loop = Loop(monkeypatch, prompts=3, total_steps=2)
    taken, calls = loop.generator.queue.take, []

    def take(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            loop.interrupt.requested = True
            return None
        return taken(*args, **kwargs)

    monkeypatch.setattr(loop.generator.queue, "take", take)
    assert loop.go() == "interrupted"
    assert loop.learned == [["p0", "p1"]]
    assert loop.calls[-2:] == ["pause", "save if new 1"]
    assert loop.generator.queue.stats()["groups_held"] == 1


def test_ctrl_c_in_a_validation_saves_while_generation_rests(monkeypatch):
    loop = Loop(monkeypatch, "trainer.test_freq=2", total_steps=3)

    def validate(run):
        loop.note("validate")
        signal.raise_signal(signal.SIGTERM)
        loop.note("validated")

    monkeypatch.setattr(validation, "validate", validate)
    loop.interrupt = Interrupt()
    with loop.interrupt:
        assert steps(loop.run, PACE, loop.generator, loop.interrupt) == "interrupted"
    assert loop.calls[-5:] == ["pause", "weights 2", "version 2", "validate", "save 2"]
    assert loop.run.owes_validation


def test_a_failure_of_the_generator_is_the_runs(monkeypatch):
    loop = Loop(monkeypatch, prompts=4, total_steps=5)
    monkeypatch.setattr(fully_async, "make_generator", lambda run, pace: Closed(loop))
    monkeypatch.setattr(loop.run.config.trainer, "val_before_train", False)
    loop.run.tracker.notice = lambda text: None
    with pytest.raises(ArithmeticError, match="in the thread"):
        fully_async.overlap(loop.run, PACE)
    assert loop.learned == [["p0", "p1"]]


class Closed:
    """A generator that fails after the first step."""

    def __init__(self, loop):
        self.__dict__.update(vars(loop.generator))
        self.resume = lambda: self.queue.close(ArithmeticError("in the thread"))
        self.stuck, self.doing = False, lambda: ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(QueueClosed):
            self.queue.close()
