"""A run's state to disk and back, with engines that are stand-ins and a real store."""

import errno
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.fakes import FakeEngine, FakeTracker, config
from torch.distributed.checkpoint.api import CheckpointException

from verl.algorithms.kl import AdaptiveKLController
from verl.core.checkpoint_engine.store import CheckpointStore, defect
from verl.data.sampler import PromptSampler
from verl.errors import CheckpointError
from verl.trainer import checkpoints
from verl.trainer.saving import Saver

METRICS = {"actor/pg_loss": 0.1, "critic/score/max": 1}


class FakePrompts:
    fingerprint = "data"

    def __init__(self, size=8):
        self.size = size

    def __len__(self):
        return self.size


def fake_run(folder, *, step=0, critic=None, coef=None):
    return SimpleNamespace(
        config=config(),
        store=CheckpointStore(folder),
        roles=SimpleNamespace(actor=FakeEngine(value=0.0), critic=critic),
        sampler=PromptSampler(8, 2, seed=1, fingerprint="data"),
        kl_control=None if coef is None else AdaptiveKLController(coef, target=1.0, horizon=10),
        estimator=SimpleNamespace(name="gae"),
        tracker=FakeTracker(),
        step=step,
        owes_validation=False,
        surplus=None,
        ahead=None,
        left_ahead=None,
        prompts=FakePrompts(),
        saver=Saver(CheckpointStore(folder)),
        last_checkpoint=None,
    )


def test_everything_comes_back(tmp_path):
    torch.manual_seed(3)
    saved = fake_run(tmp_path, step=2, critic=FakeEngine(value=5.0), coef=0.3)
    saved.roles.actor.value = 4.0
    saved.sampler.next_batch()
    saved.owes_validation = True
    folder = checkpoints.save(saved, METRICS)
    drawn = torch.rand(3)
    assert folder == tmp_path / "global_step_2"
    assert defect(folder) is None
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"

    run = fake_run(tmp_path, critic=FakeEngine(), coef=0.1)
    checkpoints.resume(run, folder)
    assert (run.step, run.roles.actor.value, run.roles.critic.value, run.kl_control.coef) == (2, 4.0, 5.0, 0.3)
    assert [run.sampler.next_batch() for _ in range(5)] == [saved.sampler.next_batch() for _ in range(5)]
    assert torch.equal(torch.rand(3), drawn)
    assert run.owes_validation
    assert run.tracker.restored == [(METRICS, 2)]
    assert "2 steps are done" in run.tracker.notices[-1]


AHEAD = {
    "queue": {"books": {"groups": [{"uid": "train-3-0-1", "size": 5}, {"uid": "train-3-0-2", "size": 5}]}},
    "prompts": [["train-3-0-1", 1, 4]],
    "begun": [],
}


@pytest.mark.parametrize(
    ("pipeline", "size", "taken", "told"),
    [
        ("fully_async", 8, AHEAD, None),
        ("fully_async actor_rollout_ref.rollout.n=4", 8, None, "another number of samples a prompt"),
        ("sync", 8, None, "2 prompts had been drawn ahead by an asynchronous pipeline and are left out"),
        ("one_step_off", 9, None, "belongs to other training data"),
    ],
)
def test_what_was_generated_ahead_comes_back(tmp_path, pipeline, size, taken, told):
    saved = fake_run(tmp_path, step=2)
    saved.ahead = SimpleNamespace(state_dict=lambda: AHEAD)
    folder = checkpoints.save(saved, METRICS)
    run = fake_run(tmp_path)
    run.config = config(*f"trainer.pipeline={pipeline}".split())
    run.sampler = PromptSampler(size, 2, seed=1, fingerprint="data")
    run.prompts = FakePrompts(size)
    checkpoints.resume(run, folder)
    assert run.left_ahead == taken
    assert told is None or any(told in notice for notice in run.tracker.notices)


def test_line_of_another_runs_step_is_not_taken_over(tmp_path):
    folder = checkpoints.save(fake_run(tmp_path / "one", step=2), METRICS)
    run = fake_run(tmp_path / "two")
    checkpoints.resume(run, folder)
    assert run.step == 2
    assert run.tracker.restored == []


def test_a_run_with_a_critic_cannot_go_on_from_one_without(tmp_path):
    folder = checkpoints.save(fake_run(tmp_path, step=1), METRICS)
    with pytest.raises(
        CheckpointError, match=r"no critic, which algorithm\.adv_estimator=gae needs.*resume_mode=disable"
    ):
        checkpoints.resume(fake_run(tmp_path, critic=FakeEngine()), folder)


def test_a_folder_without_the_trainers_state_is_refused(tmp_path):
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"trainer\.json is missing"):
        checkpoints.resume(fake_run(tmp_path), tmp_path / "global_step_3")


def test_nothing_is_left_of_a_checkpoint_whose_part_fails(tmp_path):
    run = fake_run(tmp_path, step=1)
    checkpoints.save(run, METRICS)
    run.step, run.roles.critic = 2, SimpleNamespace(save=lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(run, METRICS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("name", ["trainer.json", "random.pt"])
def test_a_damaged_file_is_named(tmp_path, name):
    folder = checkpoints.save(fake_run(tmp_path, step=2), METRICS)
    path = folder / name
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged.*trainer\.resume_from_path"):
        checkpoints.resume(fake_run(tmp_path), folder)


def test_a_wrong_digit_is_found(tmp_path):
    folder = checkpoints.save(fake_run(tmp_path, step=2), METRICS)
    path = folder / "trainer.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    with pytest.raises(CheckpointError, match=r"trainer\.json is damaged: .*its checksum differs"):
        checkpoints.resume(fake_run(tmp_path), folder)


def full_disk(folder):
    raise OSError(errno.ENOSPC, "No space left on device")


def hidden_full_disk(folder):
    torch.save({"a": torch.zeros(100_000)}, "/dev/full")


def torch_full_disk(folder):
    raise CheckpointException("write", {0: (OSError(errno.ENOSPC, "No space left on device"), None)})


@pytest.mark.parametrize("save", [full_disk, hidden_full_disk, torch_full_disk])
def test_a_full_disk_is_told_of_with_the_checkpoint_before(tmp_path, save):
    run = fake_run(tmp_path, step=1)
    checkpoints.save(run, METRICS)
    run.step, run.roles.critic = 2, SimpleNamespace(save=save)
    with pytest.raises(
        CheckpointError, match=r"cannot be written to .* GB are free.*is still .*global_step_1\. Make room"
    ):
        checkpoints.save(run, METRICS)
    assert not (tmp_path / "global_step_2").exists()
