"""Pipelines by the name that `trainer.pipeline` takes: the same stages, and who waits for whom."""

from verl.trainer.pipelines import fully_async, one_step_off, sync
from verl.trainer.run import Run

PIPELINES = {"sync": sync.train, "one_step_off": one_step_off.train, "fully_async": fully_async.train}


def train(run: Run) -> str:
    """Train with the run's pipeline. Returns "finished" or "interrupted"."""
    return PIPELINES[run.config.trainer.pipeline](run)
