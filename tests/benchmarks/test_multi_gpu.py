"""A case that fails or hangs costs its own figures alone."""

import argparse
import json
import sys
import time

import psutil
import pytest
from tests.scripts import BENCHMARKS, load_benchmark


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load_benchmark("multi_gpu")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_out_of_time_ends_with_all_that_it_started(benchmark, tmp_path):
    code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
    status, seconds = benchmark.run(python(code), tmp_path / "log", limit=2)
    assert status == "out of time after 2 s"
    assert 2 <= seconds < 20
    child = int((tmp_path / "log").read_text())
    for _ in range(50):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


def test_cases_after_one_that_fails_and_none_after_the_end(benchmark, tmp_path, capsys):
    bench = benchmark.Bench(argparse.Namespace(limit=30), tmp_path, tmp_path, time.monotonic() + 60)
    read = benchmark._last_json
    bench.case("a", "fails", python("print('what went wrong'); raise SystemExit(3)"), read)
    bench.case("a", "works", python("import json; print(json.dumps({'seconds': 2}))"), read)
    bench.case("a", "says nothing", python(""), lambda text: json.loads(text))
    bench.ends = time.monotonic()
    bench.case("a", "late", python(""), read)
    lines = [json.loads(line) for line in (tmp_path / "multi_gpu.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == [
        "failed with status 3",
        "done",
        "done",
        "not begun: --total is used up",
    ]
    assert lines[1]["seconds"] == 2
    assert lines[2]["unread"].startswith("JSONDecodeError")
    assert "what went wrong" in capsys.readouterr().out


def test_table_by_hand(benchmark, capsys):
    one = {"group": "w1", "case": "1 GPU", "status": "done", "steps": 4, "devices": 1, "seconds": {"step": 8.0}}
    two = one | {"case": "2 GPUs", "devices": 2, "seconds": {"step": 5.0, "gen": 1.5}}
    benchmark.steps_table([one, two, {"group": "w1", "case": "x", "status": "out of time after 2 s"}], one)
    _, _, first, second, third = capsys.readouterr().out.splitlines()
    assert first.split()[-2:] == ["1.00", "1.00"]
    assert second.split()[-2:] == ["1.60", "0.80"]
    assert third.endswith("out of time after 2 s")
