"""`python3 -m verl.trainer.main_ppo key=value ...`: PPO, GRPO and their kin."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

from verl.config.command import handle_flags, run_main
from verl.errors import WorkerDied

if TYPE_CHECKING:
    from verl.core.checkpoint_engine.store import CheckpointStore


def main(argv: list[str]) -> int:
    """Train; returns the exit status (0, or 130 after Ctrl-C)."""
    overrides = handle_flags(argv)
    from verl.config.compose import compose
    from verl.config.validate import validate

    config = compose(overrides)
    notices = validate(config)

    from verl.trainer.precheck import precheck

    precheck(config)

    from verl.trainer.pipelines import train
    from verl.trainer.restart import go_on_after
    from verl.trainer.run import NothingToDo, prepare

    for restarts in itertools.count():
        try:
            run = prepare(config, notices)
        except NothingToDo as done:
            print(done)
            return 0
        status = "failed"
        try:
            status = train(run)
        except KeyboardInterrupt:
            status = "interrupted"
        except WorkerDied as death:
            config = go_on_after(death, run, restarts)
            status = "restarting"
        except Exception as error:
            error.add_note(_how_to_go_on(run.store))  # printed below the error
            raise
        finally:
            report = run.close(status)
        if status != "restarting":
            break
    if status == "finished":
        where = f"done: checkpoints and metrics.jsonl are in {run.store.folder}"
        print(f"{where}, the report is {report}" if report else where)
        return 0
    print(f"interrupted: {_how_to_go_on(run.store)}")
    return 130


def _how_to_go_on(store: CheckpointStore) -> str:
    if (newest := store.newest()) is not None:
        return f"run the same command again to go on from the newest checkpoint, {newest.path}"
    return "nothing was saved yet: the same command starts anew"


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
