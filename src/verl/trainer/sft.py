"""Supervised fine-tuning: the loss, the run, and its loop, on the engine that the RL trainer uses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from verl.config.compose import print_notice, to_yaml
from verl.config.schema import SFTConfig, TrainerConfig
from verl.core.checkpoint_engine.disk import damage_named, load_file
from verl.core.checkpoint_engine.store import CheckpointStore, step_of, verify
from verl.core.controller.roles import choose_device, compute_dtype
from verl.core.model_engine.api import MicroBatching, TokenOutputs
from verl.core.model_engine.fsdp_engine import FSDPEngine
from verl.core.model_engine.loading import DTYPES, load_config, load_policy, load_tokenizer, resolve_model_path
from verl.core.model_engine.lora import add_adapters
from verl.core.model_engine.metrics import Metric
from verl.core.model_engine.models import PolicyModel
from verl.core.model_engine.parallel import ensure_process_group
from verl.data.batch import SampleBatch
from verl.data.conversations import ConversationDataset, load_conversations
from verl.data.sampler import PromptSampler
from verl.errors import CheckpointError, ConfigError
from verl.tracking.tracker import Tracker
from verl.trainer.checkpoints import random_state, restore_random_state
from verl.trainer.interrupt import Interrupt
from verl.trainer.losses import with_loss_weights
from verl.trainer.saving import Saver
from verl.trainer.steplog import StepLog

COLLECTIVE_SECONDS = 600


@dataclass
class SFTLoss:
    """Cross-entropy: minus the log-prob of the assistant's tokens, each of a batch weighing the same."""

    temperature: float = 1.0
    with_entropy: bool = False

    def __call__(self, outputs: TokenOutputs, micro: SampleBatch) -> tuple[Tensor, dict[str, Metric]]:
        if outputs.log_probs is None:
            raise ValueError("SFTLoss needs a language model's log-probs")
        loss = -(micro["loss_weights"].values * outputs.log_probs).sum()
        return loss, {"loss": Metric.sum(loss)}


@dataclass
class SFTRun:
    """step: updates done so far."""

    config: SFTConfig
    engine: FSDPEngine
    train_data: ConversationDataset
    val_data: ConversationDataset | None
    sampler: PromptSampler
    total_steps: int
    store: CheckpointStore
    tracker: Tracker
    saver: Saver
    step: int = 0


def prepare(config: SFTConfig) -> SFTRun:
    """Check config and data, then load the model and resume. Mistakes are found before a model is loaded."""
    trainer = config.trainer
    _check_one_device(config)
    device = choose_device(trainer.device)
    folder = Path(trainer.default_local_dir).expanduser()
    store = CheckpointStore(folder, trainer.max_ckpt_to_keep, notify=print_notice)
    resume_from = store.find(trainer.resume_mode, trainer.resume_from_path)
    model_path = resolve_model_path(config.model.path, "model.path")
    tokenizer = load_tokenizer(
        config.model.tokenizer_path or model_path, trust_remote_code=config.model.trust_remote_code, key="model.path"
    )
    data = config.data
    train_data = load_conversations(data.train_files, data, tokenizer, split="train")
    val_data = load_conversations(data.val_files, data, tokenizer, split="val") if data.val_files else None
    total_steps, sampler = _schedule(config, train_data)
    for notice in [*train_data.notices, *(val_data.notices if val_data else [])]:
        print_notice(notice)
    torch.manual_seed(trainer.seed)
    transformers.utils.logging.disable_progress_bar()
    engine = build_engine(config, device, model_path, tokenizer, total_steps)
    tracker = Tracker(
        TrainerConfig(
            project_name=trainer.project_name, experiment_name=trainer.experiment_name, logger=trainer.logger
        ),
        dataclasses.asdict(config),
        folder,
        total_steps=total_steps,
        resumed_step=step_of(resume_from) if resume_from else None,
    )
    run = SFTRun(config, engine, train_data, val_data, sampler, total_steps, store, tracker, Saver(store))
    if resume_from is not None:
        resume(run, resume_from)
    return run


def _check_one_device(config: SFTConfig) -> None:
    for name, value, alone in (
        ("fsdp_size", config.engine.fsdp_size, (-1, 1)),
        ("ulysses_sequence_parallel_size", config.engine.ulysses_sequence_parallel_size, (1,)),
    ):
        if value not in alone:
            raise ConfigError(f"engine.{name}={value}: fine-tuning runs on one device. Leave it at {alone[0]}.")


def _schedule(config: SFTConfig, data: ConversationDataset) -> tuple[int, PromptSampler]:
    """The number of updates, and the order of the conversations."""
    size = config.data.train_batch_size
    if len(data) < size:
        raise ConfigError(
            f"data.train_batch_size={size} is more than the {len(data)} conversations, so not one update can be made. Set it to "
            f"at most {len(data)}."
        )
    steps = len(data) // size
    total = config.trainer.total_training_steps or config.trainer.total_epochs * steps
    print(f"{len(data):,} conversations, {size} an update: {steps:,} updates an epoch, {total:,} in all", flush=True)
    order = {"shuffle": config.data.shuffle, "seed": config.data.seed}
    return total, PromptSampler(len(data), size, fingerprint=data.fingerprint, **order)


def build_engine(
    config: SFTConfig, device: torch.device, model_path: str, tokenizer: Any, total_updates: int
) -> FSDPEngine:
    """The model under training, on one device."""
    ensure_process_group(device, COLLECTIVE_SECONDS)
    model, data = config.model, config.data
    hf_config = load_config(
        model_path, trust_remote_code=model.trust_remote_code, override=model.override_config, key="model.path"
    )
    dtype = DTYPES[config.engine.model_dtype]
    hf = load_policy(
        model_path,
        hf_config,
        dtype,
        trust_remote_code=model.trust_remote_code,
        key="model.path",
        override=model.override_config,
    )
    if model.lora_rank > 0:
        add_adapters(hf, model, model_path, key="model")
    limit = MicroBatching(data.max_token_len_per_gpu, data.micro_batch_size_per_gpu)
    return FSDPEngine(
        PolicyModel(hf, compiled=True),
        device=device,
        dtype=compute_dtype(config.engine, device),
        fsdp=config.engine,
        train_limit=limit,
        infer_limit=limit,
        optim=config.optim,
        total_updates=total_updates,
        checkpoint=config.checkpoint,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        compiled=True,
        tokenizer=tokenizer,
    )


def train(run: SFTRun) -> str:
    """Train to the last update, or until Ctrl-C. Returns "finished" or "interrupted"."""
    trainer = run.config.trainer
    with Interrupt() as interrupt:
        while run.step < run.total_steps:
            log = StepLog()
            with log.time("step"):
                log.add(update(run))
            run.step += 1
            tokens, seconds = log.metrics["train/global_tokens"], log.seconds("step")
            log.add({"perf/throughput": tokens / seconds, "training/global_step": run.step})
            log.add({"training/epoch": run.sampler.epoch})
            last = run.step == run.total_steps
            if run.val_data is not None and (last or _due(run.step, trainer.test_freq)):
                with log.time("testing"):
                    log.add({"val/loss": validation_loss(run.engine, run.val_data)})
            stop = interrupt.requested
            if last or stop or _due(run.step, trainer.save_freq):
                with log.time("save_checkpoint"):
                    save(run, log.metrics)
            run.tracker.log(log.metrics, step=run.step)
            run.saver.settle(wait=last or stop)
            if stop and not last:
                return "interrupted"
    return "finished"


def update(run: SFTRun) -> dict[str, float]:
    """One optimizer update on the next `data.train_batch_size` conversations."""
    batch = run.train_data.batch(run.sampler.next_batch())
    metrics = run.engine.train_batch(with_loss_weights(batch, "token-mean", 1.0), SFTLoss())
    named = {("perf/mfu" if name == "mfu" else f"train/{name}"): value for name, value in metrics.items()}
    return {**named, "train/global_tokens": int(batch.token_counts.sum())}


def validation_loss(engine: FSDPEngine, data: ConversationDataset) -> float:
    """Mean of minus the log-prob over the assistant's tokens of all conversations."""
    batch = data.batch(range(len(data)))
    log_probs, _ = engine.log_probs(batch, 1.0)
    return -float(log_probs.values[batch["response_mask"].values].double().mean())


def save(run: SFTRun, metrics: dict[str, float]) -> Path:
    """Write global_step_N, in the layout of the RL trainer's checkpoints: the merger reads its folder `actor`."""
    with run.saver.writing(run.step, [run.engine]) as folder:
        run.engine.save(folder / "actor")
        state = {"step": run.step, "sampler": run.sampler.state_dict(), "metrics": metrics}
        (folder / "trainer.json").write_text(json.dumps(state, indent=1))
        (folder / "config.yaml").write_text(to_yaml(run.config))
        torch.save(random_state(), folder / "random.pt")
    run.saver.settle()
    return run.store.folder / f"global_step_{run.step}"


def resume(run: SFTRun, folder: Path) -> None:
    """Take over the state in `folder`; CheckpointError if it is not one of this trainer's."""
    path = folder / "trainer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {folder} was not written by this trainer, or not wholly.")
    verify(folder)
    with damage_named(path):
        state = json.loads(path.read_text())
    run.engine.load(folder / "actor")
    run.step = state["step"]
    say: Callable[[str], None] = run.tracker.notice
    for notice in run.sampler.load_state_dict(state["sampler"]):
        say(notice)
    with damage_named(folder / "random.pt"):
        restore_random_state(load_file(folder / "random.pt"))
    if folder.absolute().parent == run.store.folder.absolute():
        run.tracker.restore(state["metrics"], run.step)
    say(f"resumed from {folder}: {run.step} updates are done.")


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
