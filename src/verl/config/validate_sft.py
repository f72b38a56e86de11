"""Checks across options of fine-tuning that need the config alone."""

from __future__ import annotations

from verl.config.compose import join_problems
from verl.config.schema import SFTConfig
from verl.config.validate import (
    Findings,
    check_checkpoint,
    check_files,
    check_loggers,
    check_optimizer,
    check_resume,
)
from verl.errors import ConfigError


def validate_sft(config: SFTConfig) -> list[str]:
    """Notices for the user.

    Raises:
        ConfigError: with all problems.
    """
    found, data = Findings(), config.data
    check_files("data.train_files", data.train_files, True, found)
    check_files("data.val_files", data.val_files, False, found)
    found.problem(data.train_max_samples == 0, "data.train_max_samples=0 leaves no conversation; -1 takes all.")
    found.problem(
        data.val_max_samples == 0, "data.val_max_samples=0 leaves no conversation; write data.val_files=null."
    )
    rows = data.train_max_samples
    found.problem(
        0 < rows < data.train_batch_size,
        f"data.train_batch_size={data.train_batch_size} is more than data.train_max_samples={rows}, so not one update can be "
        f"made. Set it to at most {rows}.",
    )
    check_loggers(config, found)
    check_resume(config, found)
    check_optimizer("optim", config.optim, found)
    check_checkpoint("checkpoint", config.checkpoint, found)
    no_files = data.val_files in (None, [])
    found.notice(
        config.trainer.test_freq > 0 and no_files,
        f"trainer.test_freq={config.trainer.test_freq} has no effect without data.val_files.",
    )
    found.notice(
        data.val_max_samples > 0 and no_files,
        f"data.val_max_samples={data.val_max_samples} has no effect without data.val_files.",
    )
    if found.problems:
        raise ConfigError(join_problems(found.problems))
    return found.notices
