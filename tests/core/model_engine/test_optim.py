import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from verl.config.schema import OptimConfig
from verl.core.model_engine.optim import StateOffload, clip_gradients, learning_rate, make_optimizer
from verl.core.model_engine.parallel import ensure_process_group, make_mesh


def test_warm_up_then_constant():
    config = OptimConfig(lr=2.0, lr_warmup_steps=4)
    assert [learning_rate(u, config, 10) for u in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_warm_up_as_a_share():
    config = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.2)
    assert [learning_rate(u, config, 10) for u in range(3)] == [0.5, 1.0, 1.0]


def test_steps_win_over_the_share():
    config = OptimConfig(lr=1.0, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5)
    assert learning_rate(0, config, 10) == 1.0


def test_cosine_ends_at_its_least():
    config = OptimConfig(lr=1.0, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert learning_rate(0, config, 100) == pytest.approx(1.0)
    assert learning_rate(50, config, 100) == pytest.approx(0.55)
    assert learning_rate(100, config, 100) == pytest.approx(0.1)
    assert learning_rate(1000, config, 100) == pytest.approx(0.1)


@pytest.mark.parametrize(("limit", "after"), [(1.0, 1.0), (0.0, 5.0), (10.0, 5.0)])
def test_clip(limit, after):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(clip_gradients([parameter], limit)) == pytest.approx(5.0)
    assert float(parameter.grad.norm()) == pytest.approx(after, rel=1e-4)


def test_moments_come_and_go_through_the_same_host_memory():
    """Two steps with the moments away in between equal two steps without; the second leave takes no new memory."""
    results = []
    for offloaded in (False, True):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = make_optimizer([weight], OptimConfig(lr=0.1))
        offload = StateOffload(optimizer)
        places = set()
        for gradient in (torch.tensor([0.5, 0.25]), torch.tensor([-1.0, 2.0])):
            weight.grad = gradient
            if offloaded:
                offload.to_device(torch.device("cpu"))
            optimizer.step()
            if offloaded:
                offload.to_host()
                places.add(optimizer.state[weight]["exp_avg"].data_ptr())
        results.append(weight.detach().clone())
        assert len(places) == offloaded
    assert torch.equal(*results)


def test_an_offloaded_moment_is_a_sharded_tensor_still():
    """The host's copy of a sharded tensor is one too, on whichever device is asked for."""
    ensure_process_group(torch.device("cpu"), 60)
    mesh = make_mesh(torch.device("cpu"))
    sharded = DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)])
    there = torch.empty_like(sharded, device="meta")
    assert isinstance(there, DTensor)
    assert there.to_local().is_meta
    assert there.placements == sharded.placements
