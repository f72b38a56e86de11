"""A worker's choice of its device, and the memory that it gives back there."""

import os

import pytest
import torch

from verl.core.controller import worker
from verl.core.controller.worker import Seat, Worker


def test_a_rank_that_sees_its_neighbours_gpu_takes_its_own(monkeypatch):
    """Its own is the first visible one, whatever its rank."""
    chosen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, os.environ["CUDA_VISIBLE_DEVICES"]))
    )
    monkeypatch.setattr(worker, "join_store", lambda *a: None)
    monkeypatch.setattr(worker, "join_process_group", lambda *a: chosen.append("joined"))
    Worker().join(Seat(1, 2, "127.0.0.1", ("1", "0")), "127.0.0.1", 1, 60)
    assert chosen == [(torch.device("cuda", 0), "1,0"), "joined"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_was_freed_is_there_for_others():
    Worker().give_back_unused()
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del held
    assert torch.cuda.memory_reserved() == reserved  # torch keeps it
    Worker().give_back_unused()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28)
