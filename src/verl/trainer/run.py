"""`Run`: everything that a pipeline works with, built in the order in which mistakes are cheapest to find."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from verl.algorithms.kl import AdaptiveKLController, FixedKLController
from verl.algorithms.registry import AdvantageEstimator, PolicyLoss
from verl.config.batch_plan import BatchPlan
from verl.config.compose import print_notice
from verl.config.derived import kl_in_reward_coef, num_devices
from verl.config.schema import PPOConfig
from verl.core.checkpoint_engine.store import CheckpointStore, step_of
from verl.core.controller.resources import is_distributed
from verl.core.controller.roles import Roles, build_roles, check_placement
from verl.core.model_engine.loading import load_tokenizer, resolve_model_path
from verl.core.reward_model.factory import CheckedRewardModel, build_reward_model, check_reward_model
from verl.data.batch import SampleBatch
from verl.data.prompts import PromptDataset, load_prompts
from verl.data.sampler import PromptSampler
from verl.data.schema import UNNAMED_SOURCE
from verl.rewards.manager import RewardManager
from verl.rewards.registry import find_scorer
from verl.rewards.types import ScoringModel
from verl.tracking.files import read_run
from verl.tracking.tracker import Tracker
from verl.trainer.algorithm import choose_algorithm, needs_reference_model
from verl.trainer.algorithm import notices as algorithm_notices
from verl.trainer.folder import FolderLock
from verl.trainer.saving import Saver


class NothingToDo(Exception):
    """The run that is asked for has been finished; the message says what to change for more."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


KLController = FixedKLController | AdaptiveKLController


@dataclass
class Run:
    """One training run.

    surplus: scored samples that dynamic sampling holds for the next step. ahead: what an asynchronous pipeline has generated
    and not trained on yet, where there is one; left_ahead: the same of the checkpoint that the run goes on from. step: steps
    done so far. owes_validation: a signal ended the one of the last of them. last_checkpoint: that this run has written or
    gone on from. spans: a list here gets all that is timed, for a picture (see StepLog).
    """

    config: PPOConfig
    plan: BatchPlan
    estimator: AdvantageEstimator
    policy_loss: PolicyLoss
    tokenizer: Any
    prompts: PromptDataset
    sampler: PromptSampler
    val_prompts: PromptDataset | None
    rewards: RewardManager
    kl_control: KLController | None
    store: CheckpointStore
    roles: Roles
    tracker: Tracker
    lock: FolderLock
    step: int = 0
    owes_validation: bool = False
    surplus: SampleBatch | None = None
    ahead: Stateful | None = None
    left_ahead: dict[str, Any] | None = None
    last_checkpoint: Path | None = None
    spans: list[tuple[str, float, float]] | None = None
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        self.saver = Saver(self.store)

    def close(self, status: str) -> Path | None:
        """Stop workers and write the report; returns its path, None where it could not be written."""
        self.rewards.close()
        self.roles.close()
        report = self.tracker.finish(status)
        self.lock.release()
        return report


def prepare(config: PPOConfig, notices: list[str]) -> Run:
    """Check config, data and reward, print the plan, then load models and resume.

    notices: what the config check wants the user to know. Every UserError that can be found without loading a model is
    raised before one is loaded.

    Raises:
        NothingToDo: the run is finished already.
    """
    algorithm = choose_algorithm(config)
    asked = algorithm[0].needs.critic, needs_reference_model(config, *algorithm)
    device = check_placement(config, *asked)
    folder = Path(config.trainer.default_local_dir).expanduser()
    if not folder.exists():
        # Before the folder is made: a mistyped path leaves nothing behind. One that is there may be another run's, whose
        # unfinished checkpoint `find` would remove: that waits for the lock.
        CheckpointStore(folder).find(config.trainer.resume_mode, config.trainer.resume_from_path)
    resolve_model_path(config.actor_rollout_ref.model.path)
    if config.reward_model.enable:
        resolve_model_path(config.reward_model.model.path, "reward_model.model.path")
    lock = FolderLock(folder)
    try:
        return _prepare(config, notices, algorithm, asked, device, lock)
    except BaseException:
        lock.release()
        raise


def _prepare(
    config: PPOConfig,
    notices: list[str],
    algorithm: tuple[AdvantageEstimator, PolicyLoss],
    asked: tuple[bool, bool],
    device: torch.device,
    lock: FolderLock,
) -> Run:
    """asked: whether there are a critic and a reference."""
    estimator, policy_loss = algorithm
    with_critic, with_reference = asked
    folder = lock.folder
    store = CheckpointStore(folder, config.trainer.max_actor_ckpt_to_keep, notify=print_notice)
    resume_from = store.find(config.trainer.resume_mode, config.trainer.resume_from_path)

    model = config.actor_rollout_ref.model
    model_path = resolve_model_path(model.path)
    tokenizer = load_tokenizer(model.tokenizer_path or model_path, trust_remote_code=model.trust_remote_code)
    prompts, val_prompts, rewards = _load_data(config, tokenizer)
    reward_model = check_reward_model(config.reward_model) if config.reward_model.enable else None
    plan = BatchPlan.make(config, len(prompts), num_devices(config.trainer), with_critic=with_critic)
    print(plan.table(), flush=True)
    notices = [*notices, *algorithm_notices(config, policy_loss)]
    for notice in [*notices, *prompts.notices, *(val_prompts.notices if val_prompts else []), *plan.notices]:
        print_notice(notice)
    sampler = PromptSampler(
        len(prompts),
        config.data.gen_batch_size or plan.prompts_per_step,
        shuffle=config.data.shuffle,
        seed=config.data.seed,
        fingerprint=prompts.fingerprint,
    )
    torch.manual_seed(config.trainer.seed)
    transformers.utils.logging.disable_progress_bar()
    if resume_from is not None and not config.trainer.val_only:
        _check_steps_left(folder, resume_from, plan.total_steps)
    roles = build_roles(config, plan, device, model_path, tokenizer, with_critic, with_reference)
    if reward_model is not None:
        rewards.attach(_place_reward_model(config, reward_model, device, roles.notices))
    tracker = Tracker(
        config.trainer,
        dataclasses.asdict(config),
        folder,
        total_steps=plan.total_steps,
        resumed_step=step_of(resume_from) if resume_from else None,
        plan={name: value for name, value, *_ in plan.rows()},
    )
    for notice in roles.notices:
        tracker.notice(notice)
    shared = (config, plan, estimator, policy_loss, tokenizer)
    data = (prompts, sampler, val_prompts, rewards)
    run = Run(*shared, *data, kl_controller(config), store, roles, tracker, lock)
    if resume_from is not None:
        from verl.trainer.checkpoints import resume

        resume(run, resume_from)
    return run


def _place_reward_model(
    config: PPOConfig, checked: CheckedRewardModel, device: torch.device, notices: list[str]
) -> ScoringModel:
    """The reward model, on `device` or in a worker of Ray; adds to `notices`."""
    if is_distributed(config):
        from verl.core.reward_model.on_ray import RayRewardModel

        scorer: ScoringModel = RayRewardModel(config)
        notice = scorer.notice
    else:
        scorer, notice = build_reward_model(config.reward_model, checked, device)
    notices += [f"reward_model: {notice}"] if notice else []
    return scorer


def _load_data(config: PPOConfig, tokenizer: Any) -> tuple[PromptDataset, PromptDataset | None, RewardManager]:
    """Prompts of training and validation, and the reward that can score both."""
    rewards = RewardManager(config.reward, config.custom_reward_function, config.reward_model)
    built_in = rewards.uses_rules and rewards.custom is None
    data = {
        "config": config.data,
        "tokenizer": tokenizer,
        "require_ground_truth": built_in,
        "require_source": built_in and find_scorer(UNNAMED_SOURCE) is None,
    }
    prompts = load_prompts(config.data.train_files, split="train", **data)
    val_prompts = load_prompts(config.data.val_files, split="val", **data) if config.data.val_files else None
    rewards.check(prompts.data_sources | (val_prompts.data_sources if val_prompts else set()))
    return prompts, val_prompts, rewards


def _check_steps_left(folder: Path, resume_from: Path, total: int) -> None:
    """A run killed between its last checkpoint and its end is not finished: its last metrics and report are missing."""
    finished = read_run(folder).get("status") == "finished"
    done = step_of(resume_from)
    if finished and resume_from.absolute().parent == folder.absolute() and done >= total:
        steps = f"all {total} steps are done" if done == total else f"{done} steps are done, and {total} are asked for"
        raise NothingToDo(
            f"nothing to do: {steps}, in {folder}. Raise trainer.total_training_steps (or "
            "trainer.total_epochs) to go on, or set trainer.resume_mode=disable for a new run."
        )


def kl_controller(config: PPOConfig) -> KLController | None:
    """What sets the coefficient of the KL penalty in the reward; None where there is no penalty."""
    coef, control = kl_in_reward_coef(config.algorithm), config.algorithm.kl_ctrl
    if coef == 0:
        return None
    return (
        FixedKLController(coef)
        if control.type == "fixed"
        else AdaptiveKLController(coef, control.target_kl, control.horizon)
    )
