"""What this project adds to vLLM's workers. No vLLM is needed."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from verl.core.rollout_engine.vllm_worker import ThroughOwnMemory, brought_over

GPUS = torch.cuda.device_count()


def on(device, to=None):
    """A stand-in for a tensor, which says where it was brought."""
    device = torch.device(device)
    return SimpleNamespace(device=device, is_cuda=device.type == "cuda", to=to or (lambda where: on(where)))


@pytest.mark.parametrize(
    ("target", "source", "read"),
    [("cuda:1", "cuda:0", "cuda:1"), ("cuda:1", "cuda:1", "cuda:1"), ("cuda:1", "cpu", "cpu"), ("cpu", "cpu", "cpu")],
)
def test_only_what_lies_on_another_gpu_is_brought_over(target, source, read):
    given = on(source)
    found = brought_over(on(target), given)
    assert found.device == torch.device(read)
    assert (found is given) == (source == read)


def test_values_of_a_slice_arrive_through_the_mode():
    target, source = torch.zeros(2, 3), torch.arange(12.0).view(4, 3)
    with ThroughOwnMemory():
        target.copy_(source.narrow(0, 1, 2))
    assert target.tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_values_of_another_gpu_arrive_in_a_strided_slice():
    source = torch.arange(12.0, device="cuda:0").view(4, 3)
    target = torch.zeros(4, 2, device="cuda:1")
    with ThroughOwnMemory():
        target.copy_(source.narrow(1, 1, 2))
    assert target.tolist() == [[1.0, 2.0], [4.0, 5.0], [7.0, 8.0], [10.0, 11.0]]


# As vLLM has it: a worker under an engine process under the trainer's.
CHAIN = """
import os, subprocess, sys, time
place, owner = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else os.getpid()
below = {"trainer": "engine", "engine": "worker"}.get(place)
if below is None:
    from verl.core.rollout_engine.vllm_worker import VLLMWorkerExtension
    VLLMWorkerExtension().verl_end_with(owner)
    print("ready", flush=True)
    time.sleep(300)
subprocess.run([sys.executable, "-c", os.environ["CHAIN"], below, str(owner)])
"""


def test_a_killed_trainer_leaves_no_process_behind(monkeypatch):
    monkeypatch.setenv("CHAIN", CHAIN)
    with subprocess.Popen([sys.executable, "-c", CHAIN, "trainer"], stdout=subprocess.PIPE, text=True) as trainer:
        trainer.stdout.readline()
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert len(below) == 2
        trainer.kill()
        gone, alive = psutil.wait_procs(below, timeout=30)
        for process in alive:
            process.kill()
    assert (len(gone), len(alive)) == (2, 0)
