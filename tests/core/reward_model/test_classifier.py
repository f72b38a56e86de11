"""Scores of a classifier against transformers, one conversation at a time."""

import pytest
import torch
from tests.core.reward_model.conftest import save_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl.config.schema import RewardModelConfig
from verl.core.reward_model.factory import build_reward_model, check_reward_model
from verl.rewards.types import RewardInput

CPU = torch.device("cpu")


def build(folder, **options):
    config = RewardModelConfig(enable=True, **options)
    config.model.path = str(folder)
    return build_reward_model(config, check_reward_model(config), CPU)[0]


def sample(answer, *questions):
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), questions)]
    return RewardInput("d", answer, messages=messages)


SAMPLES = [
    sample("4", "2+2?"),
    sample("A much longer answer, of many more bytes than the others.", "Why?"),
    sample("No.", "Is it?", "Yes.", "Really?"),
    sample("", "Say nothing."),
    sample("grün", "Farbe?"),
]


def expected(folder, samples):
    """By transformers' own forward, unpacked."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for s in samples:
        conversation = [*s.messages, {"role": "assistant", "content": s.solution_str}]
        ids = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits[0, 0]))
    return scores


@pytest.mark.parametrize(
    "limits", [{}, {"forward_max_token_len_per_gpu": 60}, {"micro_batch_size_per_gpu": 2}, {"dtype": "float32"}]
)
def test_scores_are_transformers_however_they_are_packed(classifier_folder, limits):
    outcomes = build(classifier_folder, **limits).score(SAMPLES)
    reference = expected(classifier_folder, SAMPLES)
    assert [o.score for o in outcomes] == pytest.approx(reference, abs=1e-5)
    assert max(reference) - min(reference) > 0.1  # the samples can be told apart


def test_an_end_token_that_is_padding_is_not_where_the_score_is_read(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_classifier(tmp_path / "plain"))
    folder = save_classifier(tmp_path / "pad_is_eos", pad_token_id=tokenizer.eos_token_id)
    outcomes = build(folder).score(SAMPLES)
    assert [o.score for o in outcomes] == pytest.approx(expected(folder, SAMPLES), abs=1e-5)
    at_the_end = [o.score for o in build(tmp_path / "plain").score(SAMPLES)]
    assert [o.score for o in outcomes] != pytest.approx(at_the_end, abs=1e-3)


def test_a_conversation_that_is_too_long_fails_alone(classifier_folder):
    outcomes = build(classifier_folder, max_length=60).score(SAMPLES)
    assert [o.score is None for o in outcomes] == [False, True, False, False, False]
    assert "tokens of the reward model are more than its limit, 60 (reward_model.max_length)" in outcomes[1].error
    assert outcomes[0].score == pytest.approx(expected(classifier_folder, SAMPLES)[0], abs=1e-5)


def test_the_models_positions_are_a_limit_too(tmp_path):
    folder = save_classifier(tmp_path, max_position_embeddings=32)
    outcomes = build(folder).score(SAMPLES)
    # The fourth has [user]Say nothing. and [assistant], each with its end token: 31.
    assert [o.score is None for o in outcomes] == [False, True, True, False, False]


def test_a_template_that_rejects_a_prompt_fails_it_alone(tmp_path):
    strict = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0]['content'] }}"
    outcomes = build(save_classifier(tmp_path, template=strict)).score(SAMPLES)
    assert [o.score is None for o in outcomes] == [False, False, True, False, False]
    assert "one turn only" in outcomes[2].error


def test_a_score_that_is_not_finite_is_a_failure(tmp_path):
    folder = save_classifier(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data.fill_(float("inf"))
    model.save_pretrained(folder)
    outcomes = build(folder).score(SAMPLES[:2])
    assert [o.score for o in outcomes] == [None, None]
    assert "the reward model gave" in outcomes[0].error
