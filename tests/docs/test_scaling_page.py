"""docs/scaling.md holds what benchmarks/scaling.py reckons, and the reckoning what was measured."""

from pathlib import Path

import pytest
from tests.scripts import load_benchmark

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling():
    return load_benchmark("scaling")


def test_table_is_current(scaling):
    page = (ROOT / "docs" / "scaling.md").read_text()
    table = page.partition("<!-- table: begin -->\n")[2].partition("\n<!-- table: end -->")[0]
    assert table == scaling.markdown(scaling.Machine(), scaling.Work())


def test_a_decode_step_is_as_long_as_measured(scaling):
    # 1,024 rows of the 7B shape on one GPU, at position 300 to 400: 31 ms.
    work = scaling.Work(prompts=1024, samples_per_prompt=1, mean_prompt=150, mean_response=512, longest_response=512)
    step = (scaling.generation(scaling.MODELS[0], 1, scaling.Machine(), work)) / 512
    prefill = 2 * 7.62e9 * 1024 * 150 / (989e12 * 0.5) / 512
    assert step - prefill == pytest.approx(0.031, rel=0.1)


def test_collective_by_hand(scaling):
    machine = scaling.Machine(node_bandwidth=100e9, cluster_bandwidth=50e9, hop_seconds=1e-3)
    assert scaling.collective(8e9, 8, machine) == pytest.approx(7e9 / 100e9 + 8e-3)
    assert scaling.collective(16e9, 16, machine) == pytest.approx(15e9 / 50e9 + 16e-3)
    assert scaling.collective(1e9, 1, machine) == 0


def test_training_state_is_eighteen_bytes_a_parameter(scaling):
    model, work = scaling.MODELS[0], scaling.Work(tokens_per_micro_batch=0)
    few = scaling.memory(model, 8, scaling.Machine(), work)["update"]
    many = scaling.memory(model, 16, scaling.Machine(), work)["update"]
    assert few - many == pytest.approx(18 * model.parameters / 16)
