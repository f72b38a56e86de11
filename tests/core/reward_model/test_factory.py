"""Which model a reward model may be: found out from its folder before any weight is read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.reward_model.conftest import save_classifier
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config.schema import RewardModelConfig
from verl.core.reward_model.factory import build_reward_model, check_reward_model
from verl.core.reward_model.judge import rubric_score
from verl.errors import ConfigError
from verl.rewards.types import RewardInput

CPU = torch.device("cpu")


def options(folder, **changes):
    config = RewardModelConfig(enable=True, **changes)
    config.model.path = str(folder)
    return config


def test_the_kind_is_the_models_own(classifier_folder, byte_model):
    assert check_reward_model(options(classifier_folder)).functions is None
    assert check_reward_model(options(byte_model)).functions.read is rubric_score


def test_a_kind_that_does_not_fit_is_named(classifier_folder, byte_model):
    with pytest.raises(ConfigError, match=r"generative takes a \.\.\.ForCausalLM; .*Qwen2ForSequenceClassification"):
        check_reward_model(options(classifier_folder, model_type="generative"))
    with pytest.raises(
        ConfigError, match=r"discriminative takes a \.\.\.ForSequenceClassification; .*Qwen2ForCausalLM"
    ):
        check_reward_model(options(byte_model, model_type="discriminative"))


def test_several_labels_are_no_score(tmp_path):
    with pytest.raises(ConfigError, match="the model has 3 labels; a reward model has one"):
        check_reward_model(options(save_classifier(tmp_path, labels=3)))


def test_attention_that_is_not_computed_here_is_refused(tmp_path):
    folder = save_classifier(tmp_path)
    path = folder / "config.json"
    changed = {"architectures": ["Gemma2ForSequenceClassification"], "model_type": "gemma2", "head_dim": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed, "attn_logit_softcapping": 50.0}))
    with pytest.raises(ConfigError, match="gemma2 models bound or add to their attention scores"):
        check_reward_model(options(folder))


def test_a_tokenizer_without_a_template_is_named(tmp_path):
    folder = save_classifier(tmp_path, template=None)
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=.*no chat template"):
        check_reward_model(options(folder))


def test_a_judges_file_beside_a_classifier_is_an_error(classifier_folder):
    config = options(classifier_folder)
    config.judge.path = "judge.py"
    with pytest.raises(ConfigError, match=r"reward_model\.judge\.path=judge\.py has no effect"):
        check_reward_model(config)


def test_a_path_that_is_not_there_names_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=.*no such directory"):
        check_reward_model(options(tmp_path / "nowhere"))


def test_a_judges_engine_is_checked(byte_model):
    config = options(byte_model)
    config.rollout.tensor_model_parallel_size = 2
    with pytest.raises(ConfigError, match=r"reward_model\.rollout\.tensor_model_parallel_size=2"):
        check_reward_model(config)


def test_a_judge_whose_model_attends_to_less_is_named_with_its_own_keys(byte_model):
    config = options(byte_model)
    config.rollout.prompt_length = 10**6
    with pytest.raises(ConfigError, match=r"reward_model\.rollout\.prompt_length=1000000 .*reward_model\.model\.path"):
        build_reward_model(config, check_reward_model(config), CPU)


def test_a_checkpoint_without_its_head_is_refused(tmp_path):
    folder = save_classifier(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "score.weight"}, folder / "model.safetensors", {"format": "pt"})
    config = options(folder)
    with pytest.raises(ConfigError, match=r"the checkpoint lacks score\.weight"):
        build_reward_model(config, check_reward_model(config), CPU)


def test_an_architecture_without_a_decoder_is_refused(tmp_path):
    folder = save_classifier(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ConfigError, match=r"a reward model is a .*; its config\.json names \['BertForMaskedLM'\]"):
        check_reward_model(options(folder))


def test_a_judge_writes_what_the_model_says(byte_model, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge_prompt(solution_str, messages, **rest):\n"
        "    return f\"{messages[0]['content']} {solution_str}\"\n"
        "def judge_score(judgement, **rest):\n"
        "    return {'score': len(judgement), 'pred': judgement}\n"
    )
    config = options(byte_model)
    config.judge.path = str(tmp_path / "judge.py")
    config.rollout.response_length = 6
    model, notice = build_reward_model(config, check_reward_model(config), CPU)
    assert notice is None
    samples = [RewardInput("d", text, messages=[{"role": "user", "content": "2+2?"}]) for text in ("4", "five")]
    outcomes = model.score(samples)
    model.close()
    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    policy = AutoModelForCausalLM.from_pretrained(byte_model, dtype=torch.float32)
    for sample, outcome in zip(samples, outcomes):
        ids = tokenizer(f"2+2? {sample.solution_str}", return_tensors="pt")["input_ids"]
        out = policy.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(out, skip_special_tokens=True)
        assert (outcome.answer, outcome.score) == (text, len(text))
