"""Pipelines by the name that `trainer.pipeline` takes: the same stages, and who waits for whom."""

import contextlib

from verl.errors import WorkerDied
from verl.trainer import checkpoints
from verl.trainer.pipelines import fully_async, one_step_off, sync
from verl.trainer.run import Run

PIPELINES = {"sync": sync.train, "one_step_off": one_step_off.train, "fully_async": fully_async.train}


def train(run: Run) -> str:
    """Train with the run's pipeline. Returns "finished" or "interrupted", with every checkpoint on the disk."""
    try:
        status = PIPELINES[run.config.trainer.pipeline](run)
    except WorkerDied:
        raise  # nobody can finish what its thread was writing
    except Exception:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            checkpoints.settle(run, wait=True)
        raise
    checkpoints.settle(run, wait=True)
    return status
