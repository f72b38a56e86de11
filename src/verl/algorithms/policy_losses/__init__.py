"""Policy losses. Importing this package registers all of them.

- `token`: each token by itself (vanilla, cispo, sapo, gpg, dppo_tv, dppo_kl, dro)
- `sequence`: one ratio for a sequence (gspo, geo_mean)
- `covariance`: tokens that drive entropy down are treated apart (clip_cov, kl_cov)
"""

from verl.algorithms.inputs import LossOutput, MeanMetric, PolicyLossInputs, PolicyLossOptions, mean_over
from verl.algorithms.policy_losses import covariance, sequence, token
from verl.algorithms.registry import get_policy_loss, list_policy_losses, register_policy_loss

__all__ = [
    "LossOutput",
    "MeanMetric",
    "PolicyLossInputs",
    "PolicyLossOptions",
    "covariance",
    "get_policy_loss",
    "list_policy_losses",
    "mean_over",
    "register_policy_loss",
    "sequence",
    "token",
]
