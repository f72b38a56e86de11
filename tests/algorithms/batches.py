"""Random flat batches with tool tokens, empty samples, groups of one and groups of equal scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algorithms.inputs import AdvantageInputs, PolicyLossInputs
from verl.algorithms.segments import place_scores

# Examples are the same on every run; seeds stand for batches, which shrink badly but are built in microseconds.
steady = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def advantage_inputs(seed: int) -> AdvantageInputs:
    """1 to 12 samples in up to 4 groups, 0 to 6 tokens each, float64."""
    g = generator(seed)
    size = int(torch.randint(1, 13, (1,), generator=g))
    lengths = torch.randint(0, 7, (size,), generator=g)
    tokens = int(lengths.sum())

    def noise(count: int) -> Tensor:
        return torch.randn(count, generator=g, dtype=torch.float64)

    mask = torch.rand(tokens, generator=g) < 0.7
    scores = torch.randint(0, 3, (size,), generator=g).double() * 0.1
    rewards = place_scores(scores, mask, lengths)
    if seed % 2:
        rewards = rewards - 0.05 * noise(tokens)
    log_probs = -noise(tokens).abs()
    return AdvantageInputs(
        token_rewards=rewards,
        mask=mask,
        lengths=lengths,
        groups=torch.randint(0, 4, (size,), generator=g) * 11 - 7,
        values=noise(tokens),
        baseline_scores=noise(size),
        old_log_probs=log_probs,
        rollout_log_probs=log_probs + 0.1 * noise(tokens),
        sum_pi_squared=log_probs.exp().square() + 0.3 * (1 - log_probs.exp()).square(),
        reward_components={"right": scores, "short": noise(size)},
    )


def loss_inputs(seed: int, spread: float = 0.3) -> PolicyLossInputs:
    """1 to 8 samples, float64; weights are 1 and the selection is left to the caller."""
    g = generator(seed)
    size = int(torch.randint(1, 9, (1,), generator=g))
    lengths = torch.randint(0, 7, (size,), generator=g)
    tokens = int(lengths.sum())

    def noise() -> Tensor:
        return torch.randn(tokens, generator=g, dtype=torch.float64)

    old = -noise().abs() - 0.05
    return PolicyLossInputs(
        log_probs=(old + spread * noise()).clamp(max=-0.01),
        old_log_probs=old,
        advantages=noise(),
        mask=torch.rand(tokens, generator=g) < 0.8,
        lengths=lengths,
        weights=torch.ones(tokens, dtype=torch.float64),
        rollout_is_weights=noise().abs(),
        rollout_log_probs=(old + 0.1 * noise()).clamp(max=-0.01),
    )


def token_index(lengths: Tensor, samples: Tensor) -> Tensor:
    """Places of the tokens of these samples in the flat batch, in that order."""
    rows = torch.arange(int(lengths.sum())).split(lengths.tolist())
    return torch.cat([rows[i] for i in samples.tolist()] or [torch.empty(0, dtype=torch.int64)])


def pick(inputs, samples: Tensor):
    """The batch of these samples alone, in that order."""
    tokens = token_index(inputs.lengths, samples)
    changed = {}
    for name, value in vars(inputs).items():
        if value is None:
            continue
        if isinstance(value, dict):
            changed[name] = {k: v[samples] for k, v in value.items()}
        elif name in ("lengths", "groups", "baseline_scores"):
            changed[name] = value[samples]
        else:
            changed[name] = value[tokens]
    return replace(inputs, **changed)


def insert_masked(inputs: AdvantageInputs, seed: int) -> tuple[AdvantageInputs, Tensor]:
    """The batch with up to 2 masked tokens of nonsense before each token and after each end; where the old ones went."""
    g = generator(seed)
    rows = torch.arange(int(inputs.lengths.sum())).split(inputs.lengths.tolist())
    source: list[int] = []
    lengths = []
    for row in rows:
        start = len(source)
        for token in [*row.tolist(), None]:
            source += [-1] * int(torch.randint(0, 3, (1,), generator=g))
            source += [] if token is None else [token]
        lengths.append(len(source) - start)
    where = torch.tensor(source, dtype=torch.int64)
    changed = {"lengths": torch.tensor(lengths, dtype=torch.int64)}
    for name in ("token_rewards", "values", "old_log_probs", "rollout_log_probs", "sum_pi_squared"):
        value = getattr(inputs, name)
        if value is not None:
            changed[name] = torch.where(where >= 0, value[where] if len(value) else value.new_zeros(len(where)), 1e6)
    kept = inputs.mask[where] if len(inputs.mask) else torch.zeros(len(where), dtype=torch.bool)
    return replace(inputs, mask=kept & (where >= 0), **changed), (where >= 0).nonzero().squeeze(1)
