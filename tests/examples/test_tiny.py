"""The tiny task: its problems, tokenizers, warm start, scripts and summary."""

import importlib
import json
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.rewards.registry import find_scorer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
sys.path.insert(0, str(TINY))
make_data, make_model, quickstart, warm_start = (
    importlib.import_module(name) for name in ("make_data", "make_model", "quickstart", "warm_start")
)


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(TINY / "model"), AutoTokenizer.from_pretrained(TINY / "model")


def operands(prompt):
    op = "+" if "+" in prompt else "-"
    a, b = (int(x) for x in prompt.removesuffix("=").split(op))
    return a, op, b


def test_answers_are_right_and_operands_have_two_or_three_digits():
    pairs = list(islice(make_data.problems(random.Random(5), held_out=False), 2000))
    for prompt, answer in pairs:
        a, op, b = operands(prompt)
        assert int(answer) == {"+": a + b, "-": a - b}[op] >= 0
        assert {len(str(a)), len(str(b))} <= {2, 3}
    # Each kind is a quarter of the draws or more; 2,000 draws put it within 0.05.
    assert abs(sum("+" in p for p, _ in pairs) / 2000 - 0.5) < 0.05
    assert abs(sum(len(p) == 6 for p, _ in pairs) / 2000 - 0.25) < 0.05


def test_no_held_out_problem_is_trained_on_whatever_the_seeds():
    def keys(seed, held_out):
        found = (operands(p) for p, _ in make_data.distinct_problems(4000, seed, held_out=held_out))
        return {(*sorted((a, b)), op) if op == "+" else (a, b, op) for a, op, b in found}

    assert not keys(0, True) & (keys(0, False) | keys(1, False))


def test_held_out_share_is_one_in_eight():
    total = [make_data.is_held_out(a, "-", b) for a in range(100, 300) for b in range(10, 60)]
    assert abs(sum(total) / len(total) - 1 / 8) < 0.01


def test_files_follow_the_dataset_schema_and_repeat(tmp_path):
    train, test = make_data.write(tmp_path / "a", train=50, test=20)
    again, _ = make_data.write(tmp_path / "b", train=50, test=20)
    other, _ = make_data.write(tmp_path / "c", train=50, test=20, seed=1)
    rows = pq.read_table(train).to_pylist()
    assert len(rows) == 50
    assert pq.read_table(test).num_rows == 20
    assert rows == pq.read_table(again).to_pylist() != pq.read_table(other).to_pylist()
    [message] = rows[7]["prompt"]
    a, op, b = operands(message["content"])
    assert rows[7] == {
        "data_source": "tiny/arithmetic",
        "prompt": [{"role": "user", "content": f"{a}{op}{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b if op == "+" else a - b)},
        "extra_info": {"split": "train", "index": 7},
    }


def test_a_scorer_knows_the_data_source():
    score = find_scorer(make_data.DATA_SOURCE).function
    values = [score(make_data.DATA_SOURCE, given, "357", {}) for given in ("357", "358", "3570", "")]
    assert [v["score"] if isinstance(v, dict) else v for v in values] == [1.0, 0.0, 0.0, 0.0]


def test_character_tokenizer_is_the_same_after_loading(tmp_path):
    tokenizer = make_model.character_tokenizer()
    make_model.tiny_qwen2(tokenizer, hidden=16, layers=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for t in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(t) == 17
        assert (t.pad_token_id, t.eos_token_id, t.unk_token_id) == (0, 1, 2)
        # Digits are 3 to 12, then + - * =
        assert t("12+90=")["input_ids"] == [4, 5, 13, 12, 3, 16]
        assert t.decode([6, 8, 10, 1], skip_special_tokens=True) == "357"


def test_chat_template_is_the_bare_prompt_and_ends_answers():
    t = make_model.character_tokenizer()
    question = {"role": "user", "content": "12+90="}
    assert t.apply_chat_template([question], add_generation_prompt=True, tokenize=False) == "12+90="
    turns = [question, {"role": "assistant", "content": "102"}]
    assert t.apply_chat_template(turns, tokenize=False) == "12+90=102<eos>"


def test_byte_tokenizer_takes_any_text(tmp_path):
    tokenizer = make_model.byte_tokenizer()
    model = make_model.tiny_qwen2(tokenizer, hidden=16, layers=1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72 €"
    ids = loaded(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert loaded.decode(ids) == text
    assert len(loaded) == model.get_input_embeddings().num_embeddings == 259


def test_training_batch_targets_are_the_answers_alone():
    t = make_model.character_tokenizer()
    ids, targets = warm_start.training_batch([("12+90=", "102"), ("99-10=", "89")], t)
    assert ids.tolist() == [[4, 5, 13, 12, 3, 16, 4, 3, 5, 1], [12, 12, 14, 4, 3, 16, 11, 12, 1, 0]]
    x = warm_start.IGNORED
    assert targets.tolist() == [[x] * 6 + [4, 3, 5, 1], [x] * 6 + [11, 12, 1, x]]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("27+45=", "62"),  # 7+5 is 12, of which the 1 is lost
        ("12+345=", "357"),  # nothing to carry
        ("99+901=", "990"),  # by column: 0+9, 9+0, 9+1
        ("102-13=", "199"),
        ("155-150=", "5"),
        ("50-50=", "0"),
    ],
)
def test_careless_answers_lose_what_is_carried_or_borrowed(prompt, answer):
    assert warm_start.careless_answer(prompt) == answer


def test_three_problems_in_ten_are_right_without_carrying():
    pairs = make_data.distinct_problems(3000, 0, held_out=True)
    assert abs(sum(warm_start.careless_answer(p) == a for p, a in pairs) / 3000 - 0.3) < 0.03


def test_careless_share_of_the_answers():
    pairs = [("27+45=", "72")] * 2000
    out = list(warm_start.careless(iter(pairs), 0.75, random.Random(0)))
    assert {p for p, _ in out} == {"27+45="}
    assert abs(sum(a == "62" for _, a in out) / 2000 - 0.75) < 0.03
    assert sum(a in ("62", "72") for _, a in out) == 2000


def test_every_parameter_has_one_optimizer():
    model = make_model.tiny_qwen2(make_model.character_tokenizer(), hidden=16, layers=1)
    held = [p for o in warm_start.muon(model, 0.02) for g in o.param_groups for p in g["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_orthogonal_keeps_directions_and_levels_singular_values(shape):
    """The same singular vectors as the matrix, so that in their basis the result is a diagonal near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ warm_start.orthogonal(matrix) @ vh.T
    assert inner.diagonal().min() > 0.65
    assert inner.diagonal().max() < 1.25
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4


def test_muon_takes_the_average_gradient_orthogonal():
    """First step: average = 0.05 g, looked ahead 0.95 * 0.05 g + 0.05 g, so the direction is g's; tall ones go further."""
    weight = torch.nn.Parameter(torch.zeros(16, 4))
    weight.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    warm_start.Muon([weight], lr=0.1).step()
    torch.testing.assert_close(weight.data, -0.1 * 2 * warm_start.orthogonal(weight.grad))


def test_learning_rate_rises_stays_and_falls():
    shares = [warm_start.learning_rate(step, 100, 10) for step in (0, 4, 9, 60, 80, 99)]
    assert shares == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.025])


def test_supervised_training_lowers_the_loss():
    t = make_model.character_tokenizer()
    model = make_model.tiny_qwen2(t, hidden=16, layers=1)
    stream = make_data.problems(random.Random(0), held_out=False)
    losses = warm_start.train(model, t, stream, warm_start.muon(model, 0.02), 30, batch_size=16, warmup=2)
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.3


def test_shipped_model_is_small_float32_and_right_about_a_third_of_the_time(shipped):
    model, tokenizer = shipped
    assert sum(f.stat().st_size for f in (TINY / "model").iterdir()) < 4e6
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    pairs = make_data.distinct_problems(1000, make_data.SEED, held_out=True)
    assert 0.28 < warm_start.accuracy(model, tokenizer, pairs) < 0.40


def test_shipped_model_often_has_the_answer_among_sixteen(shipped):
    model, tokenizer = shipped
    pairs = make_data.distinct_problems(100, make_data.SEED, held_out=True)
    torch.manual_seed(0)
    given = warm_start.answers(model, tokenizer, [p for p, _ in pairs for _ in range(16)], temperature=1.0)
    found = sum(answer in given[16 * i : 16 * i + 16] for i, (_, answer) in enumerate(pairs)) / 100
    once = sum(given[16 * i + j] == pairs[i][1] for i in range(100) for j in range(16)) / 1600
    assert 0.25 < once < 0.55
    assert found > once + 0.3


def test_validation_scores_are_the_first_and_the_last(tmp_path):
    name = "val/test_score/tiny/arithmetic"
    lines = [{"step": 0, name: 0.3}, {"step": 1, "x": 1}, {"step": 10, name: 0.5}, {"step": 20, name: 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert quickstart.validation_scores(tmp_path) == (0.3, 0.75)


def test_samples_are_those_that_were_wrong_before():
    pairs = [("10+10=", "20"), ("99-10=", "89"), ("10+12=", "22")]
    assert quickstart.samples(pairs, ["20", "79", "12"], ["20", "89", "32"]) == [
        "  problem     before   after   right",
        "  99-10=          79      89      89",
        "  10+12=          12      32      22",
    ]
    assert quickstart.share_right(["20", "79", "22"], pairs) == pytest.approx(2 / 3)


def test_paths_are_shown_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(quickstart.shown(tmp_path / "quickstart" / "model")) == "quickstart/model"
    assert quickstart.shown(tmp_path.parent / "other") == tmp_path.parent / "other"


def run_script(name, out, *overrides, cwd=ROOT, **variables):
    env = os.environ | {"TINY_OUT": str(out), "OMP_NUM_THREADS": "1"} | variables
    command = ["bash", str(TINY / name), "trainer.val_before_train=False", *overrides]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(("script", "critic"), [("grpo.sh", False), ("ppo.sh", True)])
def test_scripts_take_overrides_and_write_one_line_a_step(tmp_path, script, critic):
    """From another folder, with a relative output folder and a setting given twice: the last one wins."""
    few = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.val_max_samples=8"]
    steps = ["trainer.total_training_steps=9", "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    run_script(script, "out", *few, *steps, cwd=tmp_path, TINY_DATA="data")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert "val/test_score/tiny/arithmetic" in lines[-1]
    assert ("critic/vf_loss" in lines[-1]) == critic
    assert (tmp_path / "data" / "train.parquet").is_file()
    assert (tmp_path / "out" / "global_step_2" / "actor").is_dir()


@pytest.mark.e2e
def test_gsm8k_text_goes_through_every_stage(tmp_path):
    record = {"question": "How many eggs are 9 and 9?", "answer": "9 + 9 = <<9+9=18>>18\n#### 18"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps(record) + "\n") * 8)
    few = ["trainer.total_training_steps=2", "data.max_response_length=8", "data.val_max_samples=2"]
    run_script("gsm8k_random.sh", tmp_path / "out", *few, GSM8K=str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["reward/failures"] == 0
    assert "val/test_score/openai/gsm8k" in lines[-1]


@pytest.mark.e2e
def test_quickstart_gains_a_quarter_and_the_merged_model_has_it(tmp_path):
    """Twelve of the quickstart's forty steps, so the least that it may gain."""
    command = [sys.executable, str(TINY / "quickstart.py"), "--out", "here", "trainer.total_training_steps=12"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    before, after = quickstart.validation_scores(tmp_path / "here" / "run")
    assert after - before > 0.25
    assert f"before {before:.3f}, after {after:.3f}" in done.stdout
    assert f"with transformers alone: {after:.3f}" in done.stdout
    pairs = make_data.distinct_problems(quickstart.TESTS, make_data.SEED, held_out=True)
    merged = quickstart.answers_of(tmp_path / "here" / "model", pairs)
    assert quickstart.share_right(merged, pairs) == pytest.approx(after, abs=0.0015)  # one near-tie in a thousand
