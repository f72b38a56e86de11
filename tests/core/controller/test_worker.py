"""A worker's choice of its device."""

import os

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
