import resource
import subprocess
import sys

import pytest
import torch
from tests.core.model_engine.conftest import make_config
from torch import nn

from verl.core.model_engine.memory import train_flops

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
