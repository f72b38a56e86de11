"""Memory that is given back."""

import pytest
import torch

from verl.core.device_memory import give_back_unused


def test_without_a_gpu_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("there is no GPU"))
    give_back_unused()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_was_freed_is_there_for_others():
    give_back_unused()
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del held
    assert torch.cuda.memory_reserved() == reserved  # torch keeps it
    give_back_unused()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28)
