"""Triton kernels against their twins in plain torch: on a GPU, or on a CPU with TRITON_INTERPRET=1 (slow, small shapes)."""

import os

import pytest
import torch

from verl.core.rollout_engine.api import SamplingParams
from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache
from verl.core.rollout_engine.runner import Runner
from verl.core.rollout_engine.sampling import SamplingRule, mass_threshold, stream_key
from verl.core.rollout_engine.scheduler import Schedule
from verl.core.rollout_engine.slots import SlotState
from verl.core.rollout_engine.torch_backend import TorchBackend
from verl.core.rollout_engine.weights import WeightBuffers

from .models import requests, shared_model, tiny_config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
LENGTH = 40


def triton_backend(spec: ModelSpec):
    pytest.importorskip("triton")
    from verl.core.rollout_engine.triton_backend import TritonBackend

    return TritonBackend(spec, DEVICE)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


class Pair:
    """The two backends over caches and slots of equal content."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, positions: list[int], slots: int | None = None, rule=None):
        self.spec, self.dtype, self.n = spec, dtype, len(positions)
        slots = slots or len(positions)
        generator = torch.Generator().manual_seed(0)
        self.random = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)
        self.backends = [TorchBackend(spec, DEVICE), triton_backend(spec)]
        content = self.random(2, spec.num_layers, slots, spec.num_kv_heads, LENGTH, spec.head_dim)
        rule = rule or SamplingRule.of(SamplingParams(max_tokens=8))
        for backend in self.backends:
            state = SlotState.allocate(slots, 12, DEVICE)
            state.position[: self.n] = torch.tensor(positions)
            state.start[: self.n] = torch.tensor(positions) - 2
            state.limit[: self.n] = torch.tensor(positions) + 1
            state.key[: self.n] = torch.tensor([stream_key(1, i, 0) for i in range(self.n)])
            state.done[: self.n] = False
            backend.attach(KVCache(content.clone()), state, rule)

    @property
    def qkv_width(self) -> int:
        return (self.spec.num_heads + 2 * self.spec.num_kv_heads) * self.spec.head_dim

    def layer(self):
        buffers = WeightBuffers(self.spec, DEVICE, self.dtype)
        buffers.load((name, self.random(*view.shape) * 0.5 + 1) for name, view in buffers._views.items())
        return buffers.model.layers[1]

    def assert_equal_caches(self):
        ours, theirs = (backend.cache for backend in self.backends)
        torch.testing.assert_close(theirs.keys, ours.keys, **tolerance(self.dtype))
        torch.testing.assert_close(theirs.values, ours.values, **tolerance(self.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_feed_forward(dtype):
    pair = Pair(ModelSpec.from_hf(tiny_config("llama")), dtype, [1])
    x, residual, weight, gate_up = pair.random(5, 48), pair.random(5, 48), pair.random(48), pair.random(5, 160)
    ours, theirs = pair.backends
    torch.testing.assert_close(theirs.rms_norm(x, weight), ours.rms_norm(x, weight), **tolerance(dtype))
    torch.testing.assert_close(theirs.silu_mul(gate_up), ours.silu_mul(gate_up.clone()), **tolerance(dtype))
    expected = ours.add_rms_norm(x, residual.clone(), weight)
    for a, b in zip(theirs.add_rms_norm(x, residual.clone(), weight), expected):
        torch.testing.assert_close(a, b, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_decode_step_s_attention(family, splits, dtype):
    pair = Pair(ModelSpec.from_hf(tiny_config(family)), dtype, [0, 7, 39, 16, 20])
    layer, qkv = pair.layer(), pair.random(5, pair.qkv_width)
    ours, theirs = pair.backends
    expected = ours.decode(5, LENGTH).attend(1, layer, qkv.clone())
    phase = theirs.decode(5, LENGTH)
    phase.splits = splits
    torch.testing.assert_close(phase.attend(1, layer, qkv.clone()), expected, **tolerance(dtype))
    pair.assert_equal_caches()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_done_do_not_disturb_the_others(dtype):
    pair = Pair(ModelSpec.from_hf(tiny_config("llama")), dtype, [3, 30, 9])
    layer, qkv = pair.layer(), pair.random(3, pair.qkv_width)
    ours, theirs = pair.backends
    expected = ours.decode(3, LENGTH).attend(0, layer, qkv.clone())
    theirs.state.done[1] = True
    got = theirs.decode(3, LENGTH).attend(0, layer, qkv.clone())
    torch.testing.assert_close(got[[0, 2]], expected[[0, 2]], **tolerance(dtype))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_prompts_packed_end_to_end(family, dtype):
    pair = Pair(ModelSpec.from_hf(tiny_config(family)), dtype, [0] * 6)
    lengths = [2, 5, 5, 11]
    slots = torch.tensor([4, 0, 3, 1]).repeat_interleave(torch.tensor(lengths)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    layer, qkv = pair.layer(), pair.random(sum(lengths), pair.qkv_width)
    expected, got = (b.prefill(slots, positions, lengths).attend(1, layer, qkv.clone()) for b in pair.backends)
    torch.testing.assert_close(got, expected, **tolerance(dtype))
    pair.assert_equal_caches()


RULES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 30, "top_p": 0.5, "temperature": 1.5},
    {"top_p": 1e-6},
    {"top_k": 1},
]


@pytest.mark.parametrize("params", RULES)
@pytest.mark.parametrize("vocab", [50, 9000])
def test_drawn_tokens_and_slots(params, vocab):
    rule = SamplingRule.of(SamplingParams(max_tokens=8, stop_token_ids=(3, 7, 11), **params))
    spec = ModelSpec.from_hf(tiny_config("llama", vocab_size=vocab))
    rows = 24
    pair = Pair(spec, torch.float32, list(range(5, 5 + rows)), rule=rule)
    logits = pair.random(rows, vocab) * 3
    logits[2, ::2] = -torch.inf
    logits[5, 3] = 60.0  # a stop token that is sure to come
    for backend in pair.backends:
        backend.state.done[7] = True
        backend.state.limit[9] = backend.state.position[9]
        backend.draw(logits.clone())
    ours, theirs = (backend.state for backend in pair.backends)
    same = theirs.token == ours.token
    # Sums are rounded in another order, so a uniform number on an edge may fall on its other side.
    assert int(same.sum()) >= rows - 1
    assert theirs.position.tolist() == ours.position.tolist()
    assert theirs.done[same].tolist() == ours.done[same].tolist()
    assert theirs.done[[5, 7, 9]].all()
    assert torch.equal(theirs.out_tokens[same, :12], ours.out_tokens[same, :12])
    torch.testing.assert_close(theirs.out_log_probs[same, :12], ours.out_log_probs[same, :12], atol=1e-4, rtol=1e-4)
    assert theirs.out_tokens[7, :12].sum() == 0


def test_thresholds_are_exact_and_keep_ties():
    from verl.core.rollout_engine.triton_sampling import block_sums_kernel, thresholds_kernel

    spec = ModelSpec.from_hf(tiny_config("llama", vocab_size=300))
    backend = triton_backend(spec)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(6, 300, generator=generator) * 4).round(decimals=1).to(DEVICE)  # many ties
    for top_k, top_p in ((1, 1.0), (17, 1.0), (300, 0.3), (300, 0.95), (40, 0.8), (299, 0.999)):
        numbers = torch.tensor([1.0, top_p, 0.0], device=DEVICE)
        peaks, totals = (torch.empty(6, 1, device=DEVICE) for _ in range(2))
        found = torch.empty(6, dtype=torch.int32, device=DEVICE)
        k = torch.tensor([top_k], device=DEVICE)
        block_sums_kernel[(6, 1)](logits, numbers, found, peaks, totals, 300, 512, 1, False)
        thresholds_kernel[(6,)](logits, numbers, k, peaks, found, 300, 1, 1, 256, 8)
        bits = torch.where(found < 0, found ^ 0x7FFFFFFF, found).view(torch.float32)
        mass = (logits - logits.amax(-1, keepdim=True)).exp()
        expected = mass >= mass_threshold(mass, top_k, top_p)
        assert torch.equal(logits >= bits[:, None], expected), (top_k, top_p)
    assert backend.spec.vocab_size == 300


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_whole_runs_equal_the_torch_backend_s(family, sampling):
    from verl.core.rollout_engine.api import RolloutStats

    model = shared_model(family)
    spec = ModelSpec.from_hf(model.config)
    buffers = WeightBuffers(spec, DEVICE, torch.float32)
    buffers.load(model.named_parameters())
    asked = dict(enumerate(requests(5, 1, 9, n=2, max_tokens=6, stop_token_ids=(4, 5), **sampling)))
    rule = SamplingRule.of(asked[0].sampling)
    results = []
    for backend_class in (TorchBackend, type(triton_backend(spec))):
        runner = Runner(spec, DEVICE, torch.float32, backend_class)
        runner.prepare(buffers.model, 4, 20, 6, rule)
        schedule = Schedule(
            runner, dict(asked), rule, slots=4, check_every=3, token_budget=64, version=0, stats=RolloutStats(), aborted=set()
        )  # fmt: skip
        results.append({(r, i): c for r, i, c in schedule.run()})
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    for key, completion in ours.items():
        assert theirs[key].token_ids == completion.token_ids
        assert theirs[key].log_probs == pytest.approx(completion.log_probs, abs=1e-4)
        assert theirs[key].finish_reason == completion.finish_reason
