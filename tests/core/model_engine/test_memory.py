import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tests.core.model_engine.conftest import make_config
from torch import nn

from verl.core.model_engine import memory
from verl.core.model_engine.memory import activation_bytes, needs_checkpointing, train_flops

FAULTS = """
import resource, sys, torch
from verl.core.model_engine.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def work(times):
    for _ in range(times):
        torch.empty(2**24).fill_(1.0)          # 64 MiB, above what glibc keeps by itself
work(20)                                       # until the heap has a place that fits
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work(5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again():
    """Five 64 MiB tensors touch 5 x 64 MiB of pages anew by default, and next to none of them when they are kept."""
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", FAULTS, mode], check=True, capture_output=True, text=True).stdout
        )
        for mode in ("plain", "keep")
    }
    pages = 5 * 2**26 // resource.getpagesize()
    assert faults["keep"] < 0.02 * pages
    assert faults["keep"] < 0.1 * faults["plain"] or faults["plain"] < 200  # huge pages make few faults in both


def test_flops_of_two_sequences_that_share_a_prompt():
    """100 parameters (tied, so all multiply), 2 layers of 4 heads x 8; lengths 3 and 4 with 5 tokens computed.

    6 x 100 x 5 = 3,000 and 6 x 2 x 32 x (9 + 16) = 9,600.
    """
    assert train_flops(nn.Linear(10, 10, bias=False), make_config(), torch.tensor([3, 4]), tokens=5) == 12_600


QWEN_HALF_B = SimpleNamespace(hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
GPU = torch.device("cuda")


def test_activations_of_compiled_layers_take_half():
    """24 layers x 2 bytes x (12 x 896 + 4 x 4864) = 1,449,984 bytes a token; compiled 6 and 2 widths."""
    assert activation_bytes(QWEN_HALF_B, 1000, torch.bfloat16) == 1_449_984_000
    assert activation_bytes(QWEN_HALF_B, 1000, torch.bfloat16, compiled=True) == 724_992_000


def test_checkpointing_where_activations_or_the_models_state_leave_no_room(monkeypatch):
    """A device of 100 GB: activations may take 40 GB, and with the state of 3B parameters (60 GB) what is left of 90."""
    monkeypatch.setattr(memory, "device_bytes", lambda device: 100 * 10**9)

    def needs(tokens, **options):
        return needs_checkpointing(QWEN_HALF_B, tokens, torch.bfloat16, GPU, **options)

    assert not needs(27_000)  # 39.1 GB
    assert needs(28_000)  # 40.6 GB
    assert not needs(55_000, compiled=True)  # 39.9 GB
    assert needs(1_000, parameters=5 * 10**9)  # 100 GB of state
    assert not needs(1_000, parameters=5 * 10**9, moments=False)  # 60 GB, and 1.4 GB
    assert needs(21_000, parameters=5 * 10**9, moments=False)  # 30.4 GB
    assert needs(27_000, parameters=3 * 10**9)
    assert not needs(20_000, parameters=3 * 10**9)  # 29.0 GB
    assert needs_checkpointing(object(), 1, torch.bfloat16, GPU)
