import pytest
import torch

from verl.config.schema import OptimConfig
from verl.core.model_engine.optim import clip_gradients, learning_rate


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
