"""LoRA from the command line: it learns, the rollout sees each update, and the merged model is base plus adapter."""

import shutil
from pathlib import Path

import pytest
import torch
from examples.tiny.make_data import write
from tests.e2e.runs import curve, metrics, overrides, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.core.checkpoint_engine.disk import describe
from verl.model_merger.__main__ import main as merger

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.e2e
MODEL = Path(__file__).parents[2] / "examples" / "tiny" / "model"
"""The tiny task's warm start, right on a third of the sums."""

LORA = {
    "data__train_batch_size": 48,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 24,
    "actor_rollout_ref__rollout__n": 8,
    "data__max_response_length": 5,
    "actor_rollout_ref__model__lora_rank": 16,
    "actor_rollout_ref__model__lora_alpha": 32,
    "actor_rollout_ref__actor__optim__lr": 5e-3,
    "actor_rollout_ref__actor__use_kl_loss": True,
    "actor_rollout_ref__actor__kl_loss_coef": 1e-4,
    "trainer__total_training_steps": 12,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder, train=1024, test=200)
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    assert train(overrides(MODEL, data, folder / "run", **LORA, trainer__save_freq=11)) == 0
    return folder / "run"


def log_probs(model, tokenizer, text="12+34=77"):
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return model(ids).logits.log_softmax(-1).detach()


def test_it_learns_and_the_rollout_follows_each_update(run):
    before, after = curve(run, "val/test_score/tiny/arithmetic")
    assert 0.25 < before < 0.42
    assert after > before + 0.25
    # What was sampled has the probabilities that the trainer computes, with adapters apart or merged, at every step.
    assert len(curve(run, "training/rollout_probs_diff_max")) == 12
    assert max(curve(run, "training/rollout_probs_diff_max")) < 2e-3
    # The reference is the base: the distance to it grows.
    kl = curve(run, "actor/kl_loss")
    assert 0 < kl[0] < kl[-1]


def test_the_checkpoint_holds_adapters_alone_and_is_resumed(run, data, tmp_path):
    names = describe(run / "global_step_12" / "actor" / "model")
    assert all(".lora_" in name for name in names)
    changes = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": run / "global_step_11"}
    assert train(overrides(MODEL, data, tmp_path / "again", **LORA, **changes)) == 0
    last, again = metrics(run)[-1], metrics(tmp_path / "again")[-1]
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "val/test_score/tiny/arithmetic"):
        assert again[name] == last[name]


def test_merged_is_base_plus_adapter_and_the_adapter_can_be_had_alone(run, tmp_path):
    actor = str(run / "global_step_12" / "actor")
    assert merger(["merge", "--local_dir", actor, "--target_dir", str(tmp_path / "merged")]) == 0
    assert merger(["test", "--local_dir", actor, "--test_hf_dir", str(tmp_path / "merged")]) == 0
    assert merger(["merge", "--adapter_only", "--local_dir", actor, "--target_dir", str(tmp_path / "adapter")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    untrained = log_probs(base, tokenizer)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(log_probs(merged, tokenizer), log_probs(with_adapter, tokenizer), atol=1e-5, rtol=0)
    assert (log_probs(merged, tokenizer) - untrained).abs().max() > 0.1


def test_a_base_that_has_moved_is_told(run, tmp_path, capsys):
    copy = shutil.copytree(run / "global_step_12" / "actor", tmp_path / "actor")
    settings = copy / "lora_adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(MODEL), "/nowhere/at/all"))
    words = ["merge", "--local_dir", str(copy), "--target_dir", str(tmp_path / "merged")]
    assert merger(words) == 2
    assert "Say where it is with --base_model" in capsys.readouterr().err
    assert merger([*words, "--base_model", str(MODEL)]) == 0
