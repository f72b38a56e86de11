"""What the benchmarks make on the spot."""

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, Qwen2Config

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_workloads

    yield step_workloads
    sys.modules.pop("step_workloads")


def test_a_random_shape_takes_the_place_of_the_model_and_keeps_its_tokenizer(workloads, tmp_path):
    work = workloads.cpu_workload(tmp_path, smoke=True)
    before = work.model
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    workloads.with_random_shape(work, config, tmp_path / "shape")
    assert work.model == str(tmp_path / "shape")
    made = AutoConfig.from_pretrained(work.model)
    assert (made.hidden_size, made.vocab_size, made.eos_token_id) == (16, 64, 1)
    old, new = AutoTokenizer.from_pretrained(before), AutoTokenizer.from_pretrained(work.model)
    assert new("12+3=").input_ids == old("12+3=").input_ids
    assert new.chat_template == old.chat_template


def test_a_shape_with_too_few_tokens_is_refused(workloads, tmp_path):
    work = workloads.cpu_workload(tmp_path, smoke=True)
    config = Qwen2Config(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="the shape 8"):
        workloads.with_random_shape(work, config, tmp_path / "shape")
