"""From a trained checkpoint to a Hugging Face folder that computes what the trainer computes."""

import pytest
import torch
from tests.e2e.runs import overrides, sevens_reward, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config.schema import FSDPConfig
from verl.core.model_engine.api import MicroBatching
from verl.core.model_engine.fsdp_engine import FSDPEngine
from verl.core.model_engine.loading import load_config, load_policy
from verl.core.model_engine.models import PolicyModel
from verl.data.batch import Ragged, SampleBatch
from verl.model_merger.__main__ import main as merger

pytestmark = pytest.mark.e2e


def trainers_log_probs(model, checkpoint, batch):
    """Log-probs by the training engine after it has loaded the checkpoint, as a resumed run does."""
    limit = MicroBatching(1024)
    engine = FSDPEngine(
        PolicyModel(load_policy(str(model), load_config(str(model)), torch.float32)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        fsdp=FSDPConfig(),
        train_limit=limit,
        infer_limit=limit,
    )
    before = engine.log_probs(batch, 1.0)[0].values
    engine.load(checkpoint / "actor")
    return before, engine.log_probs(batch, 1.0)[0].values


def transformers_log_probs(model, batch):
    rows = []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits, -1).gather(1, response[:, None]).squeeze(1))
    return torch.cat(rows)


@torch.no_grad()
def test_merged_model_gives_the_trainers_log_probs(tiny_model, tiny_data, tmp_path, capsys):
    changes = {"actor_rollout_ref__actor__optim__lr": 3e-3, "data__val_files": "null", **sevens_reward(tmp_path)}
    with torch.enable_grad():
        assert train(overrides(tiny_model, tiny_data, tmp_path / "run", **changes)) == 0
    checkpoint, merged = tmp_path / "run" / "global_step_2", tmp_path / "merged"
    arguments = ["--backend", "fsdp", "--local_dir", str(checkpoint / "actor")]
    assert merger(["merge", *arguments, "--target_dir", str(merged)]) == 0
    assert merger(["test", *arguments, "--test_hf_dir", str(merged)]) == 0
    assert merger(["test", *arguments, "--test_hf_dir", str(tiny_model)]) == 1  # the model before training

    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    prompts, responses = ["12+34=", "7-5=", "100+1="], ["46", "2", "1017"]
    batch = SampleBatch(
        {
            "prompt_ids": Ragged.from_rows(tokenizer(prompts)["input_ids"]),
            "response_ids": Ragged.from_rows(tokenizer(responses)["input_ids"]),
        }
    )
    before, trained = trainers_log_probs(tiny_model, checkpoint, batch)
    torch.testing.assert_close(transformers_log_probs(model, batch), trained, atol=1e-5, rtol=0)
    assert (trained - before).abs().max() > 1e-2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
