"""The algorithm that the config names, from the registries, checked against what it needs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from verl.algorithms.inputs import AdvantageOptions, PolicyLossOptions
from verl.algorithms.registry import (
    PLUGIN_PREFIX,
    AdvantageEstimator,
    Algorithm,
    PolicyLoss,
    get_advantage,
    get_policy_loss,
    list_policy_losses,
)
from verl.config.derived import clip_range, name_list, needs_reference
from verl.config.schema import AlgorithmConfig, PPOConfig
from verl.errors import ConfigError
from verl.trainer.correction import read_correction

LOSS = "actor_rollout_ref.actor.policy_loss"

_GRPO_WITHOUT_STD = (
    "Did you mean algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False? Dr. GRPO is GRPO without the "
    "division by the group's standard deviation."
)
_REINFORCE = "Did you mean algorithm.adv_estimator=reinforce_plus_plus?"
# Names that algorithms go by elsewhere, which are none of an estimator here, and what to write for them.
KNOWN_AS = {
    "ppo": "Did you mean algorithm.adv_estimator=gae? That is PPO with a value model, whose options are critic.*.",
    "dapo": "Did you mean algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True "
    "actor_rollout_ref.actor.clip_ratio_high=0.28? DAPO is GRPO with these two.",
    "drgrpo": _GRPO_WITHOUT_STD,
    "dr_grpo": _GRPO_WITHOUT_STD,
    "reinforce": _REINFORCE,
    "reinforce++": _REINFORCE,
}


def load_plugins(files: object) -> None:
    """Import the user's files, which may register advantages, losses and scorers.

    Raises:
        ConfigError: a file is missing or fails to import.
    """
    for number, name in enumerate(name_list(files)):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"trainer.plugins: {name} is not a file.")
        spec = importlib.util.spec_from_file_location(f"{PLUGIN_PREFIX}{number}_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"trainer.plugins: {name} is not a Python file (its name must end in .py).")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as e:  # a script that ends itself would end the run without a word
            raise ConfigError(f"trainer.plugins: importing {name} failed: {type(e).__name__}: {e}") from e


def choose_algorithm(config: PPOConfig) -> tuple[AdvantageEstimator, PolicyLoss]:
    """Estimator and policy loss by name, with the plugins loaded.

    Raises:
        ConfigError: an unknown name (the nearest is named), a group size that the estimator cannot work with, an option
            that neither has, or a rollout correction that cannot be read.
    """
    load_plugins(config.trainer.plugins)
    try:
        estimator = get_advantage(config.algorithm.adv_estimator)
    except ValueError as e:
        name = config.algorithm.adv_estimator
        raise ConfigError(f"algorithm.adv_estimator={name}: {KNOWN_AS.get(name.lower(), e)}") from None
    try:
        loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    except ValueError as e:
        raise ConfigError(f"{LOSS}.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}: {e}") from None
    n = config.actor_rollout_ref.rollout.n
    if n < estimator.needs.min_group_size and estimator.name != "grpo":
        raise ConfigError(
            f"algorithm.adv_estimator={estimator.name} compares the samples of a prompt and needs "
            f"actor_rollout_ref.rollout.n of at least {estimator.needs.min_group_size}; it is {n}."
        )
    advantage_options(config, estimator)
    loss_options(config, loss)
    _check_rollout_log_probs(config, estimator, loss)
    return estimator, loss


def _check_rollout_log_probs(config: PPOConfig, estimator: AdvantageEstimator, loss: PolicyLoss) -> None:
    """vLLM's log-probs are those of what top_k and top_p leave: a ratio of the whole distribution to them means nothing."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    cut = rollout.name == "vllm" and (rollout.top_k > 0 or rollout.top_p < 1)
    readers = [f"algorithm.rollout_correction.{name}" for name in ("rollout_is", "rollout_rs")]
    wanted = [key for key, value in zip(readers, (correction.rollout_is, correction.rollout_rs)) if value is not None]
    wanted += [entry.name for entry in (estimator, loss) if entry.needs.rollout_log_probs]
    wanted += ["algorithm.rollout_correction.bypass_mode=True"] if correction.bypass_mode else []
    read_correction(correction)
    if cut and wanted:
        raise ConfigError(
            f"{' and '.join(wanted)} compares the trainer's probabilities with the rollout's, and vLLM gives those of what "
            f"top_k={rollout.top_k} and top_p={rollout.top_p} leave over. Set actor_rollout_ref.rollout.top_k=-1 and top_p=1, or "
            "actor_rollout_ref.rollout.name=native."
        )


def notices(config: PPOConfig, loss: PolicyLoss) -> list[str]:
    """What the user should know of how the loss fits the rest of the config."""
    found = []
    own, given = loss.needs.loss_agg_mode, config.actor_rollout_ref.actor.loss_agg_mode
    if own is not None and given not in (None, own):
        found.append(
            f"actor_rollout_ref.actor.loss_agg_mode={given} decides, although {loss.name}'s paper defines the loss with "
            f"{own}: leave the key out for that."
        )
    elif own is not None and given is None:
        found.append(f"actor_rollout_ref.actor.loss_agg_mode is {own}, as {loss.name}'s paper has it.")
    return found


def aggregation(config: PPOConfig, loss: PolicyLoss) -> str:
    """The actor's loss aggregation: as set, else as the loss's paper has it, else token-mean."""
    return config.actor_rollout_ref.actor.loss_agg_mode or loss.needs.loss_agg_mode or "token-mean"


def needs_reference_model(config: PPOConfig, estimator: AdvantageEstimator, loss: PolicyLoss) -> bool:
    """Whether a KL term, the estimator or the loss reads the log-probs of the frozen reference policy."""
    return needs_reference(config) or estimator.needs.reference or loss.needs.reference


def loss_options(config: PPOConfig, loss: PolicyLoss) -> PolicyLossOptions:
    """The options of the policy loss, its own with their defaults filled in.

    Raises:
        ConfigError: an option is set that this loss does not have.
    """
    actor = config.actor_rollout_ref.actor
    section = actor.policy_loss
    named = {
        "clip_cov_ratio": section.clip_cov_ratio,
        "clip_cov_lb": section.clip_cov_lb,
        "clip_cov_ub": section.clip_cov_ub,
        "kl_cov_ratio": section.kl_cov_ratio,
        "ppo_kl_coef": section.ppo_kl_coef,
        "tau_pos": section.tau_pos,
        "tau_neg": section.tau_neg,
        "dro_beta": section.dro_beta,
    }
    given = {name: value for name, value in named.items() if value is not None}
    for name in given:
        if name not in loss.extra:
            owners = [other for other in list_policy_losses() if name in get_policy_loss(other).extra]
            raise ConfigError(
                f"{LOSS}.{name}={given[name]}: loss_mode={loss.name} has no such option; {' and '.join(owners)} has. Leave "
                f"it out, or set {LOSS}.loss_mode={owners[0]}."
            )
    extra = _resolved(loss, {**given, **section.options}, f"{LOSS}.options")
    return PolicyLossOptions(*clip_range(actor), actor.clip_ratio_c, extra)


def advantage_options(config: PPOConfig, estimator: AdvantageEstimator) -> AdvantageOptions:
    """The options of the estimator, its own with their defaults filled in.

    Raises:
        ConfigError: an option is set that this estimator does not have.
    """
    algorithm = config.algorithm
    given = dict(algorithm.adv_options)
    weights = reward_weights(algorithm)
    if weights or algorithm.gdpo_reward_keys is not None:
        if "gdpo_reward_weights" not in estimator.extra:
            raise ConfigError(
                "algorithm.gdpo_reward_keys and gdpo_reward_weights are options of adv_estimator=gdpo; "
                f"{estimator.name} does not read them. Leave them out, or set algorithm.adv_estimator=gdpo."
            )
        given["gdpo_reward_weights"] = weights
    extra = _resolved(estimator, given, "algorithm.adv_options")
    return AdvantageOptions(algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std_in_grpo, extra=extra)


def reward_weights(algorithm: AlgorithmConfig) -> dict[str, float]:
    """algorithm.gdpo_reward_weights by the reward's name.

    Raises:
        ConfigError: a list that does not fit gdpo_reward_keys, or a weight that is no number.
    """
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    names = _texts(keys)
    if names is None:
        raise ConfigError(f"algorithm.gdpo_reward_keys={keys}: takes a list of names, such as [acc,format].")
    if weights is None:
        return {}
    if isinstance(weights, (list, tuple)):
        if len(weights) != len(names):
            raise ConfigError(
                f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(names)} names in gdpo_reward_keys. Give as "
                "many, or a mapping such as {acc: 1, format: 0.5}."
            )
        weights = dict(zip(names, weights))
    bad = not isinstance(weights, dict) or any(
        isinstance(w, bool) or not isinstance(w, (int, float)) for w in weights.values()
    )
    if bad:
        raise ConfigError(
            f"algorithm.gdpo_reward_weights={algorithm.gdpo_reward_weights}: takes numbers, as a list in the order of "
            "gdpo_reward_keys or as a mapping such as {acc: 1, format: 0.5}."
        )
    if names and (unknown := sorted(set(weights) - set(names))):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights names {', '.join(unknown)}, which gdpo_reward_keys leaves out."
        )
    return {name: float(weight) for name, weight in weights.items()}


def _texts(value: Any) -> list[str] | None:
    try:
        return name_list(value)
    except TypeError:
        return None


def _resolved(entry: Algorithm, given: dict[str, Any], key: str) -> dict[str, Any]:
    try:
        return entry.resolve_extra(given)
    except ValueError as e:
        raise ConfigError(f"{key}: {e}") from None
