"""Checks across options that need the config alone, before any file is read or model loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl.config.compose import join_problems
from verl.config.derived import clip_range, kl_in_reward_coef, name_list, needs_critic
from verl.config.schema import CheckpointConfig, OptimConfig, PPOConfig, RolloutConfig, SFTConfig
from verl.config.suggest import did_you_mean, nearest_words
from verl.config.validate_pipeline import check_pipeline
from verl.config.validate_pools import check_pools
from verl.config.validate_rewards import check_reward_model
from verl.config.validate_servers import check_rollout_servers
from verl.errors import ConfigError

__all__ = ["kl_in_reward_coef", "validate"]

LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
GROUP_ESTIMATORS = ("grpo", "rloo")


class Findings:
    """Problems, which stop the run, and notices, which do not."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notices: list[str] = []

    def problem(self, wrong: bool, text: str) -> None:
        if wrong:
            self.problems.append(text)

    def notice(self, odd: bool, text: str) -> None:
        if odd:
            self.notices.append(text)


def validate(config: PPOConfig) -> list[str]:
    """Notices for the user.

    Raises:
        ConfigError: with all problems.
    """
    found = Findings()
    checks: tuple[Callable[[PPOConfig, Findings], None], ...] = (
        _check_data,
        check_loggers,
        check_resume,
        _check_kl,
        _check_estimator,
        _check_filters,
        _check_policy_loss,
        _check_sampling,
        check_pools,
        _check_packing,
        _check_engines,
        check_rollout_servers,
        _check_validation,
        check_reward_model,
        check_pipeline,
    )
    for check in checks:
        check(config, found)
    if found.problems:
        raise ConfigError(join_problems(found.problems))
    return found.notices


def _check_data(config: PPOConfig, found: Findings) -> None:
    data = config.data
    check_files("data.train_files", data.train_files, True, found)
    check_files("data.val_files", data.val_files, False, found)
    check_files("trainer.plugins", config.trainer.plugins, False, found)
    found.problem(data.train_max_samples == 0, "data.train_max_samples=0 leaves no prompt; -1 takes all.")
    found.problem(data.val_max_samples == 0, "data.val_max_samples=0 leaves no prompt; write data.val_files=null.")


def check_files(key: str, value: Any, needed: bool, found: Findings) -> None:
    """A key that takes one file or a list of files."""
    try:
        files = name_list(value)
    except TypeError:
        found.problem(True, f"{key}={value}: takes one file or a list of files, such as {key}=[a.parquet,b.parquet].")
        return
    found.problem(needed and not files, f"{key} names no file.")
    found.problem(any(not f.strip() for f in files), f"{key}={value}: a file's name is empty.")


def check_loggers(config: PPOConfig | SFTConfig, found: Findings) -> None:
    """Names in trainer.logger."""
    value = config.trainer.logger
    try:
        names = name_list(value)
    except TypeError:
        found.problem(True, f"trainer.logger={value}: takes a name or a list of names: {', '.join(LOGGERS)}.")
        return
    for name in names:
        if name not in LOGGERS:
            mend = did_you_mean(nearest_words(name, LOGGERS, limit=1))
            mend = " metrics.jsonl is always written; leave it out." if name in ("file", "jsonl") else mend
            found.problem(True, f"trainer.logger={name}: takes {', '.join(LOGGERS)}, one or a list of them.{mend}")


def check_resume(config: PPOConfig | SFTConfig, found: Findings) -> None:
    """trainer.resume_mode and its path."""
    trainer = config.trainer
    path = trainer.resume_from_path
    found.problem(
        trainer.resume_mode == "resume_path" and not path,
        "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N.",
    )
    found.problem(
        trainer.resume_mode != "resume_path" and bool(path),
        f"trainer.resume_from_path={path} is only read with trainer.resume_mode=resume_path; it is "
        f"{trainer.resume_mode}. Write both, or leave resume_from_path out.",
    )


def _check_kl(config: PPOConfig, found: Findings) -> None:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    coef, asked = algorithm.kl_ctrl.kl_coef, algorithm.use_kl_in_reward
    found.notice(
        asked is False and bool(coef),
        f"algorithm.kl_ctrl.kl_coef={coef} has no effect, since algorithm.use_kl_in_reward=False.",
    )
    found.notice(
        asked is None and bool(coef),
        f"algorithm.kl_ctrl.kl_coef={coef} turns the KL penalty in the reward on (use_kl_in_reward=False: off).",
    )
    found.notice(
        asked is True and coef is None,
        f"the KL penalty in the reward has coefficient {kl_in_reward_coef(algorithm)} (algorithm.kl_ctrl.kl_coef).",
    )
    found.notice(
        asked is True and coef == 0,
        "algorithm.use_kl_in_reward=True has no effect, since algorithm.kl_ctrl.kl_coef=0.",
    )
    found.notice(
        algorithm.kl_ctrl.type == "adaptive" and kl_in_reward_coef(algorithm) == 0,
        "algorithm.kl_ctrl.type=adaptive has no effect without a KL penalty in the reward (algorithm.kl_ctrl.kl_coef).",
    )
    found.notice(
        actor.use_kl_loss and actor.kl_loss_coef == 0,
        "actor_rollout_ref.actor.use_kl_loss=True has no effect on the loss, since kl_loss_coef=0.",
    )


def _check_estimator(config: PPOConfig, found: Findings) -> None:
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    found.problem(
        name == "rloo" and n == 1,
        "algorithm.adv_estimator=rloo compares the samples of a prompt; set actor_rollout_ref.rollout.n=2 or more "
        "(it is 1).",
    )
    found.notice(
        name == "grpo" and n == 1,
        "algorithm.adv_estimator=grpo compares the samples of a prompt: with actor_rollout_ref.rollout.n=1 every "
        "advantage is 0 and nothing is learned from rewards. Set n=2 or more, or another estimator.",
    )
    warmup = config.trainer.critic_warmup
    found.notice(
        warmup > 0 and not needs_critic(config),
        f"trainer.critic_warmup={warmup}: algorithm.adv_estimator={name} has no critic, so nothing is trained in the "
        "first steps.",
    )


def _check_filters(config: PPOConfig, found: Findings) -> None:
    algorithm, data, reward = config.algorithm, config.data, config.reward
    filters, n = algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    found.problem(
        filters.enable and n == 1,
        "algorithm.filter_groups.enable=True compares the samples of a prompt; set actor_rollout_ref.rollout.n=2 or more.",
    )
    found.problem(
        filters.enable and algorithm.adv_estimator == "remax",
        "algorithm.filter_groups.enable=True goes by the group, and algorithm.adv_estimator=remax by the greedy response: "
        "choose one of the two.",
    )
    found.problem(
        not filters.enable and data.gen_batch_size not in (None, data.train_batch_size),
        f"data.gen_batch_size={data.gen_batch_size} is the batch of algorithm.filter_groups.enable=True; without it a step draws "
        f"data.train_batch_size={data.train_batch_size} prompts. Set the one or leave out the other.",
    )
    found.notice(
        not filters.enable and (filters.metric is not None or filters.max_num_gen_batches > 0),
        "algorithm.filter_groups has no effect without algorithm.filter_groups.enable=True.",
    )
    buffer, limit = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len
    found.problem(
        buffer.enable and reward.reward_manager.name == "naive",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True is read by reward.reward_manager.name=dapo; it is naive.",
    )
    found.problem(
        buffer.enable and not 0 < buffer.len <= limit,
        f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len}: takes 1 to {limit} tokens (reward.reward_kwargs."
        "max_resp_len).",
    )


def _check_policy_loss(config: PPOConfig, found: Findings) -> None:
    actor = config.actor_rollout_ref.actor
    below, above = clip_range(actor)
    found.problem(
        actor.clip_ratio_c <= 1 + above,
        f"actor_rollout_ref.actor.clip_ratio_c={actor.clip_ratio_c} has to be above 1 + the clip range above "
        f"(1 + {above}); otherwise the dual clip takes the place of the clip itself.",
    )
    found.notice(
        actor.clip_ratio_low is not None and actor.clip_ratio_high is not None and actor.clip_ratio not in (0.2, below),
        f"actor_rollout_ref.actor.clip_ratio={actor.clip_ratio} has no effect, since clip_ratio_low and "
        "clip_ratio_high are both set.",
    )
    found.notice(
        actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor has an effect with loss_agg_mode=seq-mean-token-sum-norm alone; it is "
        f"{actor.loss_agg_mode or 'not set'}.",
    )


def _check_sampling(config: PPOConfig, found: Findings) -> None:
    rollout = config.actor_rollout_ref.rollout
    for key, top_k in (("rollout.top_k", rollout.top_k), ("rollout.val_kwargs.top_k", rollout.val_kwargs.top_k)):
        found.problem(top_k == 0, f"actor_rollout_ref.{key}=0 keeps no token; -1 keeps all.")
    section, nodes, per_node = "trainer", config.trainer.nnodes, config.trainer.n_gpus_per_node
    if rollout.nnodes:
        section, nodes, per_node = "actor_rollout_ref.rollout", rollout.nnodes, rollout.n_gpus_per_node
    tensor = rollout.tensor_model_parallel_size
    found.problem(
        per_node % tensor != 0,
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor} does not divide the {per_node} devices of a "
        f"machine ({section}.nnodes={nodes} x {section}.n_gpus_per_node={per_node}).",
    )


def _check_packing(config: PPOConfig, found: Findings) -> None:
    root = config.actor_rollout_ref
    unread = [
        key
        for key, packed, size in (
            ("actor.ppo_micro_batch_size_per_gpu", root.actor.use_dynamic_bsz, root.actor.ppo_micro_batch_size_per_gpu),
            (
                "rollout.log_prob_micro_batch_size_per_gpu",
                root.rollout.log_prob_use_dynamic_bsz,
                root.rollout.log_prob_micro_batch_size_per_gpu,
            ),
            (
                "ref.log_prob_micro_batch_size_per_gpu",
                root.ref.log_prob_use_dynamic_bsz,
                root.ref.log_prob_micro_batch_size_per_gpu,
            ),
        )
        if packed and size is not None
    ]
    found.notice(
        bool(unread),
        f"of actor_rollout_ref, {', '.join(unread)}: no effect, since micro-batches are packed by tokens "
        "(use_dynamic_bsz=True).",
    )


def _check_engines(config: PPOConfig, found: Findings) -> None:
    actor = config.actor_rollout_ref.actor
    check_optimizer("actor_rollout_ref.actor.optim", actor.optim, found)
    check_checkpoint("actor_rollout_ref.actor.checkpoint", actor.checkpoint, found)
    if needs_critic(config):
        check_optimizer("critic.optim", config.critic.optim, found)
        check_checkpoint("critic.checkpoint", config.critic.checkpoint, found)


def check_optimizer(section: str, optim: OptimConfig, found: Findings) -> None:
    """An optimizer's options, in the section of that name."""
    found.problem(not math.isfinite(optim.lr), f"{section}.lr={optim.lr}: has to be a finite number, such as 1e-6.")
    found.problem(
        len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas),
        f"{section}.betas={optim.betas}: takes two numbers from 0 to below 1, such as [0.9,0.999].",
    )
    found.notice(
        optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0,
        f"{section}.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio} has no effect, since "
        f"lr_warmup_steps={optim.lr_warmup_steps} is set.",
    )
    found.notice(
        optim.min_lr_ratio > 0 and optim.lr_scheduler_type != "cosine",
        f"{section}.min_lr_ratio={optim.min_lr_ratio} has no effect with lr_scheduler_type={optim.lr_scheduler_type}.",
    )


def check_checkpoint(section: str, checkpoint: CheckpointConfig, found: Findings) -> None:
    """What a checkpoint holds, in the section of that name."""
    for name, contents in (("save_contents", checkpoint.save_contents), ("load_contents", checkpoint.load_contents)):
        for word in contents:
            mend = did_you_mean(nearest_words(word, CHECKPOINT_CONTENTS, limit=1))
            found.problem(
                word not in CHECKPOINT_CONTENTS,
                f"{section}.{name}: {word}: takes {', '.join(CHECKPOINT_CONTENTS)}.{mend}",
            )
    found.problem(
        "model" not in checkpoint.load_contents,
        f"{section}.load_contents={checkpoint.load_contents} is without model: a run that goes on would start its weights "
        f"anew. Write {section}.load_contents=[model], or trainer.resume_mode=disable for a new run.",
    )
    unread = [word for word in ("optimizer", "extra") if word not in checkpoint.load_contents]
    found.notice(
        bool(unread) and "model" in checkpoint.load_contents,
        f"{section}.load_contents is without {', '.join(unread)}: on resume that starts anew, so a run does not go on to the "
        "same numbers.",
    )
    missing = [word for word in ("model", "optimizer", "extra") if word not in checkpoint.save_contents]
    found.notice(
        bool(missing),
        f"{section}.save_contents is without {', '.join(missing)}: a run cannot go on from such a checkpoint to the "
        "same numbers.",
    )


def _check_validation(config: PPOConfig, found: Findings) -> None:
    trainer, sampling = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    no_files = config.data.val_files in (None, [])
    found.problem(trainer.val_only and no_files, "trainer.val_only=True needs data.val_files.")
    found.notice(
        trainer.test_freq > 0 and no_files,
        f"trainer.test_freq={trainer.test_freq} has no effect without data.val_files.",
    )
    if not no_files:
        _check_val_sampling(config.actor_rollout_ref.rollout, found)
    found.notice(
        sampling.do_sample and sampling.temperature == 0,
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True at temperature 0 is greedy; set val_kwargs.temperature.",
    )


def _check_val_sampling(rollout: RolloutConfig, found: Findings) -> None:
    sampling = rollout.val_kwargs
    found.notice(
        not sampling.do_sample and sampling.temperature > 0,
        f"validation is greedy: val_kwargs.temperature={sampling.temperature} has no effect without "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True.",
    )
    found.notice(
        sampling.n > 1 and (not sampling.do_sample or sampling.temperature == 0),
        f"validation is greedy, so its val_kwargs.n={sampling.n} samples of a prompt are equal.",
    )
