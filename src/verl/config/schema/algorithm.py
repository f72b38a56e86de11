"""Options of the algorithm: advantages, KL in the reward, off-policy correction."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.actor import KL_KINDS
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
        None,
        "importance weights pi / mu of trainer and rollout policy, of each token or sample",
        choices=("token", "sequence"),
    )
    rollout_is_threshold: str = opt(
        "2.0", "largest weight, which larger ones are cut to; LOW_HIGH, such as 0.5_5.0: IcePop, weights outside are 0"
    )
    rollout_is_batch_normalize: bool = opt(False, "divide the weights by their mean over the step's tokens")
    rollout_rs: str | None = opt(
        None,
        "leave out tokens (token_k1, token_k2, token_k3) or samples (seq_sum_*, seq_mean_*, seq_max_*) by how far rollout "
        "and trainer policy are apart on them; several with commas between",
    )
    rollout_rs_threshold: str | None = opt(
        None,
        "bounds of what stays: for k1 of the ratio pi / mu, LOW_HIGH or HIGH (LOW is then 1 / HIGH); for k2 and k3 the "
        "largest value; one for all of rollout_rs, or as many, with commas between",
    )


@dataclass
class FilterGroupsConfig:
    enable: bool = opt(
        False,
        "dynamic sampling: train on prompts whose samples differ in the metric alone, and sample until there are enough",
    )
    metric: str | None = opt(
        None, "the metric: a number that the reward function returned, such as acc; null or score: the score"
    )
    max_num_gen_batches: int = opt(
        0, "stop the run when a step has drawn so many batches and is not full; 0: when it has drawn all prompts", min=0
    )


@dataclass
class PFPPOConfig:
    reweight_method: str = opt(
        "pow",
        "how likely a sample is drawn: by |score| to a power; the best and worst of a prompt; the best, and others seldom",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = opt(2.0, "pow: the power", min=0)


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
        "KL estimator in the reward: kl (k1), abs, mse (k2), low_var_kl (k3); a + changes gradients alone, of which there "
        "are none here",
        choices=KL_KINDS,
    )
    kl_ctrl: KLControlConfig = opt(KLControlConfig, "controller of the KL penalty in the reward")
    rollout_correction: RolloutCorrectionConfig = opt(
        RolloutCorrectionConfig, "correction of the gap between rollout and trainer policy"
    )
    gdpo_reward_keys: Any = opt(None, "gdpo: which of the reward function's numbers; null: all but score")
    gdpo_reward_weights: Any = opt(
        None, "gdpo: their weights, a list in that order or a mapping such as {format: 0.5}; null: 1 each"
    )
    adv_options: dict[str, Any] = opt({}, "options of an estimator of your own, by the names that it registered")
    filter_groups: FilterGroupsConfig = opt(FilterGroupsConfig, "dynamic sampling (DAPO)")
    use_pf_ppo: bool = opt(False, "draw the samples to train on anew, those of clear reward more often (PF-PPO)")
    pf_ppo: PFPPOConfig = opt(PFPPOConfig, "policy filtration (PF-PPO)")
