"""Generation and training side by side: samples go through a queue, whose bound of staleness says who waits for whom."""

from __future__ import annotations

import contextlib

from verl.core.transfer_queue.api import QueueClosed, QueueEnded
from verl.data.batch import SampleBatch
from verl.trainer import checkpoints
from verl.trainer.arrivals import staleness_metrics, unpack
from verl.trainer.generator import Generator
from verl.trainer.interrupt import Interrupt
from verl.trainer.metrics import idle_metrics, queue_metrics
from verl.trainer.pace import Pace, make_generator
from verl.trainer.pipelines.sync import due, learn, measure, record
from verl.trainer.run import Run
from verl.trainer.steplog import StepLog, merged
from verl.trainer.validation import validate_first, validate_step
from verl.trainer.watchdog import Watchdog

LOOK_SECONDS = 0.5  # between looks at Ctrl-C and at lost rewards


def train(run: Run) -> str:
    """Train until the plan's last step, or until Ctrl-C. Returns "finished" or "interrupted"."""
    knobs, plan = run.config.async_training, run.plan
    mini = plan.actor.mini_batch_prompts
    part = plan.prompts_per_step if knobs.require_batches is None else knobs.require_batches * mini
    ahead, every = knobs.staleness_threshold, knobs.trigger_parameter_sync_step
    return overlap(run, Pace(ahead, ahead == 0, every, knobs.partial_rollout, part))


def overlap(run: Run, pace: Pace) -> str:
    """Generate in one thread and train in this one, at this pace."""
    run.roles.sync_weights(version=run.step)
    generator = make_generator(run, pace)
    watchdog = Watchdog(generator.queue, generator, run.config.async_training.watchdog_seconds, run.tracker.notice)
    try:
        with Interrupt() as interrupt:
            with generator.on_engine():
                validated = validate_first(run, interrupt)
            if not validated:
                return "interrupted"
            if run.config.trainer.val_only:
                return "finished"
            run.ahead = generator
            with generator, watchdog:
                return steps(run, pace, generator, interrupt)
    except QueueClosed as closed:
        raise closed.error or closed from None


def steps(run: Run, pace: Pace, generator: Generator, interrupt: Interrupt) -> str:
    log = StepLog(run.spans)
    while run.step < run.plan.total_steps:
        done, log = log.metrics, StepLog(run.spans)
        with log.time("step"), idle_metrics(log, generator.busy):
            batch = train_step(run, pace, generator, interrupt, log)
            if batch is None:
                generator.pause()
                checkpoints.save_if_new(run, done)
                return "interrupted" if interrupt.requested else "finished"
            run.step += 1
            last, stop = run.step == run.plan.total_steps, interrupt.requested
            tests, saves = due(run.step, run.config.trainer.test_freq), due(run.step, run.config.trainer.save_freq)
            syncs = last or stop or tests or run.step % pace.sync_every == 0
            if syncs or saves:
                with log.time("pause"):
                    generator.pause()
            log.add(queue_metrics(generator.queue))
            if syncs:
                with log.time("update_weights"):
                    run.roles.sync_weights(version=run.step)
                generator.queue.advance(run.step // pace.sync_every)
                log.add(run.roles.sync_metrics)
        measure(run, batch, log)
        epoch = (run.step - 1) // run.sampler.batches_per_epoch
        log.add({"training/global_step": run.step, "training/epoch": epoch})
        with generator.on_engine():
            validated = not (last or tests) or validate_step(run, interrupt, log)
        stop = stop or not validated
        record(run, log, saves=last or stop or saves)
        if stop and not (last and validated):
            return "interrupted"
        generator.resume()
    return "finished"


def train_step(run: Run, pace: Pace, generator: Generator, interrupt: Interrupt, log: StepLog) -> SampleBatch | None:
    """Train on the next `data.train_batch_size` prompts, `pace.part` at a time.

    Fewer, if there are no more; None, if there are none, or if Ctrl-C came before the first.
    """
    parts, logs, left = [], [], run.plan.prompts_per_step
    while left > 0:
        with log.time("wait"):
            taken = wait_for(run, generator, min(left, pace.part), interrupt if not parts else None)
        if taken is None:
            break
        batch, rewards = unpack(run, taken)
        logs.append(StepLog(run.spans))
        logs[-1].add(staleness_metrics(batch["policy_versions"], run.step))
        parts.append(learn(run, batch, rewards, logs[-1]))
        generator.queue.release(dict.fromkeys(batch["uid"]))
        left -= pace.part
    log.add(merged(logs))
    return SampleBatch.cat(parts) if parts else None


def wait_for(run: Run, generator: Generator, groups: int, interrupt: Interrupt | None) -> SampleBatch | None:
    """The next groups; None after Ctrl-C, or if there are no more."""
    with contextlib.suppress(QueueEnded):
        while interrupt is None or not interrupt.requested:
            taken = generator.queue.take("trainer", groups, timeout=LOOK_SECONDS)
            if taken is not None:
                return taken
            run.rewards.look_after()
    return None
