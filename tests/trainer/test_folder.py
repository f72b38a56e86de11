"""A run's folder: one run at a time, and one that cannot be used is said at once."""

import os
import subprocess
import sys

import pytest

from verl.errors import ConfigError, UserError
from verl.trainer.folder import FolderLock
from verl.trainer.sft_trainer import main


def test_a_second_run_is_told_which_process_has_the_folder(tmp_path):
    lock = FolderLock(tmp_path / "a/run")
    with pytest.raises(UserError, match=rf"process {os.getpid()} on .*trainer\.experiment_name"):
        FolderLock(tmp_path / "a/run")
    FolderLock(tmp_path / "a/other").release()
    lock.release()
    lock.release()
    FolderLock(tmp_path / "a/run").release()


def test_fine_tuning_takes_its_folder_too(tmp_path):
    lock = FolderLock(tmp_path)
    data = tmp_path / "a.jsonl"
    data.write_text("not read before that\n")
    with pytest.raises(UserError, match="another run is writing"):
        main([f"data.train_files={data}", "model.path=none", f"trainer.default_local_dir={tmp_path}"])
    lock.release()


def test_a_killed_run_leaves_no_lock(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from verl.trainer.folder import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (tmp_path / ".lock").read_text().startswith(f"{done.stdout.strip()} on ")
    FolderLock(tmp_path).release()
    assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")


def test_a_folder_that_cannot_be_made_or_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*file/run cannot be made or written"):
        FolderLock(tmp_path / "file/run")
    (tmp_path / "run/.lock").mkdir(
        parents=True
    )  # stands for a folder without the right to write: tests may run as root
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*run cannot be made or written"):
        FolderLock(tmp_path / "run")
