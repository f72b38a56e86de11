"""A logger that fails, hangs or lags costs the run nothing but its own records."""

import threading
import time

import pytest

from verl.tracking.background import FAILURES_IN_A_ROW, Background


class Recorder:
    name = "recorder"
    run_id = None
    closes_in_caller = False

    def __init__(self, bad=()):
        self.bad, self.calls, self.closed, self.close_thread = set(bad), [], None, None

    def log(self, metrics, step):
        if step in self.bad:
            raise ConnectionError(f"no route at {step}")
        self.calls.append((step, dict(metrics)))

    def log_generations(self, rows, step):
        self.calls.append((step, rows))

    def close(self, status):
        self.closed, self.close_thread = status, threading.current_thread()


def run(backend, steps, **options):
    notices = []
    background = Background(backend, notices.append, **options)
    for step in steps:
        background.log({"a": step}, step)
    return background, notices


def test_records_arrive_in_order():
    backend = Recorder()
    background, notices = run(backend, range(50))
    background.log_generations([{"x": 1}], 50)
    background.close("finished")
    assert [step for step, _ in backend.calls] == list(range(51))
    assert backend.closed == "finished"
    assert notices == []


def test_one_failure_is_said_and_survived():
    backend = Recorder(bad=[2])
    background, notices = run(backend, range(5))
    background.close("finished")
    assert [step for step, _ in backend.calls] == [0, 1, 3, 4]
    assert len(notices) == 2
    assert "ConnectionError: no route at 2" in notices[0]
    assert "lost 1 records" in notices[1]


def test_a_dead_logger_is_turned_off():
    backend = Recorder(bad=range(100))
    background, notices = run(backend, range(30))
    background.close("failed")
    assert backend.calls == []
    assert len(notices) == 3
    assert f"failed {FAILURES_IN_A_ROW} times in a row" in notices[1]
    assert "lost 31 records" in notices[2]


@pytest.mark.parametrize("in_caller", [False, True])
def test_thread_of_the_close(in_caller):
    backend = Recorder()
    backend.closes_in_caller = in_caller
    background, _ = run(backend, [1])
    background.close("finished")
    assert (backend.close_thread is threading.current_thread()) is in_caller


def test_a_logger_that_hangs_neither_blocks_nor_keeps_the_process():
    release = threading.Event()
    backend = Recorder()
    backend.log = lambda metrics, step: release.wait(30)
    start = time.monotonic()
    background, notices = run(backend, range(10), capacity=3)
    background.close("finished", timeout=0.2)
    assert time.monotonic() - start < 5
    assert background._thread.daemon
    assert "cannot keep up" in notices[0]
    assert "did not finish within" in notices[1]
    assert "lost" in notices[2]
    release.set()
