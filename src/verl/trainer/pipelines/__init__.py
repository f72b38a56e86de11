"""Pipelines by the name that `trainer.pipeline` takes: the same stages, and who waits for whom."""

from verl.trainer.pipelines import sync
from verl.trainer.run import Run

PIPELINES = {"sync": sync.train}


def train(run: Run) -> str:
    """Train with the run's pipeline. Returns "finished" or "interrupted"."""
    return PIPELINES[run.config.trainer.pipeline](run)
