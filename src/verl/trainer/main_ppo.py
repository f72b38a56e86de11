"""`python3 -m verl.trainer.main_ppo key=value ...`: PPO, GRPO and their kin."""

from __future__ import annotations

import sys

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


def _say_how_it_ended(status: str, folder: object, report: object) -> None:
    if status == "finished":
        print(f"done: checkpoints and metrics.jsonl are in {folder}, the report is {report}")
    elif status == "interrupted":
        print(f"interrupted: run the same command again to go on from the newest checkpoint in {folder}")
    else:
        print(f"failed: what was saved is in {folder}; run the same command again to go on from it", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
