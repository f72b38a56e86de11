"""Advantage estimators. Importing this package registers all of them.

- `group`: the group of one prompt's samples is the baseline (grpo, grpo_passk, rloo, opo, gpg, gdpo)
- `returns`: rewards-to-go, whitened or against a baseline (gae, reinforce_plus_plus, ..._baseline, remax)
- `token_baseline`: a baseline for each token of a group (optimal_token_baseline)
"""

from verl.algorithms.advantages import group, returns, token_baseline
from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions
from verl.algorithms.registry import get_advantage, list_advantages, register_advantage

__all__ = [
    "AdvantageInputs",
    "AdvantageOptions",
    "get_advantage",
    "group",
    "list_advantages",
    "register_advantage",
    "returns",
    "token_baseline",
]
