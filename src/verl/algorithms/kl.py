"""KL divergence to a reference policy: estimators on sampled tokens, the penalty in the reward, its controllers."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.inputs import MeanMetric
from verl.algorithms.segments import segment_count, segment_mean

# k3 grows as exp(log ratio): the log ratio is held within +-20 so that it stays finite, and k3 itself at 10, so that
# one token the two policies wholly disagree on does not own the step. Beyond either bound the gradient is 0.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0

_CANONICAL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}

KINDS = (*_CANONICAL, *(name + "+" for name in _CANONICAL))


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy, reference) at each token that the policy sampled: [N], [N] -> [N].

    With d = log pi - log pi_ref (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    kl, k1: d, unbiased, of either sign. abs: |d|. mse, k2: d^2 / 2, biased, low variance.
    low_var_kl, k3: exp(-d) - 1 + d, unbiased and never negative, bounded as said above.

    As a loss, only k2 has the gradient of the KL itself in expectation (k1's is zero, k3's is biased: Tang and Munos
    2025, arXiv 2506.09477). A "+" after the name takes that gradient and keeps the named value.

    >>> one, two = torch.tensor([-1.0]), torch.tensor([-2.0])
    >>> [round(kl_estimate(one, two, kind).item(), 4) for kind in ("k1", "abs", "k2", "k3")]
    [1.0, 1.0, 0.5, 0.3679]
    """
    if kind not in KINDS:
        raise ValueError(f"unknown KL estimator '{kind}'. Allowed: {', '.join(KINDS)}")
    difference = log_probs - ref_log_probs
    value = _value(difference, _CANONICAL[kind.removesuffix("+")])
    if not kind.endswith("+"):
        return value
    gradient = 0.5 * difference.square()
    return value.detach() + gradient - gradient.detach()


def _value(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-bounded) + bounded).clamp(max=MAX_K3)


def apply_kl_penalty(
    token_scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, coef: float, kind: str
) -> tuple[Tensor, Tensor]:
    """KL penalty in the reward: (token_rewards [N], kl [N]), both 0 at masked tokens, without gradient.

    token_rewards = token_scores - coef * kl (Ouyang et al. 2022, arXiv 2203.02155).
    """
    with torch.no_grad():
        kl = kl_estimate(log_probs, ref_log_probs, kind).masked_fill(~mask, 0)
        return token_scores.masked_fill(~mask, 0) - coef * kl, kl


def batch_kl(kl: Tensor, mask: Tensor, lengths: Tensor) -> MeanMetric:
    """Mean over samples of each sample's mean over its policy tokens: what the adaptive controller looks at."""
    has_tokens = segment_count(mask, lengths) > 0
    return MeanMetric(segment_mean(kl.detach().float(), lengths, mask).sum(), has_tokens.sum())


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing to do: the coefficient does not depend on the KL that was seen."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


class AdaptiveKLController:
    """A coefficient that holds the KL near a target (Ziegler et al. 2019, arXiv 1909.08593).

    After n samples with mean KL k: coef *= 1 + clip(k / target - 1, -0.2, 0.2) * n / horizon.

    >>> controller = AdaptiveKLController(coef=0.1, target=1.0, horizon=100)
    >>> controller.update(kl=5.0, num_samples=10)
    >>> round(controller.coef, 6)
    0.102
    """

    def __init__(self, coef: float, target: float, horizon: float):
        if target <= 0 or horizon <= 0:
            raise ValueError(f"adaptive KL control needs target and horizon above 0, not {target} and {horizon}")
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_samples: int) -> None:
        """kl: mean of the last step's samples. num_samples: how many those were."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # A horizon shorter than a fifth of the step would make the coefficient negative.
        self.coef *= max(1 + error * num_samples / self.horizon, 0.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
