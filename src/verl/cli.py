"""The console command `verl`. Each subcommand imports what it needs, so that `verl --help` is instant."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from verl.config.command import handle_flags, run_main
from verl.config.schema import PPOConfig
from verl.config.suggest import did_you_mean, nearest_words
from verl.errors import ConfigError, DataError

USAGE = """usage: verl COMMAND ...

  verl train key=value ...     train (the same as python3 -m verl.trainer.main_ppo)
  verl plan key=value ...      print the batch plan of such a run, without training
  verl sft key=value ...       fine-tune on conversations (python3 -m verl.trainer.sft_trainer)
  verl generate key=value ...  responses to a file of prompts (python3 -m verl.trainer.main_generation)
  verl eval key=value ...      score a file of responses (python3 -m verl.trainer.main_eval)
  verl merge ...               write a checkpoint as a Hugging Face folder (python3 -m verl.model_merger merge)
  verl help [WORD]             all options, or those with WORD in their name or help
  verl --version               print the version
"""

MODULES = {"train": "main_ppo", "sft": "sft_trainer", "generate": "main_generation", "eval": "main_eval"}
COMMANDS = (*MODULES, "plan", "merge", "help")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_main(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str]) -> int | None:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        handle_flags([command])
    if command in MODULES:
        return importlib.import_module(f"verl.trainer.{MODULES[command]}").main(rest)
    if command == "merge":
        return importlib.import_module("verl.model_merger.__main__").main(["merge", *rest])
    if command == "plan":
        return plan(rest)
    if command == "help":
        handle_flags(["--help", *rest])
    hint = " To train, write verl train key=value ..." if "=" in command else ""
    raise ConfigError(f"verl {command}: no such command.{did_you_mean(nearest_words(command, COMMANDS))}{hint}")


def plan(argv: list[str]) -> int:
    """Print the batch plan of a run; reads only the number of rows of its data files."""
    from verl.config.batch_plan import BatchPlan
    from verl.config.compose import compose, print_notice
    from verl.config.derived import name_list, num_devices
    from verl.config.validate import validate

    config = compose(handle_flags(argv))
    notices = validate(config)
    rows = sum(count_rows(Path(file).expanduser()) for file in name_list(config.data.train_files))
    limit = config.data.train_max_samples
    rows = min(rows, limit) if limit > 0 else rows
    if config.data.filter_overlong_prompts:
        notices.append(
            "counted before data.filter_overlong_prompts, which needs the tokenizer; the run may have fewer."
        )
    batch_plan = BatchPlan.make(config, rows, num_devices(config.trainer), with_critic=_with_critic(config))
    print(batch_plan.table())
    for notice in [*notices, *batch_plan.notices]:
        print_notice(notice)
    return 0


def _with_critic(config: PPOConfig) -> bool | None:
    """Whether the estimator needs a critic, where only the user's own files can tell."""
    if not config.trainer.plugins:
        return None
    return importlib.import_module("verl.trainer.algorithm").choose_algorithm(config)[0].needs.critic


def count_rows(file: Path) -> int:
    """Rows of a parquet file (from its footer) or lines of a jsonl file.

    Raises:
        DataError: for a file that is missing or is neither.
    """
    if not file.is_file():
        raise DataError(f"{file}: there is no such file (data.train_files).")
    if file.suffix in (".jsonl", ".json"):
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(file).num_rows
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error}).") from None


if __name__ == "__main__":
    sys.exit(main())
