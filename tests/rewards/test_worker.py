"""Reward worker processes: how they start, and that they end with the trainer."""

import subprocess
import sys
import time

import psutil
import pytest

from verl.errors import RewardError
from verl.rewards import RewardInput
from verl.rewards.custom import CustomFunction
from verl.rewards.pool import WorkerPool

CUSTOM = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return os.getpid()
"""


@pytest.fixture(autouse=True)
def custom(tmp_path):
    (tmp_path / "custom.py").write_text(CUSTOM)


def test_workers_end_when_the_trainer_is_killed(tmp_path):
    code = f"""
from verl.config.schema import CustomRewardConfig, RewardConfig
from verl.rewards import RewardInput, RewardManager
import os, signal
if __name__ == "__main__":
    manager = RewardManager(RewardConfig(), CustomRewardConfig(path={str(tmp_path / "custom.py")!r}))
    pids = {{int(p) for p in manager.score([RewardInput("x", "pid")] * 8).scores}}
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = tmp_path / "killed.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "workers outlived the trainer"
        time.sleep(0.1)


def test_a_busy_worker_ends_when_the_trainer_is_killed(tmp_path):
    pid_file, script = tmp_path / "busy.pid", tmp_path / "busy.py"
    (tmp_path / "endless.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    Path({str(pid_file)!r} + '~').write_text(str(os.getpid()))\n"
        f"    os.rename({str(pid_file)!r} + '~', {str(pid_file)!r})\n"
        "    while True: pass\n"
    )
    script.write_text(f"""
from verl.config.schema import CustomRewardConfig, RewardConfig
from verl.rewards import RewardInput, RewardManager
import os, signal, time
if __name__ == "__main__":
    config = RewardConfig(timeout=600, num_workers=1)
    RewardManager(config, CustomRewardConfig(path={str(tmp_path / "endless.py")!r})).submit([RewardInput("x", "y")])
    while not os.path.exists({str(pid_file)!r}):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    subprocess.run([sys.executable, str(script)], stderr=subprocess.DEVNULL, timeout=60)
    pid, deadline = int(pid_file.read_text()), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < deadline, "a busy worker outlived the trainer"
        time.sleep(0.05)


def test_a_file_that_blocks_at_its_import_in_workers_is_said(tmp_path):
    path = tmp_path / "blocks.py"
    path.write_text(
        "import multiprocessing, threading\n"
        "if multiprocessing.parent_process():\n    threading.Lock().acquire() and threading.Event().wait()\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    pool = WorkerPool(1, CustomFunction(str(path), "compute_score"))
    try:
        pool.start(limit=0.5)
        with pytest.raises(RewardError, match=r"not in a worker process\. The import of .*blocks\.py took longer than"):
            pool.submit(None, [RewardInput("x", "a")], 1.0).wait()
    finally:
        pool.close()


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from verl.config.schema import CustomRewardConfig, RewardConfig\n"
        "from verl.rewards import RewardInput, RewardManager\n"
        f"manager = RewardManager(RewardConfig(), CustomRewardConfig(path={str(tmp_path / 'custom.py')!r}))\n"
        "print(manager.score([RewardInput('x', 'abc')]).scores)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "needs `if __name__ == '__main__':`" in done.stderr
