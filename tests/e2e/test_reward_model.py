"""GRPO with a reward model: a classifier, and a judge."""

import shutil

import pytest
import torch
from tests.e2e.runs import metrics, overrides, sevens_reward, train
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl.tracking.files import GENERATIONS, read_lines

pytestmark = pytest.mark.e2e


def score_of(folder, prompt, response):
    """By transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"<user>{prompt}<assistant>{response}", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(AutoModelForSequenceClassification.from_pretrained(folder).eval()(input_ids=ids).logits)


def test_a_classifiers_score_is_the_reward(tiny_classifier, tiny_model, tiny_data, tmp_path):
    changes = {"reward_model__enable": True, "reward_model__model__path": tiny_classifier, "reward_model__weight": 2.0}
    changes |= {"reward_model__forward_max_token_len_per_gpu": 64, "data__reward_fn_key": "no_such_column"}
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    lines = [line for line in metrics(tmp_path / "run") if "actor/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["critic/score/mean"] == pytest.approx(2 * line["reward/rm_score"], rel=1e-5)
        assert line["actor/grad_norm"] > 0
    shown = read_lines(tmp_path / "run" / GENERATIONS)
    assert len(shown) >= 8
    for row in shown[:8]:
        assert row["score"] == pytest.approx(2 * score_of(tiny_classifier, row["prompt"], row["response"]), abs=1e-4)


@pytest.mark.parametrize("pipeline", ["one_step_off", "fully_async"])
def test_a_classifier_scores_what_a_queue_held(pipeline, tiny_classifier, tiny_model, tiny_data, tmp_path):
    changes = {
        **sevens_reward(tmp_path),
        "data__val_files": "null",
        "reward_model__enable": True,
        "reward_model__combine": "add",
        "reward_model__model__path": tiny_classifier,
        "trainer__pipeline": pipeline,
        "trainer__total_training_steps": 3,
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    lines = metrics(tmp_path / "run")
    assert max(line["training/staleness_max"] for line in lines) == 1
    for line in lines:
        parts = line["reward/rm_score"] + line["reward/rule_score"]
        assert line["critic/score/mean"] == pytest.approx(parts, rel=1e-4)


JUDGE = """
def judge_prompt(solution_str, messages, **rest):
    return f"Is {solution_str} right for {messages[-1]['content']}?"

def judge_score(judgement, solution_str, **rest):
    if solution_str.startswith("0"):
        raise ValueError("no score for a leading zero")
    return {"score": solution_str.count("7") / 4, "characters": len(judgement)}
"""


def test_a_judges_score_is_added_to_the_rules(byte_model, tiny_model, tiny_data, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    changes = {
        **sevens_reward(tmp_path),
        "data__val_files": "null",
        "reward_model__enable": True,
        "reward_model__combine": "add",
        "reward_model__model__path": byte_model,
        "reward_model__judge__path": tmp_path / "judge.py",
        "reward_model__rollout__response_length": 4,
    }
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        failed = line["reward/failures"] / 32
        assert line["reward/rule_score"] == line["reward/rm_score"]  # the judge counts what the rule counts
        assert line["critic/score/mean"] == pytest.approx(2 * line["reward/rm_score"] * (1 - failed), abs=1e-6)
        assert 0 < line["reward/characters"] <= 4
    assert sum(line["reward/failures"] for line in lines) > 0  # counted, and the run goes on


def test_a_reward_model_that_cannot_be_used_is_told_of_before_the_start(
    tiny_classifier, tiny_model, tiny_data, tmp_path, capsys
):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_classifier, broken)
    (broken / "chat_template.jinja").unlink()
    changes = {"reward_model__enable": True, "reward_model__model__path": broken}
    assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 2
    assert "no chat template" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*.jsonl"))
