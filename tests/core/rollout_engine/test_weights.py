import pytest
import torch

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.weights import WeightBuffers, bind_weights, expected_shapes
from verl.errors import CheckpointError

from .models import FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_the_checkpoint_s(family):
    model = tiny_model(family)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert expected_shapes(ModelSpec.from_hf(model.config)) == shapes


def test_bound_weights_share_memory_with_the_trainer_s():
    model = tiny_model("qwen2")
    weights = bind_weights(ModelSpec.from_hf(model.config), dict(model.named_parameters()))
    layer = model.model.layers[1]
    assert weights.layers[1].qkv[2].weight.data_ptr() == layer.self_attn.v_proj.weight.data_ptr()
    assert weights.layers[1].down.weight.data_ptr() == layer.mlp.down_proj.weight.data_ptr()
    assert weights.head is weights.embed
    assert not weights.embed.requires_grad


def test_buffers_fuse_projections_in_their_dtype():
    model = tiny_model("llama")
    buffers = WeightBuffers(ModelSpec.from_hf(model.config), "cpu", torch.bfloat16)
    buffers.load(model.named_parameters())
    attention = model.model.layers[0].self_attn
    (qkv,) = buffers.model.layers[0].qkv
    expected = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(qkv.weight, expected.bfloat16())
    biases = torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    assert torch.equal(qkv.bias, biases.bfloat16())
    (gate_up,) = buffers.model.layers[1].gate_up
    mlp = model.model.layers[1].mlp
    assert torch.equal(gate_up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16())
    assert torch.equal(buffers.model.head, model.lm_head.weight.bfloat16())
    assert buffers.nbytes == 2 * sum(p.numel() for p in model.parameters())


def test_buffers_stay_where_they_are_when_loaded_again():
    model = tiny_model("llama")
    buffers = WeightBuffers(ModelSpec.from_hf(model.config), "cpu", torch.float32)
    buffers.load(model.named_parameters())
    address = buffers.model.layers[0].o.weight.data_ptr()
    buffers.load(((name, p + 1) for name, p in model.named_parameters()))
    assert buffers.model.layers[0].o.weight.data_ptr() == address
    assert torch.equal(buffers.model.layers[0].o.weight, model.model.layers[0].self_attn.o_proj.weight + 1)


def test_a_tied_head_may_come_under_its_own_name():
    model = tiny_model("qwen2")
    buffers = WeightBuffers(ModelSpec.from_hf(model.config), "cpu", torch.float32)
    buffers.load(model.state_dict().items())
    assert "lm_head.weight" in model.state_dict()
    assert torch.equal(buffers.model.head, model.model.embed_tokens.weight)


def test_missing_unexpected_repeated_and_misshapen_weights_are_all_named():
    model = tiny_model("mistral")
    buffers = WeightBuffers(ModelSpec.from_hf(tiny_config("mistral")), "cpu", torch.float32)
    given = [(n, p) for n, p in model.named_parameters() if "layers.1" not in n]
    given += [given[0], ("model.layers.9.input_layernorm.weight", torch.ones(48)), ("model.norm.weight", torch.ones(2))]
    with pytest.raises(CheckpointError) as error:
        buffers.load(given)
    message = str(error.value)
    assert "model.norm.weight has shape [2], the model needs [48]" in message
    assert "missing: model.layers.1.input_layernorm.weight" in message
    assert "and 4 more" in message  # 9 weights a layer, 5 named
    assert "unexpected: model.layers.9.input_layernorm.weight" in message
    assert "given twice: model.embed_tokens.weight, model.norm.weight" in message
