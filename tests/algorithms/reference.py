"""Every estimator again, in plain Python over lists, as slow and as direct as its paper states it."""

from __future__ import annotations

import math
import statistics

from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions


class Sample:
    """One sample's policy tokens."""

    def __init__(self, inputs: AdvantageInputs, i: int, start: int, end: int):
        keep = [t for t in range(start, end) if inputs.mask[t]]
        self.tokens = keep
        self.group = int(inputs.groups[i])
        self.rewards = [float(inputs.token_rewards[t]) for t in keep]
        self.score = math.fsum(self.rewards)
        self.values = [float(inputs.values[t]) for t in keep]
        self.greedy = float(inputs.baseline_scores[i])
        self.probs = [math.exp(inputs.old_log_probs[t]) for t in keep]
        squared = inputs.sum_pi_squared
        self.energy = [1 - 2 * p + float(squared[t]) for p, t in zip(self.probs, keep, strict=True)]
        self.parts = {k: float(v[i]) for k, v in inputs.reward_components.items()}
        self.advantages: list[float] = []

    def to_go(self, gamma: float) -> list[float]:
        return [
            math.fsum(gamma ** (u - t) * self.rewards[u] for u in range(t, len(self.rewards)))
            for t in range(len(self.rewards))
        ]


def samples_of(inputs: AdvantageInputs) -> list[Sample]:
    ends = inputs.lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    found = [Sample(inputs, i, a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return [s for s in found if s.tokens]


def std(numbers: list[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def whiten(samples: list[Sample]) -> None:
    every = [a for s in samples for a in s.advantages]
    mean = math.fsum(every) / max(len(every), 1)
    scale = 1 / math.sqrt(std(every) ** 2 + 1e-8)
    for s in samples:
        s.advantages = [(a - mean) * scale for a in s.advantages]


def constant(sample: Sample, advantage: float) -> None:
    sample.advantages = [advantage] * len(sample.tokens)


def grpo(samples, group, o):
    scores = [s.score for s in group]
    for s in group:
        divisor = std(scores) + o.epsilon if o.norm_by_std else 1.0
        constant(s, (s.score - statistics.fmean(scores)) / divisor)


def rloo(samples, group, o):
    for s in group:
        others = [x.score for x in group if x is not s]
        constant(s, s.score - statistics.fmean(others) if others else 0.0)


def grpo_passk(samples, group, o):
    ranked = sorted(group, key=lambda s: s.score)
    for s in group:
        constant(s, 0.0)
    if len(group) > 1:
        divisor = std([s.score for s in group]) + o.epsilon if o.norm_by_std else 1.0
        constant(ranked[-1], (ranked[-1].score - ranked[-2].score) / divisor)


def opo(samples, group, o):
    baseline = sum(len(s.tokens) * s.score for s in group) / sum(len(s.tokens) for s in group)
    for s in group:
        constant(s, s.score - baseline)


def same_scores(samples, group_id) -> bool:
    return len({s.score for s in samples if s.group == group_id}) == 1


def gpg(samples, group, o):
    silent = sum(same_scores(samples, s.group) for s in samples)
    for s in group:
        mean = statistics.fmean(x.score for x in group)
        live = len(samples) - silent
        constant(s, 0.0 if same_scores(samples, s.group) else len(samples) / live * (s.score - mean))


def gdpo(samples, group, o):
    for s in group:
        total = 0.0
        for name in s.parts:
            rewards = [x.parts[name] for x in group]
            divisor = std(rewards) + o.epsilon if o.norm_by_std else 1.0
            total += o.extra.get("gdpo_reward_weights", {}).get(name, 1.0) * (
                (s.parts[name] - statistics.fmean(rewards)) / divisor
            )
        constant(s, total)


def gdpo_after(samples, o):
    every = [s.advantages[0] for s in samples]
    if len(every) > 1:
        for s in samples:
            constant(s, (s.advantages[0] - statistics.fmean(every)) / (std(every) + o.epsilon))


def gae(samples, group, o):
    for s in group:
        n = len(s.tokens)
        deltas = [s.rewards[t] + (o.gamma * s.values[t + 1] if t + 1 < n else 0.0) - s.values[t] for t in range(n)]
        s.advantages = [math.fsum((o.gamma * o.lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def reinforce_plus_plus(samples, group, o):
    for s in group:
        s.advantages = s.to_go(o.gamma)


def reinforce_plus_plus_baseline(samples, group, o):
    for s in group:
        constant(s, s.score - statistics.fmean(x.score for x in group))


def remax(samples, group, o):
    for s in group:
        s.advantages = [g - s.greedy for g in s.to_go(o.gamma)]


def optimal_token_baseline(samples, group, o):
    lengths = sorted((len(s.tokens) for s in group), reverse=True)
    for s in group:
        s.advantages = []
        for t in range(len(s.tokens)):
            if len(group) == 1:
                s.advantages.append(0.0)
                continue
            at = min(t, lengths[1] - 1)
            there = [x for x in group if len(x.tokens) > at]
            weights = [math.fsum(x.energy[: at + 1]) for x in there]
            if sum(weights) == 0:
                weights = [1.0] * len(there)
            baseline = sum(w * x.to_go(1.0)[at] for w, x in zip(weights, there, strict=True)) / sum(weights)
            s.advantages.append(s.to_go(1.0)[t] - baseline)


WHITENED = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def advantages(name: str, inputs: AdvantageInputs, options: AdvantageOptions) -> list[float]:
    """[N] as a list, 0 at masked tokens."""
    samples = samples_of(inputs)
    for group_id in {s.group for s in samples}:
        globals()[name](samples, [s for s in samples if s.group == group_id], options)
    if name in WHITENED:
        whiten(samples)
    if name == "gdpo":
        gdpo_after(samples, options)
    flat = [0.0] * int(inputs.lengths.sum())
    for s in samples:
        for token, advantage in zip(s.tokens, s.advantages, strict=True):
            flat[token] = advantage
    return flat
