"""`benchmarks/transfer_queue.py` runs, and counts what it says."""

import pytest
from tests.scripts import load_benchmark


@pytest.fixture(scope="module")
def benchmark():
    return load_benchmark("transfer_queue")


def test_smoke(benchmark, capsys):
    benchmark.main(["--smoke", "--no-ray"])
    out = capsys.readouterr().out
    assert "4 prompts x 2 samples of 8 tokens" in out
    assert [line.split(" |")[0] for line in out.splitlines()[4:]] == [
        "| a plain list",
        "| queue.Queue",
        "| local, a call for a sample",
        "| local, a call for a group",
        "| local, a call for 64 groups",
    ]


@pytest.mark.slow
@pytest.mark.e2e
def test_smoke_on_ray(benchmark, cluster, capsys):
    benchmark.main(["--smoke"])
    out = capsys.readouterr().out
    assert [line.count("|") for line in out.splitlines() if line.startswith("| Ray")] == [9] * 3
    assert 0 < float(out.split("only answers: ")[1].split()[0]) < 1000


def test_table_by_hand(benchmark):
    """1,000 samples of 2 tokens and no prompt: 16 + 2 + 8 + 16 + 4 bytes each, 0.046 MB in all."""
    work = benchmark.Work(prompts=500, samples=2, tokens=2, prompt_tokens=0)
    last = benchmark.table({"it": benchmark.Figures(put=0.01, score=0.02, take=0.001)}, work, 10).splitlines()[-1]
    assert last == "| it | 100,000 | 5 | 50,000 | 1,000,000 | 46 | 0.031 | 0.31% |"


def test_samples_that_change_on_the_way_are_noticed(benchmark):
    class Lossy(benchmark.PlainList):
        def put_many(self, rows):
            super().put_many([(uid, i, fields) for uid, i, fields in rows if "score" not in fields])
            super().put_many([(uid, i, {"score": 0.5}) for uid, i, fields in rows if "score" in fields])

    with pytest.raises(AssertionError, match="other than they went in"):
        benchmark.one_pass(Lossy(benchmark.Work(4, 2, 8, 3, 3)), benchmark.Work(4, 2, 8, 3, 3), 1)
