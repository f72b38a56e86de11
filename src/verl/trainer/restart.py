"""What a run does when a worker's process has died: say where the last checkpoint is, or go on from it."""

from __future__ import annotations

import dataclasses

from verl.config.compose import print_notice
from verl.config.schema import PPOConfig
from verl.errors import WorkerDied
from verl.trainer.run import Run


def go_on_after(death: WorkerDied, run: Run, restarts: int) -> PPOConfig:
    """The config with which the run goes on from its last checkpoint, or anew where there is none.

    restarts: made before this one.

    Raises:
        WorkerDied: trainer.max_restarts is reached; the message says where the last checkpoint is.
    """
    allowed, trainer = run.config.trainer.max_restarts, run.config.trainer
    saved = run.last_checkpoint
    where = f"The last checkpoint is {saved}" if saved is not None else "No checkpoint had been saved"
    if restarts >= allowed:
        raise WorkerDied(
            f"{death} {where}; {run.step} steps were done. (trainer.max_restarts is {allowed}: so often a run goes on by "
            "itself.)"
        ) from None
    print_notice(f"{death} {where}: starting from there, restart {restarts + 1} of trainer.max_restarts={allowed}.")
    if saved is None:
        return run.config
    resumed = dataclasses.replace(trainer, resume_mode="resume_path", resume_from_path=str(saved))
    return dataclasses.replace(run.config, trainer=resumed)
