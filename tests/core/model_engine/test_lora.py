"""Adapters: what is trained, what the rollout gets, what the reference computes, what a checkpoint holds."""

import copy
import json

import pytest
import torch
from tests.core.model_engine.conftest import make_batch, make_pair, reference_log_probs
from tests.core.model_engine.test_fsdp_engine import actor_loss, make_engine, training_batch

from verl.config.schema import ModelConfig, OptimConfig
from verl.core.checkpoint_engine.disk import describe
from verl.core.checkpoint_engine.gather import Traffic
from verl.core.model_engine.lora import BaseReference, add_adapters, fuse, merged
from verl.errors import ConfigError

peft = pytest.importorskip("peft")


def lora_engine(seed=0, targets="all-linear", rank=4, **options):
    packed, plain = make_pair(seed=seed)
    add_adapters(packed, ModelConfig(lora_rank=rank, lora_alpha=8, target_modules=targets), "base/model")
    return make_engine(model=packed, **options), plain


def test_fuse_by_hand():
    weight, a, b = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [0.0]])
    assert fuse(weight, a, b, 0.5).tolist() == [[2.5, 3.0], [0.0, 1.0]]


def test_an_adapter_without_its_other_half_is_an_error():
    with pytest.raises(ValueError, match=r"q\.base_layer\.weight"):
        list(merged([("q.base_layer.weight", torch.eye(2))], 1.0, Traffic()))


def test_only_adapters_are_trained_and_the_rollout_gets_the_sum():
    engine, plain = lora_engine()
    assert all(".lora_" in name for name, p in engine.model.named_parameters() if p.requires_grad)
    names = {name for name, _ in plain.named_parameters()}
    before = {name: tensor.clone() for name, tensor in engine.export_weights()}
    assert before.keys() == names
    assert all(torch.equal(before[name], p) for name, p in plain.named_parameters())  # B is zero
    engine.train_batch(training_batch(), actor_loss())
    after = dict(engine.export_weights())
    changed = {name for name in names if not torch.equal(after[name], before[name])}
    assert changed == {name for name in names if "_proj.weight" in name}
    # The exported weights compute what the adapters compute.
    batch = make_batch()
    plain.load_state_dict({**plain.state_dict(), **after})
    ours, _ = engine.log_probs(batch, 1.0)
    for row, expected in zip(ours.rows(), reference_log_probs(plain, batch)[0]):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


def test_the_reference_is_the_base_and_training_goes_on_after_it():
    engine, plain = lora_engine()
    twin, _ = lora_engine()
    twin.model.load_state_dict(engine.model.state_dict())
    batch, reference = make_batch(), BaseReference(engine)
    for _ in range(2):
        engine.train_batch(training_batch(), actor_loss())
        twin.train_batch(training_batch(), actor_loss())
        for row, expected in zip(reference.log_probs(batch, 0.7)[0].rows(), reference_log_probs(plain, batch, 0.7)[0]):
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)
    # Looking at the reference between updates changes nothing.
    assert engine.train_batch(training_batch(), actor_loss()) == twin.train_batch(training_batch(), actor_loss())


def test_a_checkpoint_holds_the_adapter_alone_and_brings_it_back(tmp_path):
    engine, _ = lora_engine(optim=OptimConfig(lr=1e-2))
    engine.train_batch(training_batch(), actor_loss())
    engine.save(tmp_path)
    stored = describe(tmp_path / "model")
    assert stored
    assert all(".lora_" in name for name in stored)
    want = engine.train_batch(training_batch(), actor_loss())
    torch.manual_seed(5)  # A starts otherwise
    other, _ = lora_engine()
    other.load(tmp_path)
    assert other.train_batch(training_batch(), actor_loss()) == want
    settings = json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 8, "base/model")


def test_peft_reads_the_adapter(tmp_path):
    engine, plain = lora_engine()
    engine.train_batch(training_batch(), actor_loss())
    engine.save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "lora_adapter")
    batch = make_batch()
    ours, _ = engine.log_probs(batch, 1.0)
    for row, expected in zip(ours.rows(), reference_log_probs(loaded, batch)[0]):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


def test_targets():
    engine, _ = lora_engine(targets=["q_proj", "v_proj"], rank=2)
    names = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 2 * 2  # layers x modules x halves
    with pytest.raises(ConfigError, match=r"target_modules=\['nothing'\]"):
        lora_engine(targets=["nothing"])
    with pytest.raises(ConfigError, match="embed_tokens is not a linear layer"):
        lora_engine(targets=["embed_tokens"])
    with pytest.raises(ConfigError, match="takes all-linear, a name, or a list"):
        lora_engine(targets=3)
