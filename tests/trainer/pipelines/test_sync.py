"""Who waits for whom: the order of stages, and which steps validate and save."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from tests.trainer.fakes import config

from verl.data.batch import SampleBatch
from verl.errors import WorkerDied
from verl.trainer import checkpoints, stages, validation
from verl.trainer.pipelines import sync


class Recorder:
    """Stands for every part of a run: each call is written down, and the batch passed on."""

    def __init__(self, monkeypatch, *overrides, total_steps=4, step=0):
        self.calls: list[str] = []
        self.logged: list[tuple[int, list[str]]] = []
        self.at_step = {}
        note = self._note
        self.run = SimpleNamespace(
            config=config(*overrides),
            plan=SimpleNamespace(total_steps=total_steps),
            sampler=SimpleNamespace(epoch=0),
            roles=SimpleNamespace(
                sync_weights=lambda version: note(f"weights {version}"),
                critic_apart=False,
                rollout=SimpleNamespace(sleep=lambda: note("sleep")),
                sync_metrics={},
            ),
            tracker=SimpleNamespace(log=lambda metrics, step: self.logged.append((step, sorted(metrics)))),
            saver=SimpleNamespace(settle=lambda wait: None),
            last_checkpoint=None,
            val_prompts=["a"],
            owes_validation=False,
            step=step,
            spans=None,
        )
        batch = SampleBatch({"uid": ["a"]})
        for name in [
            "draw_prompts",
            "generate",
            "training_sampling",
            "add_baselines",
            "add_log_probs",
            "collect_rewards",
            "add_advantages",
            "update_critic",
            "update_actor",
        ]:
            given = (batch, "rewards") if name == "generate" else batch
            monkeypatch.setattr(stages, name, lambda *a, name=name, given=given, **k: (note(name), given)[1])
        monkeypatch.setattr(checkpoints, "save", lambda run, metrics: note(f"save {run.step}"))
        score = {"val/test_score/a": 1.0}
        monkeypatch.setattr(validation, "validate", lambda run: (note(f"validate {run.step}"), score)[1])
        monkeypatch.setattr(sync, "batch_metrics", lambda *a: {})
        monkeypatch.setattr(sync, "performance_metrics", lambda *a: {})

    def _note(self, what):
        self.calls.append(what)
        if (action := self.at_step.get((what, self.run.step))) is not None:
            action()

    def train(self):
        return sync.train(self.run)

    def only(self, *kinds):
        return [call for call in self.calls if call.split()[0] in kinds]


def test_a_critic_on_devices_of_its_own_trains_while_the_actor_does(monkeypatch):
    """Each waits for the other to have begun, so that one after the other would end in an error."""
    recorder = Recorder(monkeypatch, "trainer.critic_warmup=1", "trainer.val_before_train=False", total_steps=2)
    both = threading.Barrier(2, timeout=20)
    recorder.at_step = {("update_critic", 1): both.wait, ("update_actor", 1): both.wait}
    recorder.run.roles.critic_apart = True
    assert recorder.train() == "finished"
    assert sorted(recorder.only("update_critic", "update_actor")) == ["update_actor", "update_critic", "update_critic"]


def test_what_the_critic_fails_with_beside_the_actor_ends_the_run(monkeypatch):
    recorder = Recorder(monkeypatch, "trainer.val_before_train=False", total_steps=1)

    def fail():
        raise WorkerDied("worker 1 of 2 (critic) ended by itself.")

    recorder.at_step = {("update_critic", 0): fail}
    recorder.run.roles.critic_apart = True
    with pytest.raises(WorkerDied, match="critic"):
        recorder.train()
    assert recorder.only("update_actor", "weights") == ["weights 0", "update_actor"]


def test_one_step_in_order(monkeypatch):
    recorder = Recorder(monkeypatch, "trainer.val_before_train=False", total_steps=1)
    assert recorder.train() == "finished"
    assert recorder.calls == [
        "weights 0",
        "draw_prompts",
        "training_sampling",
        "generate",
        "add_baselines",
        "sleep",
        "add_log_probs",
        "collect_rewards",
        "add_advantages",
        "update_critic",
        "update_actor",
        "weights 1",
        "validate 1",
        "save 1",
    ]
    [(step, names)] = recorder.logged
    assert step == 1
    assert {"timing/step", "timing/gen", "timing/reward", "timing/update_weights", "val/test_score/a"} <= set(names)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ["validate 0", "validate 4", "save 4"]),
        (("trainer.val_before_train=False",), ["validate 4", "save 4"]),
        (
            ("trainer.test_freq=2", "trainer.save_freq=3"),
            ["validate 0", "validate 2", "save 3", "validate 4", "save 4"],
        ),
        (("trainer.val_only=True", "trainer.val_before_train=False"), ["validate 0"]),
    ],
)
def test_which_steps_validate_and_save(monkeypatch, overrides, expected):
    recorder = Recorder(monkeypatch, *overrides)
    assert recorder.train() == "finished"
    assert recorder.only("validate", "save") == expected


def test_a_resumed_run_goes_on_with_the_weights_of_its_step(monkeypatch):
    recorder = Recorder(monkeypatch, step=3)
    recorder.train()
    assert recorder.only("weights", "validate", "save") == ["weights 3", "weights 4", "validate 4", "save 4"]
    done = Recorder(monkeypatch, step=4)
    assert done.train() == "finished"
    assert done.calls == ["weights 4"]


def test_critic_learns_alone_while_it_warms_up(monkeypatch):
    recorder = Recorder(monkeypatch, "trainer.critic_warmup=2")
    recorder.train()
    assert (
        recorder.only("update_critic", "update_actor") == ["update_critic"] * 2 + ["update_critic", "update_actor"] * 2
    )


def test_cache_is_kept_while_training_when_asked(monkeypatch):
    recorder = Recorder(monkeypatch, "actor_rollout_ref.rollout.free_cache_engine=False", total_steps=1)
    recorder.train()
    assert "sleep" not in recorder.calls


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_within_a_step_ends_with_it_saved(monkeypatch):
    recorder = Recorder(monkeypatch, "trainer.val_before_train=False")
    recorder.at_step["generate", 1] = interrupt
    assert recorder.train() == "interrupted"
    assert recorder.only("update_actor", "validate", "save") == ["update_actor"] * 2 + ["save 2"]
    assert [step for step, _ in recorder.logged] == [1, 2]


def test_interrupt_after_the_decision_to_save_never_ends_with_an_unsaved_step(monkeypatch):
    recorder = Recorder(monkeypatch, "trainer.val_before_train=False", "trainer.save_freq=2")
    recorder.at_step["save 2", 2] = interrupt
    assert recorder.train() == "interrupted"
    assert recorder.only("save") == ["save 2", "save 3"]


def test_interrupt_in_the_last_step_is_the_end_where_there_is_no_validation(monkeypatch):
    recorder = Recorder(monkeypatch)
    recorder.run.val_prompts = None
    recorder.at_step["generate", 3] = interrupt
    assert recorder.train() == "finished"
    assert recorder.only("save") == ["save 4"]


@pytest.mark.parametrize(("where", "step", "validated"), [("generate", 3, False), ("validate 4", 4, True)])
def test_interrupt_before_or_in_the_last_validation_leaves_it_and_a_resumed_run_makes_it(
    monkeypatch, where, step, validated
):
    recorder = Recorder(monkeypatch, "trainer.val_before_train=False")
    recorder.at_step[where, step] = interrupt
    assert recorder.train() == "interrupted"
    assert recorder.only("validate", "save") == [*(["validate 4"] if validated else []), "save 4"]
    assert recorder.run.owes_validation
    assert "val/test_score/a" not in recorder.logged[-1][1]
    resumed = Recorder(monkeypatch, step=4)
    resumed.run.owes_validation = True
    assert resumed.train() == "finished"
    assert resumed.calls == ["weights 4", "validate 4"]
    assert resumed.logged == [(4, ["val/test_score/a"])]
    assert not resumed.run.owes_validation


def test_interrupt_in_a_validation_between_steps_saves_what_is_done(monkeypatch):
    recorder = Recorder(monkeypatch, "trainer.test_freq=2")
    recorder.at_step["validate 2", 2] = interrupt
    assert recorder.train() == "interrupted"
    assert recorder.only("validate", "save") == ["validate 0", "validate 2", "save 2"]


@pytest.mark.parametrize("only", [True, False])
def test_interrupt_in_the_validation_before_training_ends_the_run(monkeypatch, only):
    recorder = Recorder(monkeypatch, f"trainer.val_only={only}")
    recorder.at_step["validate 0", 0] = interrupt
    assert recorder.train() == "interrupted"
    assert recorder.calls == ["weights 0", "validate 0"]
    assert recorder.logged == []
