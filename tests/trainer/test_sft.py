"""Supervised fine-tuning against transformers' own loss, and a run that is cut in two."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.e2e.runs import comparable, metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config.command import run_main
from verl.config.compose import compose
from verl.config.schema import SFTConfig
from verl.model_merger.merge import merge
from verl.trainer.losses import with_loss_weights
from verl.trainer.sft import SFTLoss, prepare, validation_loss
from verl.trainer.sft_trainer import main

PAIRS = [(f"{a}+{b}=", str(a + b)) for a in range(10, 18) for b in range(3, 7)]


@pytest.fixture
def data(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "n": i}
        for i, (q, a) in enumerate(PAIRS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:5]), tmp_path / "val.parquet")
    return tmp_path


def words(model, data, out, *more):
    return [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        "data.train_batch_size=8",
        f"model.path={model}",
        "optim.lr=1e-2",
        f"trainer.default_local_dir={out}",
        *more,
    ]


def reference_loss(folder, pairs):
    """Mean of transformers' cross-entropy over the answers' tokens, one padded-free example at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for question, answer in pairs:
        prompt, response = tokenizer(question)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + response])
        loss = model(torch.tensor([prompt + response]), labels=labels).loss
        total, count = total + float(loss.detach()) * len(response), count + len(response)
    return total / count


def test_loss_is_transformers_cross_entropy_over_the_answers(tiny_model, data, tmp_path):
    small = "data.micro_batch_size_per_gpu=3"
    run = prepare(compose(words(tiny_model, data, tmp_path / "run", small), SFTConfig))
    assert validation_loss(run.engine, run.val_data) == pytest.approx(reference_loss(tiny_model, PAIRS[:5]), rel=1e-5)
    batch = run.train_data.batch(range(8))
    got = run.engine.train_batch(with_loss_weights(batch, "token-mean", 1.0), SFTLoss())
    assert got["loss"] == pytest.approx(reference_loss(tiny_model, PAIRS[:8]), rel=1e-5)
    run.tracker.finish()


def test_it_learns_resumes_to_the_same_numbers_and_merges(tiny_model, data, tmp_path):
    epochs, freq = "trainer.total_epochs=10", "trainer.test_freq=10"
    assert run_main(main, words(tiny_model, data, tmp_path / "whole", epochs, freq)) == 0
    lines = metrics(tmp_path / "whole")
    assert len(lines) == 40
    assert lines[-1]["train/loss"] < 0.6 * lines[0]["train/loss"]
    assert [line["step"] for line in lines if "val/loss" in line] == [10, 20, 30, 40]
    assert lines[-1]["val/loss"] < lines[9]["val/loss"]
    assert lines[0]["train/lr"] == 1e-2

    for stop in ("trainer.total_training_steps=15", epochs):
        assert run_main(main, words(tiny_model, data, tmp_path / "cut", stop, freq)) == 0
    # The first part validates at its own last update too, which is not one of the whole run's.
    cut = [
        {k: v for k, v in line.items() if line["step"] != 15 or k != "val/loss"} for line in metrics(tmp_path / "cut")
    ]
    assert comparable(cut) == comparable(lines)

    merged = merge(tmp_path / "whole" / "global_step_40" / "actor", tmp_path / "merged")
    assert reference_loss(merged.folder, PAIRS[:5]) == pytest.approx(lines[-1]["val/loss"], rel=1e-4)


def test_with_lora_the_adapter_alone_is_trained_and_merges(tiny_model, data, tmp_path):
    pytest.importorskip("peft")
    lora = ["model.lora_rank=8", "model.target_modules=[q_proj,down_proj]", "trainer.total_epochs=4"]
    assert run_main(main, words(tiny_model, data, tmp_path / "run", *lora)) == 0
    lines = metrics(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    merged = merge(tmp_path / "run" / "global_step_16" / "actor", tmp_path / "merged").folder
    assert reference_loss(merged, PAIRS[:5]) == pytest.approx(lines[-1]["val/loss"], rel=1e-4)
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tiny_model, merged))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj.weight" in name or "down_proj.weight" in name}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("data.train_batch_size=33", "data.train_batch_size=33 is more than the 32 conversations"),
        ("data.train_file=x", "Did you mean data.train_files"),
        ("trainer.resume_mode=autoo", "trainer.resume_mode=autoo"),
        ("data.messages_key=chat", "chat"),
        ("engine.ulysses_sequence_parallel_size=2", "engine.ulysses_sequence_parallel_size=2: fine-tuning runs on one"),
        ("engine.fsdp_size=2", "engine.fsdp_size=2: fine-tuning runs on one device. Leave it at -1."),
        ("optim.lr=inf", "optim.lr=inf: has to be a finite number"),
        ("data.val_files=nowhere.parquet", "nowhere.parquet"),
    ],
)
def test_mistakes_are_told(tiny_model, data, tmp_path, capsys, more, message):
    assert run_main(main, words(tiny_model, data, tmp_path / "run", more)) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_cfg_prints_the_whole_config(tiny_model, data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--cfg", "job", *words(tiny_model, data, tmp_path / "run")])
    text = capsys.readouterr().out
    assert "train_batch_size: 8" in text
    assert json.dumps("actor_rollout_ref") not in text
