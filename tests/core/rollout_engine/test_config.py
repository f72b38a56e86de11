import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.core.rollout_engine.config import ModelSpec, rope_frequencies, supported
from verl.errors import ConfigError

from .models import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_four_families_are_supported(family):
    assert supported(tiny_config(family), 256) is None


def test_shape_of_qwen3_with_its_own_head_dim():
    spec = ModelSpec.from_hf(tiny_config("qwen3"))
    assert (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.hidden_size) == (32, 4, 1, 48)
    assert (spec.qk_norm, spec.qkv_bias, spec.o_bias, spec.tied_embeddings) == (True, False, False, False)
    assert spec.kv_elements_per_token == 2 * 2 * 1 * 32


def test_qwen2_has_biases_on_q_k_v_alone_and_llama_where_it_says():
    qwen, llama = ModelSpec.from_hf(tiny_config("qwen2")), ModelSpec.from_hf(tiny_config("llama"))
    assert (qwen.qkv_bias, qwen.o_bias, qwen.mlp_bias) == (True, False, False)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "model type 'gpt2' is not one of llama, qwen2, qwen3, mistral"),
        (tiny_config("llama", hidden_act="gelu"), "hidden_act 'gelu'"),
        (tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (tiny_config("mistral", sliding_window=64), "reach 65 tokens, past the model's sliding window of 64"),
        (tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding window of 64"),
    ],
)
def test_what_is_not_supported_has_a_reason(config, reason):
    assert reason in supported(config, 65)


def test_a_sliding_window_is_fine_below_it_and_where_no_layer_uses_it():
    assert supported(tiny_config("mistral", sliding_window=64), 64) is None
    unused = Qwen2Config(use_sliding_window=False, sliding_window=64)
    assert supported(unused, 1000) is None
    assert ModelSpec.from_hf(unused).sliding_window is None


def test_an_unsupported_model_says_what_to_set():
    with pytest.raises(ConfigError, match=r"gpt2.*rollout.name=hf"):
        ModelSpec.from_hf(GPT2Config())


def test_default_rope_turns_by_theta():
    inv_freq, scale = rope_frequencies(LlamaConfig(hidden_size=8, num_attention_heads=2, rope_theta=100.0))
    assert inv_freq.tolist() == pytest.approx([1.0, 100.0 ** (-2 / 4)])
    assert scale == 1.0


def test_llama3_rope_is_rescaled_and_yarn_scales_cos_and_sin():
    config = tiny_config("llama")
    inv_freq, scale = rope_frequencies(config)
    plain = 5e4 ** -(torch.arange(0, 12, 2) / 12)
    assert scale == 1.0
    assert inv_freq[0] == pytest.approx(1.0)  # short wavelengths stay
    assert inv_freq[-1] == pytest.approx(float(plain[-1]) / 8)  # long ones are stretched by the factor
    yarn, yarn_scale = rope_frequencies(tiny_config("llama-yarn"))
    assert yarn_scale == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)
    assert torch.equal(yarn, ROPE_INIT_FUNCTIONS["yarn"](tiny_config("llama-yarn"), torch.device("cpu"))[0])


def test_rotary_table():
    spec = ModelSpec.from_hf(tiny_config("qwen2"))
    cos, sin = spec.rotary_table(5, "cpu")
    assert cos.shape == sin.shape == (5, 6)
    assert cos[3, 0] == pytest.approx(torch.cos(torch.tensor(3.0)).item())
    assert sin[3, 1] == pytest.approx(torch.sin(3 * 10000.0 ** torch.tensor(-2 / 12)).item())
