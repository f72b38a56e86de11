"""`python3 -m verl.trainer.main_ppo key=value ...`: PPO, GRPO and their kin."""

from __future__ import annotations

import sys
from pathlib import Path

from verl.config.command import handle_flags, run_main


def main(argv: list[str]) -> int:
    """Train; returns the exit status (0, or 130 after Ctrl-C)."""
    overrides = handle_flags(argv)
    from verl.config.compose import compose
    from verl.config.validate import validate

    config = compose(overrides)
    notices = validate(config)

    from verl.trainer.pipelines import train
    from verl.trainer.run import prepare

    run = prepare(config, notices)
    status = "failed"
    try:
        status = train(run)
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        report = run.close(status)
        _say_how_it_ended(status, run.store.folder, report)
    return 0 if status == "finished" else 130


def _say_how_it_ended(status: str, folder: Path, report: Path) -> None:
    if status == "finished":
        print(f"done: checkpoints and metrics.jsonl are in {folder}, the report is {report}")
        return
    saved = any(folder.glob("global_step_*"))
    go_on = f"to go on from the newest checkpoint in {folder}" if saved else "to start anew: nothing was saved yet"
    out = sys.stdout if status == "interrupted" else sys.stderr
    print(f"{status}: run the same command again {go_on}", file=out)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
