"""Options of the algorithm: advantages, KL in the reward, off-policy correction."""

from dataclasses import dataclass

from verl.config.schema.options import opt


@dataclass
class KLControlConfig:
    type: str = opt("fixed", "how the coefficient of the KL penalty in the reward moves", choices=("fixed", "adaptive"))
    kl_coef: float | None = opt(
        None,
        "coefficient of the KL penalty in the reward; setting it above 0 turns the penalty on unless use_kl_in_reward=False",
        min=0,
    )
    target_kl: float = opt(0.1, "adaptive: the KL to hold", above=0)
    horizon: float = opt(10000, "adaptive: samples over which the coefficient adapts", above=0)


@dataclass
class RolloutCorrectionConfig:
    bypass_mode: bool | None = opt(
        None,
        "take the rollout's log-probs as the old ones instead of computing them anew; null: where the native engine "
        "samples from the very weights and in the precision that the trainer computes in",
    )
    rollout_is: str | None = opt(
        None, "truncated importance weights between rollout and trainer policy", choices=("token", "sequence")
    )
    rollout_is_threshold: float = opt(2.0, "largest importance weight", above=0)


@dataclass
class AlgorithmConfig:
    adv_estimator: str = opt(
        "grpo", "advantage estimator, a name in the registry: grpo, gae, rloo, reinforce_plus_plus, remax, ..."
    )
    gamma: float = opt(1.0, "discount", min=0, max=1)
    lam: float = opt(1.0, "GAE lambda", min=0, max=1)
    norm_adv_by_std_in_grpo: bool = opt(
        True, "divide a group's advantages by their standard deviation (False: Dr. GRPO)"
    )
    use_kl_in_reward: bool | None = opt(
        None, "subtract a KL penalty from the reward; null: when kl_ctrl.kl_coef is set above 0"
    )
    kl_penalty: str = opt(
        "kl",
        "KL estimator in the reward: kl (k1), abs, mse (k2), low_var_kl (k3)",
        choices=("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    )
    kl_ctrl: KLControlConfig = opt(KLControlConfig, "controller of the KL penalty in the reward")
    rollout_correction: RolloutCorrectionConfig = opt(
        RolloutCorrectionConfig, "correction of the gap between rollout and trainer policy"
    )
