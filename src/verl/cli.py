"""The console command `verl`. Each subcommand imports what it needs, so that `verl --help` is instant."""

from __future__ import annotations

import importlib
import sys

from verl.config.command import handle_flags, run_main
from verl.config.suggest import did_you_mean, nearest_words
from verl.errors import ConfigError

USAGE = """usage: verl COMMAND ...

  verl train key=value ...     train (the same as python3 -m verl.trainer.main_ppo)
  verl plan key=value ...      print the batch plan of such a run, without training
  verl sft key=value ...       fine-tune on conversations (python3 -m verl.trainer.sft_trainer)
  verl generate key=value ...  responses to a file of prompts (python3 -m verl.trainer.main_generation)
  verl eval key=value ...      score a file of responses (python3 -m verl.trainer.main_eval)
  verl serve model=PATH ...    answer over HTTP, to OpenAI's clients and to trainers (python3 -m verl.trainer.main_serve)
  verl merge ...               write a checkpoint as a Hugging Face folder (python3 -m verl.model_merger merge)
  verl help [WORD]             all options, or those with WORD in their name or help
  verl --version               print the version
"""

MODULES = {
    "train": "main_ppo",
    "sft": "sft_trainer",
    "generate": "main_generation",
    "eval": "main_eval",
    "serve": "main_serve",
}
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
    """Print the batch plan of a run; of its data files only columns and number of rows are read."""
    from verl.config.compose import compose, print_notice
    from verl.config.validate import validate
    from verl.trainer.precheck import precheck

    config = compose(handle_flags(argv))
    notices = validate(config)
    precheck(config)  # before the algorithms, which take torch's seconds to import
    estimator, _ = importlib.import_module("verl.trainer.algorithm").choose_algorithm(config)
    batch_plan = precheck(config, with_critic=estimator.needs.critic)
    if config.data.filter_overlong_prompts:
        notices.append(
            "counted before data.filter_overlong_prompts, which needs the tokenizer; the run may have fewer."
        )
    print(batch_plan.table())
    for notice in [*notices, *batch_plan.notices]:
        print_notice(notice)
    print("Not checked here: the model, the contents of the rows, and the reward function.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
