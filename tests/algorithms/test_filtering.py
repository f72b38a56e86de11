from __future__ import annotations

import pytest
import torch

from verl.algorithms.filtering import in_group_with_spread, overlong_penalty, pf_ppo_resample, pf_ppo_weights

SCORES = torch.tensor([1.0, 0.5, 0.1, 0.1, 2.0, -3.0])
GROUPS = torch.tensor([4, 4, 9, 9, 1, 4])


def test_groups_with_spread():
    assert in_group_with_spread(SCORES, GROUPS).tolist() == [True, True, False, False, False, True]
    assert in_group_with_spread(torch.empty(0), torch.empty(0, dtype=torch.int64)).tolist() == []


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 12, 13, 15, 16, 30])
    assert overlong_penalty(lengths, max_length=16, buffer=4, factor=2.0).tolist() == [0, 0, -0.5, -1.5, -2, -2]
    for buffer in (0, 17):
        with pytest.raises(ValueError, match=f"between 1 and max_length=16 tokens, not {buffer}"):
            overlong_penalty(lengths, max_length=16, buffer=buffer)


def test_pf_ppo_weights_by_hand():
    assert pf_ppo_weights(SCORES, GROUPS, "pow", power=2).tolist() == pytest.approx([1, 0.25, 0.01, 0.01, 4, 9])
    assert pf_ppo_weights(SCORES, GROUPS, "max_min").tolist() == [1, 0, 1, 1, 1, 1]
    assert pf_ppo_weights(SCORES, GROUPS, "max_random").tolist() == pytest.approx([0.4, 0.1, 0.4, 0.4, 0.4, 0.1])
    with pytest.raises(ValueError, match=r"unknown PF-PPO method 'best'\. Allowed: pow, max_min, max_random"):
        pf_ppo_weights(SCORES, GROUPS, "best")


def test_pf_ppo_resample():
    weights = torch.tensor([0.0] + [1.0] * 500 + [3.0] * 500)
    drawn = pf_ppo_resample(weights, torch.Generator().manual_seed(0))
    assert drawn.shape == (1001,)
    assert not (drawn == 0).any()
    # Three quarters are expected from the heavier half, with a deviation of 1.4 %.
    assert 0.70 < (drawn > 500).double().mean() < 0.80
    again = pf_ppo_resample(weights, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
    assert len(pf_ppo_resample(torch.zeros(3), torch.Generator())) == 3
    assert pf_ppo_resample(torch.empty(0), torch.Generator()).tolist() == []
