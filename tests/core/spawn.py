"""Processes that are the ranks of a gloo group."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.core.model_engine.parallel import join_process_group

# By the process that all ranks are forked from: this takes each longer than its work.
IMPORTED_ONCE = ["verl.core.model_engine.fsdp_engine", "transformers.models.qwen2.modeling_qwen2", "peft"]


def on_ranks(world: int, folder: Path, task: Callable[[Path], dict]) -> list[dict]:
    """What `task` gives on each rank of a group of `world` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    context = mp.start_processes(_rank, (world, str(folder), task), nprocs=world, join=False, start_method="forkserver")
    while not context.join(timeout=180):
        pass
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise AssertionError(f"rank {rank} of {world}:\n{result}")
    return results


def _rank(rank: int, world: int, folder: str, task: Callable[[Path], dict]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    join_process_group(torch.device("cpu"), store, rank, world, 60, "127.0.0.1")
    try:
        result = task(Path(folder))
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
