"""A checkpoint whose parts are written by threads: it has its name when all of them are on the disk, and not before."""

import errno
import time

import pytest
from tests.trainer.fakes import FakeEngine

from verl.core.checkpoint_engine.store import CheckpointStore, defect
from verl.errors import CheckpointError
from verl.trainer.saving import Saver


class SlowEngine(FakeEngine):
    """Its parts are on the disk after it has been asked `polls` times, or when one waits for them."""

    def __init__(self, polls=0, error=None):
        super().__init__()
        self.polls, self.error = polls, error

    def saved(self, wait=False):
        self.polls = 0 if wait else self.polls - 1
        if self.polls <= 0 and self.error is not None:
            raise self.error
        return self.polls <= 0


def begin(saver, step, *engines):
    with saver.writing(step, engines) as folder:
        for number, engine in enumerate(engines):
            engine.save(folder / str(number))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_it_is_named_when_every_engine_has_written(tmp_path):
    saver = Saver(CheckpointStore(tmp_path))
    begin(saver, 1, SlowEngine(polls=1), SlowEngine(polls=3))
    for _ in range(2):
        assert saver.settle() is None
        assert names(tmp_path / ".writing_global_step_1") == ["0", "1"]  # without a manifest
    deadline = time.monotonic() + 60
    while (path := saver.settle()) is None and time.monotonic() < deadline:  # a thread seals it
        time.sleep(0.01)
    assert path == tmp_path / "global_step_1"
    assert defect(tmp_path / "global_step_1") is None
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert saver.settle() is None


def test_the_next_one_and_the_end_wait_for_it(tmp_path):
    saver = Saver(CheckpointStore(tmp_path, keep=1))
    begin(saver, 1, SlowEngine(polls=100))
    begin(saver, 2, SlowEngine(polls=100))
    assert names(tmp_path) == [".writing_global_step_2", "global_step_1", "latest_checkpointed_iteration.txt"]
    assert saver.settle(wait=True) == tmp_path / "global_step_2"
    assert names(tmp_path) == ["global_step_2", "latest_checkpointed_iteration.txt"]


def test_a_full_disk_in_a_thread_is_told_of_and_leaves_nothing_half(tmp_path):
    saver = Saver(CheckpointStore(tmp_path))
    begin(saver, 1, SlowEngine())
    saver.settle()
    begin(saver, 2, SlowEngine(error=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device.*is still .*global_step_1\. Make room"):
        saver.settle()
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert saver.settle(wait=True) is None


def test_what_is_not_named_is_not_found(tmp_path):
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    begin(saver, 1, SlowEngine())
    saver.settle()
    begin(saver, 2, SlowEngine(polls=100))
    # As after a kill: another process looks for what to go on from.
    told = []
    assert CheckpointStore(tmp_path, notify=told.append).find("auto") == tmp_path / "global_step_1"
    assert names(tmp_path) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    assert ".writing_global_step_2" in told[0]
