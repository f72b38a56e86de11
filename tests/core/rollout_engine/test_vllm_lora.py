"""vLLM under a trainer of adapters: after each update it computes what the trainer computes, base and adapters together."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.config.schema import ModelConfig, OptimConfig, RolloutConfig
from verl.core.checkpoint_engine.sync import update_shared
from verl.core.model_engine import attention
from verl.core.model_engine.lora import add_adapters
from verl.core.model_engine.parallel import ensure_process_group
from verl.data.batch import Ragged, SampleBatch

pytestmark = pytest.mark.vllm

PROMPT, RESPONSE = [5, 6, 7], [8, 9, 10, 11, 12]


def tiny_model(folder):
    """A random Qwen2 with heads of 32, the smallest that vLLM has kernels for."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.25,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    model.save_pretrained(folder)
    return model


def test_a_probe_has_the_trainers_log_probs_after_each_update(tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    from tests.core.model_engine.test_fsdp_engine import actor_loss, make_engine, training_batch

    from verl.core.rollout_engine.vllm_engine import VLLMEngine

    ensure_process_group(torch.device("cpu"), 60)
    model = tiny_model(tmp_path)
    add_adapters(model, ModelConfig(lora_rank=4, lora_alpha=8, target_modules="all-linear"), str(tmp_path))
    actor = make_engine(model=model, optim=OptimConfig(lr=1e-2))
    rollout = VLLMEngine(
        tmp_path,
        device="cpu",
        dtype=torch.float32,
        config=RolloutConfig(name="vllm", max_num_seqs=4),
        max_model_len=64,
    )
    probe = SampleBatch({"prompt_ids": Ragged.from_rows([PROMPT]), "response_ids": Ragged.from_rows([RESPONSE])})
    seen = []
    for version in range(3):
        update_shared(actor, rollout, version, dtype=torch.float32, bucket_bytes=1 << 20, verify=False)
        ours = actor.log_probs(probe, 1.0)[0].values
        theirs = torch.tensor(rollout.prompt_log_probs([[*PROMPT, *RESPONSE]])[0][-len(RESPONSE) :])
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
        seen.append(theirs)
        actor.train_batch(training_batch(), actor_loss())
    rollout.close()
    assert (seen[1] - seen[0]).abs().max() > 1e-3
    assert (seen[2] - seen[1]).abs().max() > 1e-3
