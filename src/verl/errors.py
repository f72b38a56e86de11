"""Errors that are the user's to mend: shown as one message without a traceback, exit code 2."""


class UserError(Exception):
    """Something outside the program is wrong: a config value, a data file, a reward function.

    The message says what was wrong, where (key, file, row), and what to write instead.
    """

    exit_code = 2


class ConfigError(UserError):
    """A config key or value that cannot be used."""


class DataError(UserError):
    """A data file that is missing, unreadable, or does not follow the schema."""


class RewardError(UserError):
    """A reward function that cannot be loaded, or has the wrong signature or result."""


class WorkerDied(UserError):
    """A worker process that ended by itself: killed by the system, often for its memory, or gone with its machine."""

    exit_code = 1


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or does not fit this run."""
