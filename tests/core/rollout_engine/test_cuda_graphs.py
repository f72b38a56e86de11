"""The native engine on a GPU: graphs against single launches, and all of it against transformers."""

import pytest
import torch

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.engine import NativeEngine
from verl.errors import ConfigError

from .models import FAMILIES, prompts, requests, shared_model, tiny_model, tokens, worst_log_prob_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}


def cuda_engine(model, dtype=torch.float32, **config) -> NativeEngine:
    config = RolloutConfig(**{"gpu_memory_utilization": 0.3, "max_num_seqs": 64, **config})
    engine = NativeEngine(model.config, device="cuda", dtype=dtype, config=config)
    engine.load_weights(model.named_parameters(), version=0)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_log_probs_are_those_of_transformers(family, enforce_eager):
    model = tiny_model(family, **SHAPE, initializer_range=0.1).cuda()
    engine = cuda_engine(model, enforce_eager=enforce_eager)
    asked = requests(5, 1, 9, 70, n=3, max_tokens=40, temperature=0.7)
    assert worst_log_prob_error(model, asked, engine.generate(asked), temperature=0.7) < 5e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_log_probs_are_near_transformers_float32(family):
    shape = SHAPE | ({} if family == "qwen3" else {"head_dim": 32})
    model = tiny_model(family, **shape, initializer_range=0.05).cuda()
    engine = cuda_engine(model, torch.bfloat16)
    asked = requests(5, 33, 200, n=5, max_tokens=40)
    assert worst_log_prob_error(model, asked, engine.generate(asked)) < 0.1


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 10, "top_p": 0.8, "temperature": 1.3}])
def test_graphs_give_what_single_launches_and_the_cpu_give(params):
    model = shared_model("qwen2")
    asked = requests(5, 1, 9, 30, n=4, max_tokens=50, stop_token_ids=(3, 4), **params)
    graphs = tokens(cuda_engine(model).generate(asked))
    single = tokens(cuda_engine(model, enforce_eager=True).generate(asked))
    cpu = tokens(NativeEngine(model.config, weights=dict(model.named_parameters())).generate(asked))
    few_slots = tokens(cuda_engine(model, max_num_seqs=3).generate(asked))
    flat = [[t for group in answers for t in group] for answers in (graphs, single, cpu, few_slots)]
    # Rounding differs a little, and a rare token on the edge between two takes its sample another way.
    for other in flat[1:]:
        assert sum(a == b for a, b in zip(flat[0], other)) >= 14


def test_graphs_are_kept_over_sleep_new_weights_and_other_sampling():
    model = tiny_model("qwen2", **SHAPE).cuda()
    engine = cuda_engine(model)
    asked = requests(5, 9, n=4, max_tokens=20)
    before = tokens(engine.generate(asked))
    graphs = dict(engine._runner._graphs)
    assert graphs
    engine.sleep()
    blocker = torch.zeros(1 << 22, device="cuda")  # so that the next cache lies elsewhere
    engine.wake()
    assert tokens(engine.generate(asked)) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    engine.load_weights(model.named_parameters(), version=1)
    hot = requests(5, 9, n=4, max_tokens=20, temperature=1.7, seed=3)
    assert worst_log_prob_error(model, hot, engine.generate(hot), temperature=1.7) < 5e-4
    assert engine._runner._graphs == graphs
    del blocker


def test_sleep_gives_the_memory_back():
    engine = cuda_engine(tiny_model("llama", **SHAPE))
    asked = [Request(ids, SamplingParams(100, n=60)) for ids in prompts(300)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine.generate(asked)
    cache = engine._runner.cache.data.nbytes
    awake = torch.cuda.memory_allocated()
    engine.sleep()
    assert awake - torch.cuda.memory_allocated() >= cache
    assert awake - before >= cache


def test_too_little_memory_is_an_error_with_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 20, 1 << 30))
    with pytest.raises(ConfigError, match=r"one sequence of 12 tokens .* gpu_memory_utilization=0.3 of 1.0 GiB"):
        cuda_engine(shared_model("llama")).generate(requests(4))
