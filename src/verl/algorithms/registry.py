"""Advantage estimators and policy losses by name, each with its paper, what it needs and which options it reads.

A user's own file registers with the same decorators, and is then chosen by name like any other:

    from verl.algorithms.registry import Needs, register_advantage

    @register_advantage("best_of_group", needs=Needs(min_group_size=2))
    def best_of_group(inputs, options):
        ...
        return advantages, returns
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from verl.algorithms.inputs import (
    AdvantageInputs,
    AdvantageOptions,
    LossOutput,
    MeanMetric,
    PolicyLossInputs,
    PolicyLossOptions,
    mean_over,
)
from verl.algorithms.segments import check_lengths

PLUGIN_PREFIX = "verl_plugin_"
"""Modules of users' files that register are imported under names that begin so."""


@dataclass(frozen=True)
class Needs:
    """What has to be there before an algorithm can run; the config is checked against it before launch.

    min_group_size: samples a prompt below which it teaches nothing. loss_agg_mode: the aggregation that its paper
    defines it with, if it is defined with one only. The others name a model, a rollout or a column.
    """

    critic: bool = False
    reference: bool = False
    baseline_rollout: bool = False
    old_log_probs: bool = False
    rollout_log_probs: bool = False
    sum_pi_squared: bool = False
    reward_components: bool = False
    min_group_size: int = 1
    loss_agg_mode: str | None = None


@dataclass(frozen=True)
class Paper:
    """authors: the first author's family name, with "et al." if there are more. arxiv: its id, such as 1707.06347."""

    authors: str
    year: int
    title: str
    arxiv: str


# Input columns that a need is met by, with where they come from, for the error.
_COLUMNS = {
    "critic": ("values", "the critic's values [N]"),
    "reference": ("ref_log_probs", "the frozen reference's log-probs [N]"),
    "baseline_rollout": ("baseline_scores", "the greedy responses' scores [B]"),
    "old_log_probs": ("old_log_probs", "the trainer's log-probs before the update [N]"),
    "rollout_log_probs": ("rollout_log_probs", "the rollout engine's log-probs [N]"),
    "sum_pi_squared": ("sum_pi_squared", "sums over the vocabulary of squared probabilities [N]"),
    "reward_components": ("reward_components", "a reward function that returns a dict of several rewards"),
}


@dataclass(frozen=True)
class Algorithm:
    """A registered function.

    papers: what defines it. settings: overrides that reproduce the paper. reads: names of the shared options (gamma,
    clip_low, ...) that it reads; setting another has no effect. extra: its own options with their defaults.
    """

    name: str
    function: Callable
    needs: Needs = Needs()
    papers: tuple[Paper, ...] = ()
    settings: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
        return (self.function.__doc__ or "").strip().split("\n")[0]

    def resolve_extra(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its own options with the defaults filled in; ValueError for one that it does not have."""
        for key in given:
            if key not in self.extra:
                raise ValueError(unknown_name(f"option of '{self.name}'", key, list(self.extra)))
        return {**self.extra, **given}

    def _check_needs(self, inputs: Any) -> None:
        for need, (column, source) in _COLUMNS.items():
            if getattr(self.needs, need) and getattr(inputs, column, None) is None:
                raise ValueError(f"'{self.name}' needs {column}: {source}")


@dataclass(frozen=True)
class AdvantageEstimator(Algorithm):
    """Callable: (AdvantageInputs, AdvantageOptions) -> (advantages [N], returns [N]), both 0 at masked tokens."""

    @torch.no_grad()
    def __call__(self, inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
        self._check_needs(inputs)
        for name in ("token_rewards", "mask", "values", "old_log_probs"):
            column = getattr(inputs, name)
            if column is not None:
                check_lengths(column, inputs.lengths, name)
        results = self.function(inputs, replace(options, extra=self.resolve_extra(options.extra)))
        dtype = inputs.token_rewards.dtype
        advantages, returns = (r.to(dtype).masked_fill(~inputs.mask, 0) for r in results)
        return advantages, returns


@dataclass(frozen=True)
class PolicyLoss(Algorithm):
    """Callable: (PolicyLossInputs, PolicyLossOptions) -> LossOutput.

    Whatever the function does, masked tokens get loss 0, rollout_is_weights multiply the token losses, and `ppo_kl`
    (mean of old minus new log-prob) is among the metrics.

    prepare: picks tokens over a whole mini-batch, (PolicyLossInputs, PolicyLossOptions) -> bool [N]. Where it is set,
    call `select` once a mini-batch, over the samples of all ranks, and pass each micro-batch its part as `selection`;
    without that, it picks within the micro-batch, and the loss depends on the split.
    """

    prepare: Callable | None = None

    def select(self, inputs: PolicyLossInputs, options: PolicyLossOptions) -> Tensor | None:
        """What `prepare` picks over these samples: bool [N], or None for a loss that picks nothing.

        Reads old_log_probs, advantages and mask, so the mini-batch needs no forward pass before it.
        """
        if self.prepare is None:
            return None
        with torch.no_grad():
            return self.prepare(inputs, replace(options, extra=self.resolve_extra(options.extra)))

    def __call__(self, inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossOutput:
        self._check_needs(inputs)
        for name in ("log_probs", "old_log_probs", "advantages", "mask", "weights"):
            check_lengths(getattr(inputs, name), inputs.lengths, name)
        if inputs.selection is None:
            inputs = replace(inputs, selection=self.select(inputs, options))
        token_loss, metrics = self.function(inputs, replace(options, extra=self.resolve_extra(options.extra)))
        if inputs.rollout_is_weights is not None:
            token_loss = token_loss * inputs.rollout_is_weights.detach()
        token_loss = token_loss.masked_fill(~inputs.mask, 0)
        drift = mean_over(inputs.old_log_probs - inputs.log_probs, inputs.mask)
        metrics = {"ppo_kl": drift, **{name: MeanMetric(*pair) for name, pair in metrics.items()}}
        return LossOutput(token_loss, (inputs.weights * token_loss).sum(), metrics)


Entry = TypeVar("Entry", bound=Algorithm)


def unknown_name(what: str, name: str, allowed: list[str]) -> str:
    """Message for a name that is not one of `allowed`: the nearest one first, then all."""
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"unknown {what}: '{name}'. {hint}Allowed: {', '.join(sorted(allowed)) or 'none'}"


class Registry(Generic[Entry]):
    """Algorithms of one kind by name. The built-in ones are imported when the registry is first used."""

    def __init__(self, what: str, entry_type: type[Entry], builtin: str):
        self.what, self._type, self._builtin = what, entry_type, builtin
        self._entries: dict[str, Entry] = {}
        self._loaded = False

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            importlib.import_module(self._builtin)

    def register(self, name: str, **fields: Any) -> Callable[[Callable], Callable]:
        """Decorator that adds a function under `name`; ValueError if another function has the name.

        fields: those of the entry's dataclass (needs, papers, settings, reads, extra, and prepare for a loss).
        """
        self._load()
        fields = {**fields, "reads": frozenset(fields.get("reads", ())), "extra": dict(fields.get("extra") or {})}

        def add(function: Callable) -> Callable:
            taken = self._entries.get(name)
            # The same function again is a module that was imported twice, which a notebook does.
            if taken and _origin(taken.function) != _origin(function):
                raise ValueError(
                    f"{self.what} '{name}' is taken by {'.'.join(_origin(taken.function))}: choose another"
                )
            self._entries[name] = self._type(name=name, function=function, **fields)
            return function

        return add

    def get(self, name: str) -> Entry:
        """The entry called `name`; ValueError that names the nearest and all others if there is none."""
        self._load()
        if name not in self._entries:
            raise ValueError(unknown_name(self.what, str(name), list(self._entries)))
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._entries)


def _origin(function: Callable) -> tuple[str, str]:
    return function.__module__, function.__qualname__


ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", AdvantageEstimator, "verl.algorithms.advantages"
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", PolicyLoss, "verl.algorithms.policy_losses")

register_advantage = ADVANTAGES.register
register_policy_loss = POLICY_LOSSES.register
get_advantage = ADVANTAGES.get
get_policy_loss = POLICY_LOSSES.get
list_advantages = ADVANTAGES.names
list_policy_losses = POLICY_LOSSES.names
