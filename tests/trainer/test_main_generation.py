"""Prompts of a file to responses of a file."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config.command import run_main
from verl.trainer.main_generation import main

PROMPTS = ["1+1=", "12+34=", "9-8="]


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": text}], "extra": i} for i, text in enumerate(PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def generate(prompts, model, name, *words):
    out = prompts.parent / f"{name}.parquet"
    lengths = ["rollout.prompt_length=8", "rollout.response_length=6"]
    status = run_main(
        main, [f"data.path={prompts}", f"data.output_path={out}", f"model.path={model}", *lengths, *words]
    )
    assert status == 0
    return pq.read_table(out)


def test_greedy_responses_are_transformers(prompts, tiny_model):
    table = generate(prompts, tiny_model, "greedy", "rollout.do_sample=False")
    assert table.column_names == ["prompt", "extra", "responses"]
    assert table.column("extra").to_pylist() == [0, 1, 2]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for text, [response] in zip(PROMPTS, table.column("responses").to_pylist()):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
        assert response == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_batches_do_not_change_what_is_drawn(prompts, tiny_model):
    one = generate(prompts, tiny_model, "one", "data.n_samples=4", "data.batch_size=1")
    all_at_once = generate(prompts, tiny_model, "all", "data.n_samples=4")
    assert one.column("responses").to_pylist() == all_at_once.column("responses").to_pylist()
    assert all(len(set(row)) > 1 for row in one.column("responses").to_pylist())
    other = generate(prompts, tiny_model, "other", "data.n_samples=4", "rollout.seed=1")
    assert other.column("responses").to_pylist() != one.column("responses").to_pylist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.output_path=out.csv"], "has to end in .parquet"),
        (["data.prompt_key=question"], "question"),
        (["rollout.prompt_length=3", "data.truncation=error"], "4 tokens are more than rollout.prompt_length=3"),
        (["trainer.device=cuda"], "trainer.device=cuda: this machine has no usable GPU"),
        (["rollout.name=vlm"], "Did you mean vllm"),
    ],
)
def test_what_does_not_fit_is_told(prompts, tiny_model, capsys, words, message):
    if "cuda" in words[0] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    base = [f"data.path={prompts}", f"data.output_path={prompts.parent / 'out.parquet'}", f"model.path={tiny_model}"]
    assert run_main(main, [*base, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (prompts.parent / "out.parquet").exists()
