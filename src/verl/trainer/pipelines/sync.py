"""The synchronous pipeline: every stage waits for the one before it, and samples are always the current policy's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from verl.config.derived import all_devices
from verl.data.batch import SampleBatch
from verl.trainer import checkpoints, stages
from verl.trainer.groups import draw_by_reward
from verl.trainer.interrupt import Interrupt
from verl.trainer.metrics import batch_metrics, idle_shares, performance_metrics
from verl.trainer.run import Run
from verl.trainer.sampling import NoSpreadError, fill_step
from verl.trainer.steplog import StepLog
from verl.trainer.validation import validate_first, validate_step


def train(run: Run) -> str:
    """Train until the plan's last step, or until Ctrl-C. Returns "finished" or "interrupted"."""
    trainer = run.config.trainer
    run.roles.sync_weights(version=run.step)
    with Interrupt() as interrupt:
        if not validate_first(run, interrupt):
            return "interrupted"
        if trainer.val_only:
            return "finished"
        log = StepLog(run.spans)
        while run.step < run.plan.total_steps:
            done, log = log.metrics, StepLog(run.spans)
            try:
                with log.time("step"):
                    batch = train_step(run, log)
            except NoSpreadError:
                checkpoints.save_if_new(run, done)
                raise
            measure(run, batch, log)
            waited = log.seconds("gen") + log.seconds("reward")
            log.add(idle_shares(log.seconds("step"), log.seconds("gen"), log.seconds("step") - waited))
            run.step += 1
            log.add({"training/global_step": run.step, "training/epoch": run.sampler.epoch})
            last = run.step == run.plan.total_steps
            tests = last or due(run.step, trainer.test_freq)
            validated = not tests or validate_step(run, interrupt, log)
            stop = interrupt.requested  # read once: a signal from here on ends the next step, which is then saved too
            record(run, log, saves=last or stop or due(run.step, trainer.save_freq))
            if stop and not (last and validated):
                return "interrupted"
    return "finished"


def train_step(run: Run, log: StepLog) -> SampleBatch:
    """One step of the algorithm: samples from the current policy, their advantages, the updates, the new weights."""
    rewards = None
    if run.config.algorithm.filter_groups.enable:
        batch = fill_step(run, log)
    else:
        prompts = stages.draw_prompts(run)
        with log.time("gen"):
            sampling = stages.training_sampling(run)
            batch, rewards = stages.generate(run, prompts, sampling, first_stream=run.step * len(prompts))
        batch = stages.add_baselines(run, batch, prompts, log)
    if run.config.actor_rollout_ref.rollout.free_cache_engine:
        run.roles.rollout.sleep()
    batch = learn(run, batch, rewards, log)
    with log.time("update_weights"):
        run.roles.sync_weights(version=run.step + 1)
    log.add(run.roles.sync_metrics)
    return batch


def learn(run: Run, batch: SampleBatch, rewards: stages.Rewards | None, log: StepLog) -> SampleBatch:
    """From samples to updates: log-probs, rewards where they are still to come, advantages, critic, actor."""
    # Rewards that are still to come are computed in other processes meanwhile.
    batch = stages.add_log_probs(run, batch, log)
    if rewards is not None:
        with log.time("reward"):
            batch = stages.collect_rewards(run, batch, rewards, log)
    with log.time("adv"):
        batch = stages.add_advantages(run, batch, log)
    trained = draw_by_reward(run, batch)
    update_models(run, trained, log)
    return batch


def update_models(run: Run, batch: SampleBatch, log: StepLog) -> None:
    """Updates of critic and actor; where the critic has devices of its own both go on at once."""
    trains_actor = run.step >= run.config.trainer.critic_warmup
    if run.roles.critic_apart and trains_actor:
        with ThreadPoolExecutor(max_workers=1) as beside:
            critic = beside.submit(stages.update_critic, run, batch, log)
            stages.update_actor(run, batch, log)
        critic.result()
        return
    stages.update_critic(run, batch, log)
    if trains_actor:
        stages.update_actor(run, batch, log)


def measure(run: Run, batch: SampleBatch, log: StepLog) -> None:
    """What is logged of the batch that a step has trained on."""
    stages.warn_of_mismatch(run, log)
    log.add(batch_metrics(batch, run.config.data.max_prompt_length, run.config.data.max_response_length))
    log.add(performance_metrics(batch, log, all_devices(run.config)))


def record(run: Run, log: StepLog, saves: bool) -> None:
    """The end of a step: its checkpoint, if it saves one, and its metrics."""
    if saves:
        with log.time("save_checkpoint"):
            checkpoints.save(run, log.metrics)
    run.tracker.log(log.metrics, step=run.step)
    checkpoints.settle(run)


def due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
