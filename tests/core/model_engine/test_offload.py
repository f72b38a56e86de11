import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.config.schema import FSDPConfig, OptimConfig
from verl.core.model_engine.offload import (
    ALIGNMENT,
    FrozenWeights,
    HostMemory,
    StateOffload,
    make_state_offload,
    resident_weights,
)
from verl.core.model_engine.optim import make_optimizer
from verl.core.model_engine.parallel import ensure_process_group, make_mesh

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, NO_GPU], id="gpu")]
SHAPES = ((300, 7), (1,), (64,), (33, 65), (0, 4), (5,))


def parameters(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in SHAPES]


def steps(weights: list[nn.Parameter], step, left_out: tuple[int, ...] = ()) -> None:
    """Three updates with the same gradients each time; `left_out`: parameters without one in the second."""
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        for index, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator).to(weight)
            weight.grad = None if number == 1 and index in left_out else gradient
        step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_bytes", [ALIGNMENT, 4 * ALIGNMENT, 1 << 20], ids=["small", "some", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_give_the_unchunked_step_bit_for_bit(chunk_bytes, dtype, device):
    config = OptimConfig(lr=0.1, weight_decay=0.1)
    whole, parts = parameters(dtype, device), parameters(dtype, device)
    reference, optimizer = make_optimizer(whole, config), make_optimizer(parts, config)
    offload = StateOffload(optimizer, device, chunk_bytes)
    steps(whole, reference.step, left_out=(0, 2))
    steps(parts, offload.step, left_out=(0, 2))
    for expected, got in zip(whole, parts, strict=True):
        assert torch.equal(expected, got)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(reference.state[expected][name].cpu(), optimizer.state[got][name].cpu()), name
    assert [int(optimizer.state[p]["step"]) for p in parts] == [2, 3, 2, 3, 3, 3]


def test_every_byte_passes_once_and_no_chunk_is_larger_than_asked():
    """300 x 7 float32 are 8,400 bytes: chunks of 4,096 divide them in 1,024 + 1,024 + 52 elements."""
    weights = parameters()
    offload = StateOffload(make_optimizer(weights, OptimConfig()), CPU, 4096)
    offload.make_states()
    assert all(chunk.stop - chunk.start <= 4096 for chunk in offload._chunks)
    slices = [(s.first, s.last) for chunk in offload._chunks for s in chunk.slices if s.parameter is weights[0]]
    assert slices == [(0, 1024), (1024, 2048), (2048, 2100)]
    assert sum(s.last - s.first for chunk in offload._chunks for s in chunk.slices) == sum(w.numel() for w in weights)


def test_the_moments_stay_in_the_same_memory():
    weights = parameters()
    optimizer = make_optimizer(weights, OptimConfig(lr=0.1))
    offload = StateOffload(optimizer, CPU, ALIGNMENT)
    offload.make_states()
    first = [optimizer.state[w]["exp_avg"].data_ptr() for w in weights]
    assert not any(optimizer.state[w]["exp_avg_sq"].any() for w in weights)
    steps(weights, offload.step)
    assert [optimizer.state[w]["exp_avg"].data_ptr() for w in weights] == first
    assert all(optimizer.state[w]["exp_avg_sq"].any() for w in weights if w.numel())


def test_sharded_parameters_have_sharded_moments():
    """Through FSDP2 on one rank: the moments are DTensors of the parameters' layout, and the numbers the plain ones."""
    ensure_process_group(CPU, 60)
    mesh = make_mesh(CPU)
    torch.manual_seed(0)
    plain = nn.Linear(65, 33)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    reference = make_optimizer(plain.parameters(), OptimConfig(lr=0.1))
    optimizer = make_optimizer(sharded.parameters(), OptimConfig(lr=0.1))
    offload = StateOffload(optimizer, CPU, 4 * ALIGNMENT)
    for number in range(2):
        for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
            a.grad = torch.full_like(a, 0.5 - number)
            b.grad = distribute_tensor(a.grad, mesh, b.placements)
        reference.step()
        offload.step()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        state = optimizer.state[b]
        assert torch.equal(a, b.to_local())
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].placements == b.placements
        assert torch.equal(state["exp_avg_sq"].to_local(), reference.state[a]["exp_avg_sq"])


def test_a_loaded_state_goes_on():
    """What is written into the host's moments and the counter, as a resumed run does, is what the next step takes."""
    whole, parts = parameters(), parameters()
    reference, optimizer = (make_optimizer(w, OptimConfig(lr=0.1)) for w in (whole, parts))
    offload = StateOffload(optimizer, CPU, ALIGNMENT)
    steps(whole, reference.step)
    offload.make_states()
    with torch.no_grad():
        for a, b in zip(whole, parts, strict=True):
            b.copy_(a)
            for name, value in reference.state[a].items():
                optimizer.state[b][name].copy_(value)
    steps(whole, reference.step)
    steps(parts, offload.step)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory_has_the_size_asked_for(device):
    memory = HostMemory(1000, device)
    assert memory.bytes.is_pinned() == (device.type == "cuda")
    assert memory.bytes.shape == (1000,)
    assert memory.bytes.sum() == 0
    assert HostMemory(0, CPU).bytes.shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_weights_are_there_only_within_the_context(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    model[1].weight = model[0].weight  # tied
    inputs = torch.randn(4, 8, device=device)
    expected = model(inputs).detach()
    weights = FrozenWeights(model.requires_grad_(False), device)
    assert [p.untyped_storage().nbytes() for p in model.parameters()] == [0, 0, 0]
    for _ in range(2):
        with weights:
            assert torch.equal(model(inputs), expected)
        assert model[0].weight.untyped_storage().nbytes() == 0
    with pytest.raises(ValueError, match="on purpose"), weights:
        raise ValueError("on purpose")
    assert model[0].weight.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=["as they are", "cast"])
def test_frozen_weights_under_fsdp(computed):
    """The sharded tensors' memory goes and comes back, whether FSDP computes with it or with a copy in another dtype."""
    ensure_process_group(CPU, 60)
    precision = MixedPrecisionPolicy(param_dtype=computed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    inputs = torch.randn(4, 8)
    expected = copy.deepcopy(model).to(computed)(inputs.to(computed))
    for layer in model:
        fully_shard(layer, mesh=make_mesh(CPU), mp_policy=precision)
    fully_shard(model, mesh=make_mesh(CPU), mp_policy=precision, reshard_after_forward=False)
    weights = FrozenWeights(model, CPU)
    for _ in range(2):
        with weights, torch.no_grad():
            assert torch.equal(model(inputs), expected)
        assert all(p.to_local().untyped_storage().nbytes() == 0 for p in model.parameters())


def test_without_a_gpu_everything_stays():
    fsdp = FSDPConfig(param_offload=True, optimizer_offload=True)
    model = nn.Linear(2, 2)
    assert make_state_offload(make_optimizer(model.parameters(), OptimConfig()), fsdp, CPU) is None
    with resident_weights(model, fsdp, CPU, frozen=True):
        assert model.weight.untyped_storage().nbytes() == 16
    assert model.weight.untyped_storage().nbytes() == 16
