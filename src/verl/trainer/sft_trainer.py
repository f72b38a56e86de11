"""`python3 -m verl.trainer.sft_trainer data.train_files=FILE model.path=MODEL`: supervised fine-tuning on conversations."""

from __future__ import annotations

import sys
from pathlib import Path

from verl.config.command import handle_flags, run_main
from verl.config.compose import compose, print_notice
from verl.config.schema import SFTConfig
from verl.config.validate_sft import validate_sft
from verl.data.reading import check_parquet_columns, list_files

USAGE = """usage: python3 -m verl.trainer.sft_trainer data.train_files=FILE model.path=MODEL [key=value ...]

FILE is parquet or jsonl with chat messages in the column data.messages_key; the assistant's turns are trained.
"""


def main(argv: list[str]) -> int:
    """Train; returns the exit status (0, or 130 after Ctrl-C)."""
    config: SFTConfig = compose(handle_flags(argv, SFTConfig, USAGE), SFTConfig)
    for notice in validate_sft(config):
        print_notice(notice)
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for file in list_files(files, key) if files else []:
            check_parquet_columns(file, {"data.messages_key": config.data.messages_key})
    from verl.trainer.folder import FolderLock

    lock = FolderLock(Path(config.trainer.default_local_dir).expanduser())
    try:
        return _train(config)
    finally:
        lock.release()


def _train(config: SFTConfig) -> int:
    from verl.trainer.sft import prepare, train

    run = prepare(config)
    status = "failed"
    try:
        status = train(run)
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        report = run.tracker.finish(status)
        where = f"{status}: checkpoints and metrics.jsonl are in {run.store.folder}"
        print(f"{where}, the report is {report}" if report else where)
    return 0 if status == "finished" else 130


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
