"""`BatchPlan`: every batch size and count of a run, computed and shown before anything is loaded.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts; micro-batch sizes count samples on one device. A prompt
gives `rollout.n` samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from verl.config.derived import critic_devices, needs_critic
from verl.config.schema import ActorConfig, CriticConfig, OptimConfig, PPOConfig
from verl.errors import ConfigError

_BATCH = "data.train_batch_size"
_N = "actor_rollout_ref.rollout.n"


@dataclass(frozen=True)
class UpdatePlan:
    """How one model, actor or critic, goes through the samples of a step.

    mini_batches: in one pass over the step. mini_batch_prompts, mini_batch_samples: of one optimizer update, on all
    devices; samples_per_rank: on one, or on `sequence_ranks` devices that share the tokens of each sample, which then hold a
    micro-batch together. micro_batch_samples: samples of one forward and backward on one device, or None
    where micro-batches are packed up to micro_batch_tokens tokens. micro_batches: of one update on one device, None
    where packed. passes: over a step's samples. updates_per_step: optimizer updates. total_updates, warmup_updates: of
    the run; the schedule of the learning rate is made from them.
    """

    mini_batches: int
    mini_batch_prompts: int
    mini_batch_samples: int
    samples_per_rank: int
    micro_batch_samples: int | None
    micro_batch_tokens: int
    micro_batches: int | None
    passes: int
    updates_per_step: int
    total_updates: int = 0
    warmup_updates: int = 0
    sequence_ranks: int = 1


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes and counts of a run.

    num_prompts: training prompts after filtering. unused_prompts: left over in each epoch (the last, partial batch).
    steps_per_epoch, total_steps, epochs: trainer steps, and the epochs that they begin. critic: None without a critic.
    notices: what the user should know.
    """

    num_prompts: int
    world_size: int
    prompts_per_step: int
    samples_per_prompt: int
    samples_per_step: int
    samples_per_rank: int
    steps_per_epoch: int
    unused_prompts: int
    total_steps: int
    epochs: int
    actor: UpdatePlan
    critic: UpdatePlan | None
    notices: tuple[str, ...] = ()

    @classmethod
    def make(
        cls, config: PPOConfig, num_prompts: int, world_size: int = 1, *, with_critic: bool | None = None
    ) -> BatchPlan:
        """The plan of `config` for `num_prompts` training prompts on `world_size` training devices.

        with_critic: whether there is a value model; None goes by the built-in estimators' names.

        Raises:
            ConfigError: with the numbers and the nearest sizes that fit.
        """
        prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
        if num_prompts < prompts:
            raise ConfigError(
                f"{_BATCH}={prompts} is more than the {num_prompts} training prompts, so not one step can be made. "
                f"Set {_BATCH} to at most {num_prompts}, or give more prompts (data.train_files)."
            )
        steps_per_epoch = num_prompts // prompts
        total_steps, notices = _total_steps(config, steps_per_epoch)
        longest = config.data.max_prompt_length + config.data.max_response_length
        actor_config = config.actor_rollout_ref.actor
        actor = _update_plan(actor_config, "actor_rollout_ref.actor", prompts, n, world_size)
        actor = _with_schedule(actor, actor_config.optim, total_steps - config.trainer.critic_warmup)
        notices += _packing_notices("actor_rollout_ref.actor", actor, longest)
        critic = None
        if needs_critic(config) if with_critic is None else with_critic:
            critic = _update_plan(config.critic, "critic", prompts, n, critic_devices(config) or world_size)
            critic = _with_schedule(critic, config.critic.optim, total_steps)
            notices += _packing_notices("critic", critic, longest)
        unused = num_prompts - steps_per_epoch * prompts
        gen = config.data.gen_batch_size or prompts
        if config.algorithm.filter_groups.enable:
            notices.append(
                f"dynamic sampling: a step draws {gen} prompts at a time until {prompts} have samples that differ, so the data "
                "may be gone through more often than the epochs say."
            )
        if unused:
            notices.append(
                f"{unused} of the {num_prompts} prompts do not fill a batch and are left over in each epoch."
            )
        return cls(
            num_prompts=num_prompts,
            world_size=world_size,
            prompts_per_step=prompts,
            samples_per_prompt=n,
            samples_per_step=prompts * n,
            samples_per_rank=prompts * n // world_size,
            steps_per_epoch=steps_per_epoch,
            unused_prompts=unused,
            total_steps=total_steps,
            epochs=math.ceil(total_steps / steps_per_epoch),
            actor=actor,
            critic=critic,
            notices=tuple(notices),
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, number, how it comes about), for display."""
        n, devices = self.samples_per_prompt, _count(self.world_size, "device")
        rows = [
            ("training prompts", f"{self.num_prompts:,}", f"{self.unused_prompts} left over in each epoch"),
            ("prompts a step", f"{self.prompts_per_step:,}", _BATCH),
            ("samples a step", f"{self.samples_per_step:,}", f"{self.prompts_per_step} prompts x {n} ({_N})"),
            ("samples a device", f"{self.samples_per_rank:,}", devices),
        ]
        for name, plan in (("actor", self.actor), ("critic", self.critic)):
            rows += _update_rows(name, plan) if plan else []
        rows += [
            ("steps an epoch", f"{self.steps_per_epoch:,}", f"{self.num_prompts} // {self.prompts_per_step}"),
            ("steps in all", f"{self.total_steps:,}", f"within {_count(self.epochs, 'epoch')}"),
        ]
        return rows

    def table(self) -> str:
        """The plan as aligned text."""
        rows = self.rows()
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)

    def __rich__(self) -> Any:
        """The plan as a table of rich."""
        from rich.table import Table

        table = Table(title="Batch plan", show_header=False)
        for justify, style in (("left", "bold"), ("right", "cyan"), ("left", "dim")):
            table.add_column(justify=justify, style=style)  # type: ignore[arg-type]
        for row in self.rows():
            table.add_row(*row)
        return table


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _total_steps(config: PPOConfig, steps_per_epoch: int) -> tuple[int, list[str]]:
    by_epochs = config.trainer.total_epochs * steps_per_epoch
    total = config.trainer.total_training_steps
    warmup = config.trainer.critic_warmup
    notices = []
    if total is None:
        total = by_epochs
    elif total > by_epochs:
        notices.append(
            f"trainer.total_training_steps={total} decides: the run goes on past trainer.total_epochs="
            f"{config.trainer.total_epochs} ({_count(by_epochs, 'step')})."
        )
    if warmup >= total:
        notices.append(f"trainer.critic_warmup={warmup}: the actor is not trained in any of the {total} steps.")
    return total, notices


def _update_plan(config: ActorConfig | CriticConfig, section: str, prompts: int, n: int, world_size: int) -> UpdatePlan:
    mini = config.ppo_mini_batch_size
    _check_mini_batch(section, mini, prompts)
    samples = mini * n
    together = config.fsdp_config.ulysses_sequence_parallel_size
    shares = max(world_size // together, 1)
    if samples % shares:
        step = shares // math.gcd(n, shares)
        below, above = mini // step * step, (mini // step + 1) * step
        fits = " or ".join(str(size) for size in (below, above) if size > 0)
        raise ConfigError(
            f"{section}.ppo_mini_batch_size={mini} prompts x {_N}={n} is {samples} samples, which cannot be divided "
            f"evenly over {_places(shares, together)}. Set ppo_mini_batch_size to {fits} (and {_BATCH} to a multiple of it)."
        )
    per_rank = samples // shares
    fixed = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
    fixed = None if fixed is None else min(fixed, per_rank)
    return UpdatePlan(
        mini_batches=prompts // mini,
        mini_batch_prompts=mini,
        mini_batch_samples=samples,
        samples_per_rank=per_rank,
        micro_batch_samples=fixed,
        micro_batch_tokens=config.ppo_max_token_len_per_gpu * together,
        micro_batches=None if fixed is None else math.ceil(per_rank / fixed),
        passes=config.ppo_epochs,
        updates_per_step=prompts // mini * config.ppo_epochs,
        sequence_ranks=together,
    )


def _places(shares: int, together: int) -> str:
    if together == 1:
        return f"{shares} devices"
    return f"{_count(shares, 'group')} of {together} devices (fsdp_config.ulysses_sequence_parallel_size)"


def _check_mini_batch(section: str, mini: int, prompts: int) -> None:
    if prompts % mini == 0:
        return
    key = f"{section}.ppo_mini_batch_size"
    divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
    sizes = [max(d for d in divisors if d < mini), *[d for d in divisors if d > mini][:1]]
    batches = [size for size in (prompts // mini * mini, (prompts // mini + 1) * mini) if size > 0]
    problem = (
        f"is more than {_BATCH}={prompts}"
        if mini > prompts
        else f"does not divide {_BATCH}={prompts}: {prompts // mini} mini-batches leave {prompts % mini} prompts over"
    )
    raise ConfigError(
        f"{key}={mini} {problem} (both count prompts). Set {key} to {' or '.join(map(str, sizes))}, or {_BATCH} to "
        f"{' or '.join(map(str, batches))}."
    )


def _with_schedule(plan: UpdatePlan, optim: OptimConfig, steps: int) -> UpdatePlan:
    total = max(steps, 0) * plan.updates_per_step
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total)
    return replace(plan, total_updates=total, warmup_updates=warmup)


def _packing_notices(section: str, plan: UpdatePlan, longest: int) -> list[str]:
    notices = []
    if plan.micro_batch_samples is None and longest > plan.micro_batch_tokens:
        notices.append(
            f"{section}.ppo_max_token_len_per_gpu={plan.micro_batch_tokens // plan.sequence_ranks}"
            f"{'' if plan.sequence_ranks == 1 else f' x {plan.sequence_ranks} devices'} is less than the longest sample "
            f"(data.max_prompt_length + data.max_response_length = {longest} tokens): such a sample goes alone and takes "
            "more memory than the budget says."
        )
    if plan.total_updates and plan.warmup_updates > plan.total_updates:
        notices.append(
            f"{section}.optim: the warm-up of {plan.warmup_updates} updates is longer than the run, which has "
            f"{plan.total_updates}."
        )
    return notices


def _update_rows(name: str, plan: UpdatePlan) -> list[tuple[str, str, str]]:
    if plan.micro_batch_samples is None:
        micro = ("packed", f"up to {plan.micro_batch_tokens:,} tokens each")
    else:
        micro = (f"{plan.micro_batches:,}", f"{_count(plan.micro_batch_samples, 'sample')} each")
    together = plan.sequence_ranks
    where = "a device" if together == 1 else f"{together} devices that share its tokens"
    return [
        (
            f"{name}: updates a step",
            f"{plan.updates_per_step:,}",
            f"{_count(plan.mini_batches, 'mini-batch', 'mini-batches')} x {_count(plan.passes, 'pass', 'passes')}",
        ),
        (f"{name}: samples an update", f"{plan.mini_batch_samples:,}", f"{plan.mini_batch_prompts} prompts"),
        (f"{name}: micro-batches", micro[0], f"{micro[1]}, an update on {where}"),
        (f"{name}: updates in all", f"{plan.total_updates:,}", f"warm-up {plan.warmup_updates}"),
    ]
