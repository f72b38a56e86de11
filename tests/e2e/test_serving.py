"""From a training run to an answer: train, merge, serve, ask through OpenAI's client."""

import pytest
import torch
from examples.ask import ask
from tests.core.rollout_engine.service.conftest import serving
from tests.e2e.runs import overrides, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.model_merger.__main__ import main as merge

pytestmark = pytest.mark.e2e


def test_a_merged_model_answers_as_transformers_does(tiny_model, tiny_data, tmp_path, capsys):
    run, merged = tmp_path / "run", tmp_path / "merged"
    words = overrides(tiny_model, tiny_data, run, trainer__total_training_steps=1, data__val_files="null")
    assert train([*words, "actor_rollout_ref.actor.optim.lr=1e-2"]) == 0
    checkpoint = run / "global_step_1" / "actor"
    assert not merge(["merge", "--backend", "fsdp", "--local_dir", str(checkpoint), "--target_dir", str(merged)])

    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    question = "12+34="
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
    else:
        text = question
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    drawn = model.generate(ids, do_sample=False, max_new_tokens=64)[0, ids.shape[1] :]
    expected = tokenizer.decode(drawn, skip_special_tokens=True)
    with serving(merged) as server:
        assert server.state()["model"] == "merged"
        capsys.readouterr()
        assert ask(question, server.url) == expected
        assert capsys.readouterr().out == f"{expected}\n"
