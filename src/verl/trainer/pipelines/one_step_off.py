"""Training on one batch while the next is generated: every batch but the first is one update of the policy old."""

from __future__ import annotations

from verl.trainer.pace import Pace
from verl.trainer.pipelines.fully_async import overlap
from verl.trainer.run import Run


def train(run: Run) -> str:
    """Train until the plan's last step, or until Ctrl-C. Returns "finished" or "interrupted".

    The queue lets generation be one batch ahead. New weights wait until that batch is finished, so that a batch is of one
    policy, and batches come in the order of the data.
    """
    return overlap(run, Pace(staleness=1, in_order=True, sync_every=1, partial=False, part=run.plan.prompts_per_step))
