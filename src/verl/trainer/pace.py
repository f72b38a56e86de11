"""How far generation runs ahead of training, and the generator and queue that keep to it."""

from __future__ import annotations

from dataclasses import dataclass

from verl.core.transfer_queue.local import LocalTransferQueue
from verl.trainer.arrivals import SCORED
from verl.trainer.generator import Generator
from verl.trainer.run import Run


@dataclass(frozen=True)
class Pace:
    """staleness: batches ahead. in_order: batches come in the order of the data. sync_every: steps between updates of the
    rollout engine's weights. partial: those stop what is in generation. part: prompts that are trained on together."""

    staleness: float
    in_order: bool
    sync_every: int
    partial: bool
    part: int


def make_generator(run: Run, pace: Pace) -> Generator:
    """With a queue that keeps the pace, and with what the checkpoint had generated ahead."""
    version, groups = run.step // pace.sync_every, run.plan.prompts_per_step * pace.sync_every
    queue = LocalTransferQueue(
        staleness=pace.staleness,
        groups_per_version=groups,
        in_order=pace.in_order,
        version=version,
    )
    queue.register("trainer", SCORED)
    samples = int((1 + pace.staleness) * groups) * run.plan.samples_per_prompt
    prompts = (run.plan.total_steps - run.step) * run.plan.prompts_per_step
    generator = Generator(run, queue, prompts=prompts, samples=samples, partial=pace.partial)
    if run.left_ahead is not None:
        trained_since = run.step * run.plan.prompts_per_step - version * groups
        generator.load_state_dict(run.left_ahead, version, trained_since)
    return generator
