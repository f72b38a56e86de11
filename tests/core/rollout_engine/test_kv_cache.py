import pytest
import torch

from verl.core.rollout_engine import kv_cache
from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache, cpu_budget, slots_that_fit
from verl.errors import ConfigError

from .models import tiny_config

SPEC = ModelSpec.from_hf(tiny_config("llama"))  # 2 layers, 2 kv heads, head_dim 12


@pytest.mark.parametrize("rows_at_once", [1, 100])
def test_copied_slots_have_the_source_s_beginning_and_their_own_end(monkeypatch, rows_at_once):
    monkeypatch.setattr(kv_cache, "COPY_BYTES", rows_at_once * 2 * 2 * 2 * 3 * 12 * 4)
    cache = KVCache.allocate(SPEC, 5, 8, "cpu", torch.float32)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.data.clone()
    cache.copy_slots(torch.tensor([1, 1]), torch.tensor([4, 0]), 3)
    for target in (4, 0):
        assert torch.equal(cache.keys[:, target, :, :3], before[0][:, 1, :, :3])
        assert torch.equal(cache.values[:, target, :, :3], before[1][:, 1, :, :3])
        assert torch.equal(cache.data[:, :, target, :, 3:], before[:, :, target, :, 3:])
    assert torch.equal(cache.data[:, :, 1:4], before[:, :, 1:4])


def test_slots_are_as_many_as_fit():
    slot = 2 * 2 * 2 * 12 * 10 * 2  # keys and values, layers, kv heads, head_dim, positions, bytes of bfloat16
    assert slots_that_fit(SPEC, 7, 10, torch.bfloat16, 100 * slot, "plenty") == 7
    assert slots_that_fit(SPEC, 7, 10, torch.bfloat16, 3 * slot + 1, "some") == 3
    with pytest.raises(ConfigError, match=r"one sequence of 10 tokens needs .* GiB, and this budget leaves 0.00 GiB"):
        slots_that_fit(SPEC, 7, 10, torch.bfloat16, slot - 1, "this budget")


def test_the_cpu_budget_is_half_of_what_is_free(monkeypatch):
    free = type("Memory", (), {"available": 8 << 30})
    monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: free)
    assert cpu_budget() == (4 << 30, "50% of the 8.0 GiB of free memory")
