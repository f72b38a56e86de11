"""The page docs/algorithms.md, made from the registries: each estimator and loss with its paper and its settings.

`python -m verl.trainer.algorithm_index` lists the names; with `--markdown` it prints the page.
"""

from __future__ import annotations

import inspect
import sys

from verl.algorithms.registry import (
    AdvantageEstimator,
    Algorithm,
    Needs,
    Paper,
    get_advantage,
    get_policy_loss,
    list_advantages,
    list_policy_losses,
)
from verl.config.help import default_text
from verl.config.keys import options

ACTOR = "actor_rollout_ref.actor"

# The shared options of the registries, by the keys that set them; None where the value is fixed.
OPTION_KEYS: dict[str, str | None] = {
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "epsilon": None,
    "clip_low": f"{ACTOR}.clip_ratio_low",
    "clip_high": f"{ACTOR}.clip_ratio_high",
    "clip_c": f"{ACTOR}.clip_ratio_c",
}

# Where options go that have no key of their own.
OWN_OPTIONS = {"algorithm.adv_estimator": "adv_options", f"{ACTOR}.policy_loss.loss_mode": "options"}

NEED_WORDS = {
    "critic": "a value model (`critic.*`)",
    "reference": "a reference policy (a KL term switches it on)",
    "baseline_rollout": "a greedy response to each prompt, which the trainer generates and scores",
    "old_log_probs": "the log-probs before the update",
    "rollout_log_probs": "the rollout engine's log-probs, which every engine returns",
    "sum_pi_squared": "the policy's probabilities of all tokens, squared and summed, from the forward before the update",
    "reward_components": "a reward function that returns a dict of several rewards",
}

_INTRODUCTION = """# Algorithms

<!-- Made by `python -m verl.trainer.algorithm_index --markdown > docs/algorithms.md`; a test holds it to the registries. -->

An algorithm is an advantage estimator and a policy loss, chosen by name and free to combine:

```
algorithm.adv_estimator=rloo actor_rollout_ref.actor.policy_loss.loss_mode=cispo
```

Each entry below has the formula, a worked example, the paper, and the settings that the paper used where this trainer has
a key for them. A setting that is not shown keeps its default ([options](config.md)). Your own algorithm goes in by the
same door: [your own](your_own.md).

Letters: r is a sample's reward or a token's probability ratio, as the entry says; A the advantage; pi, pi_old and mu the
probabilities of the policy that learns, of the policy before the step's updates, and of the rollout engine; sg(x) is x
without its gradient. A group is the samples of one prompt.
"""

_AROUND = """## Around them

How token losses become one number (`actor_rollout_ref.actor.loss_agg_mode`), with T policy tokens and S samples in the
mini-batch, and l policy tokens in the sample:

| mode | weight of a token | paper |
|---|---|---|
| `token-mean` | 1 / T | DAPO, [2503.14476](https://arxiv.org/abs/2503.14476) |
| `seq-mean-token-sum` | 1 / S | |
| `seq-mean-token-mean` | 1 / (S l) | GRPO, [2402.03300](https://arxiv.org/abs/2402.03300) |
| `seq-mean-token-sum-norm` | 1 / (S `loss_scale_factor`) | Dr. GRPO, [2503.20783](https://arxiv.org/abs/2503.20783) |

The weights are computed once for a mini-batch, so the loss is the same for every split into micro-batches.

KL divergence to the reference policy, with d = log pi - log pi_ref, as a term of the loss (`use_kl_loss`, `kl_loss_type`)
or as a penalty in the reward (`algorithm.kl_ctrl.kl_coef`, `algorithm.kl_penalty`;
[2203.02155](https://arxiv.org/abs/2203.02155)). The four estimators are Schulman's
([note of 2020](http://joschu.net/blog/kl-approx.html)):

| name | value at a token |
|---|---|
| `kl`, `k1` | d |
| `abs` | \\|d\\| |
| `mse`, `k2` | d^2 / 2 |
| `low_var_kl`, `k3` | exp(-d) - 1 + d, at most 10 |

`algorithm.kl_ctrl.type=adaptive` moves the penalty's coefficient to hold a target
([1909.08593](https://arxiv.org/abs/1909.08593)). The critic's loss is PPO's clipped squared error (`critic.cliprange_value`).
A `+` after the name (`k1+`, `k3+`) keeps the value and takes k2's gradient, the one that is the KL's own in expectation
([2506.09477](https://arxiv.org/abs/2506.09477)).

## The gap between rollout and trainer

mu is the rollout engine's probability of a token, pi_old the trainer's. Keys under `algorithm.rollout_correction`:

| settings | what happens | paper |
|---|---|---|
| `rollout_is=token rollout_is_threshold=2.0` | token losses times min(pi_old / mu, 2): truncated importance sampling; `sequence`: the sample's ratio | |
| `rollout_is=token rollout_is_threshold=0.5_5.0` | IcePop: times pi_old / mu within the bounds, 0 outside | [2510.18855](https://arxiv.org/abs/2510.18855) |
| `rollout_rs=token_k1 rollout_rs_threshold=0.5_2.0` | tokens whose ratio is outside the bounds are left out | |
| `rollout_rs=seq_mean_k1 rollout_rs_threshold=0.99_1.01` | samples whose ratio's geometric mean is outside the bounds are left out | |
| `rollout_rs=seq_max_k2 rollout_rs_threshold=1.0` | samples with a token whose k2 is larger are left out | |
| `bypass_mode=True` | mu takes pi_old's place in the policy loss | |

A statistic is `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` and `k1`, `k2` or `k3` of log mu - log pi_old; several go
with commas between. Advantages are computed over all samples before any are left out.

## DAPO

[2503.14476](https://arxiv.org/abs/2503.14476): wider clip above, token-mean, no punishment for what was cut off out of hand,
and no step spent on prompts that are always or never solved:

```
actor_rollout_ref.actor.clip_ratio_low=0.2
actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.loss_agg_mode=token-mean
algorithm.filter_groups.enable=True
algorithm.filter_groups.metric=acc
algorithm.filter_groups.max_num_gen_batches=10
data.gen_batch_size=1536
reward.reward_manager.name=dapo
reward.reward_kwargs.overlong_buffer_cfg.enable=True
reward.reward_kwargs.overlong_buffer_cfg.len=4096
reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
```

Prompts are drawn `data.gen_batch_size` at a time until `data.train_batch_size` have samples that differ in the metric. What
is over waits for the next step (also in checkpoints), where its ratio is taken to the policy that sampled it. A step that cannot
be filled ends the run with a checkpoint and a message.

## Policy filtration

[2409.06957](https://arxiv.org/abs/2409.06957): `algorithm.use_pf_ppo=True` draws the samples of a step's updates anew, with
replacement, by `algorithm.pf_ppo.reweight_method`: `pow` (|score| to the power `weight_pow`), `max_min` (the best and worst of
a prompt) or `max_random` (the best, and others seldom).
"""


def markdown() -> str:
    """The page docs/algorithms.md."""
    parts = [_INTRODUCTION, _table(), "## Advantage estimators\n"]
    parts += [_entry(get_advantage(name), "algorithm.adv_estimator") for name in builtin_advantages()]
    parts += ["## Policy losses\n"]
    parts += [_entry(get_policy_loss(name), f"{ACTOR}.policy_loss.loss_mode") for name in builtin_policy_losses()]
    return "\n".join([*parts, _AROUND])


def builtin_advantages() -> list[str]:
    """Names of the estimators that come with the package."""
    return [name for name in list_advantages() if _is_builtin(get_advantage(name))]


def builtin_policy_losses() -> list[str]:
    """Names of the policy losses that come with the package."""
    return [name for name in list_policy_losses() if _is_builtin(get_policy_loss(name))]


def _is_builtin(entry: Algorithm) -> bool:
    return entry.function.__module__.startswith("verl.algorithms.")


def _table() -> str:
    rows = ["| name | kind | paper |", "|---|---|---|"]
    for kind, get, names in (
        ("advantage", get_advantage, builtin_advantages()),
        ("policy loss", get_policy_loss, builtin_policy_losses()),
    ):
        rows += [
            f"| [`{name}`](#{_anchor(get(name))}) | {kind} | {', '.join(map(_short, get(name).papers))} |"
            for name in names
        ]
    return "\n".join(rows) + "\n"


def _title(entry: Algorithm) -> str:
    return f"{entry.name} ({'advantage' if isinstance(entry, AdvantageEstimator) else 'policy loss'})"


def _anchor(entry: Algorithm) -> str:
    """The heading's anchor, as GitHub makes it."""
    return _title(entry).replace(" ", "-").replace("(", "").replace(")", "")


def _short(paper: Paper) -> str:
    return f"[{paper.authors} {paper.year}](https://arxiv.org/abs/{paper.arxiv})"


def _entry(entry: Algorithm, key: str) -> str:
    lines = [f"### {_title(entry)}", "", inspect.cleandoc(entry.function.__doc__ or ""), ""]
    lines += [
        f"- Paper: {p.authors} {p.year}, *{p.title}*, [{p.arxiv}](https://arxiv.org/abs/{p.arxiv})"
        for p in entry.papers
    ]
    lines += [f"- Needs: {words}" for words in _needs(entry.needs)]
    if entry.reads:
        lines.append(f"- Reads: {', '.join(_option(name) for name in sorted(entry.reads))}")
    settings, own = _split(entry, key)
    lines += own
    return "\n".join([*lines, "", "```", *settings, "```", ""])


def _needs(needs: Needs) -> list[str]:
    words = [text for name, text in NEED_WORDS.items() if getattr(needs, name)]
    if needs.min_group_size > 1:
        words.append(f"`actor_rollout_ref.rollout.n` of {needs.min_group_size} or more")
    if needs.loss_agg_mode is not None:
        words.append(f"`{ACTOR}.loss_agg_mode={needs.loss_agg_mode}`, with which its paper defines it")
    return ["; ".join(words)] if words else []


def _option(name: str) -> str:
    key = OPTION_KEYS[name]
    return f"`{name}`" if key is None else f"`{name}` (`{key}`)"


def _split(entry: Algorithm, key: str) -> tuple[list[str], list[str]]:
    """Settings that the command line takes; and lines on the entry's own options, with what its paper used."""
    known = options()
    settings = [setting for setting in entry.settings if setting.partition("=")[0] in known]
    paper = {name.rpartition(".")[2]: value for name, _, value in (s.partition("=") for s in entry.settings)}
    lines = []
    for name, value in entry.extra.items():
        used = f", the paper's {paper[name]}" if name in paper and paper[name] != default_text(value) else ""
        own_key = f"{key.rpartition('.')[0]}.{name}"
        how = f"`{own_key}`" if own_key in known else f"`{key.rpartition('.')[0]}.{OWN_OPTIONS[key]}.{name}`"
        lines.append(f"- Own option: `{name}`, {default_text(value)} by default{used} ({how})")
    return settings, lines


def main(arguments: list[str]) -> int:
    if arguments == ["--markdown"]:
        sys.stdout.write(markdown())
        return 0
    for kind, get, names in (
        ("algorithm.adv_estimator", get_advantage, builtin_advantages()),
        (f"{ACTOR}.policy_loss.loss_mode", get_policy_loss, builtin_policy_losses()),
    ):
        print(f"{kind}:")
        for name in names:
            print(f"  {name:<30} {get(name).summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
