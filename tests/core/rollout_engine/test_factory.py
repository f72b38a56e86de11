import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine import engine as engine_module
from verl.core.rollout_engine.engine import NativeEngine
from verl.core.rollout_engine.factory import make_rollout_engine, model_around
from verl.core.rollout_engine.hf_engine import HFEngine
from verl.errors import CheckpointError, ConfigError

from .models import requests, tiny_model, worst_log_prob_error


def make(model, config=None, **further):
    arguments = {
        "model_path": "nowhere",
        "hf_config": model.config,
        "device": torch.device("cpu"),
        "trainer_weights": {n: p.detach() for n, p in model.named_parameters()},
        "trainer_dtype": torch.float32,
        "max_prompt_length": 32,
        "max_response_length": 32,
        "pad_token_id": None,
    }
    return make_rollout_engine(config or RolloutConfig(), **{**arguments, **further})


def test_native_by_default_with_the_trainer_s_weights_in_place():
    engine, notice = make(tiny_model("qwen2"))
    assert isinstance(engine, NativeEngine)
    assert engine.in_place
    assert notice is None


def test_a_model_that_native_does_not_do_is_generated_by_transformers_with_a_notice():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3)).eval()
    engine, notice = make(model)
    assert isinstance(engine, HFEngine)
    assert "model type 'gpt2'" in notice
    assert engine.model.transformer.wte.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    asked = requests(5, 3)
    assert worst_log_prob_error(model, asked, engine.generate(asked)) < 1e-4


def test_a_context_past_the_sliding_window_goes_to_transformers():
    model = tiny_model("mistral", sliding_window=40)
    engine, notice = make(model)
    assert isinstance(engine, HFEngine)
    assert "sliding window of 40" in notice
    engine, notice = make(model, max_response_length=8)
    assert isinstance(engine, NativeEngine)


def test_hf_holds_the_trainer_s_weights_tied_ones_too():
    model = tiny_model("qwen2")
    engine, notice = make(model, RolloutConfig(name="hf"))
    assert notice is None
    embed = model.model.embed_tokens.weight
    assert engine.model.lm_head.weight.data_ptr() == embed.data_ptr()
    assert engine.model.model.embed_tokens.weight.data_ptr() == embed.data_ptr()


def test_dtype_asked_for():
    engine, _ = make(tiny_model("qwen2"), RolloutConfig(name="hf", dtype="bfloat16"))
    assert engine.model.dtype == torch.bfloat16


def test_weights_that_do_not_fit_the_hf_model():
    model = tiny_model("qwen2")
    weights = {n: p for n, p in model.named_parameters() if n != "model.norm.weight"} | {"extra": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"missing \['model.norm.weight'\], unexpected \['extra'\]"):
        model_around(model.config, weights, torch.device("cpu"), torch.float32)


def test_a_context_longer_than_the_model_fails_at_start():
    with pytest.raises(ConfigError, match="332 tokens, and the model's max_position_embeddings is 256"):
        make(tiny_model("qwen2"), max_prompt_length=300)


def test_engines_that_are_not_there():
    model = tiny_model("qwen2")
    with pytest.raises(ConfigError, match=r"rollout\.name=sglang is not in this version"):
        make(model, RolloutConfig(name="sglang"))
    with pytest.raises(ConfigError, match=r"only rollout\.name=vllm splits"):
        make(model, RolloutConfig(tensor_model_parallel_size=2))


def test_vllm_that_is_not_installed_names_the_mend(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.name=vllm.*pip install 'reverl\[vllm\]'"):
        make(tiny_model("qwen2"), RolloutConfig(name="vllm"))


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_that_is_computed_in_float32_is_told_of(monkeypatch, fast):
    monkeypatch.setattr(engine_module, "cpu_has_fast_bf16", lambda: fast)
    engine, notice = make(tiny_model("qwen2"), RolloutConfig(dtype="bfloat16"))
    assert engine.dtype == (torch.bfloat16 if fast else torch.float32)
    assert notice is None if fast else "rollout.dtype=bfloat16: this CPU has no fast bfloat16" in notice
