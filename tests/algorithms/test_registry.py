from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys

import pytest
import torch

import verl.algorithms
from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions
from verl.algorithms.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageEstimator,
    Needs,
    Registry,
    get_advantage,
    get_policy_loss,
    list_advantages,
    list_policy_losses,
    register_advantage,
)

MODULES = [m.name for m in pkgutil.walk_packages(verl.algorithms.__path__, "verl.algorithms.")]


def test_names():
    assert set(list_advantages()) >= {
        *("grpo", "gae", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg"),
        *("grpo_passk", "gdpo", "optimal_token_baseline"),
    }
    assert set(list_policy_losses()) >= {
        *("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo", "dro"),
    }


def test_needs():
    assert get_advantage("gae").needs == Needs(critic=True)
    assert get_advantage("remax").needs == Needs(baseline_rollout=True)
    assert get_advantage("grpo").needs == Needs(min_group_size=2)
    assert get_policy_loss("gspo").needs.loss_agg_mode == "seq-mean-token-mean"
    assert get_policy_loss("dppo").needs.rollout_log_probs


@pytest.mark.parametrize("entry", [*map(get_advantage, list_advantages()), *map(get_policy_loss, list_policy_losses())])
def test_every_entry_is_documented(entry):
    assert entry.summary.endswith(".")
    assert "Example" in entry.function.__doc__ or "L = " in entry.summary
    assert entry.papers
    assert all(re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv) for paper in entry.papers)
    assert any(setting.endswith(f"={entry.name}") for setting in entry.settings)


def test_unknown_name_tells_the_nearest_and_all():
    # Other tests of this process may have registered their own, which come in between.
    with pytest.raises(
        ValueError, match=r"estimator: 'grppo'. Did you mean 'grpo'\? Allowed: (\w+, )*gae, (\w+, )*gdpo, "
    ):
        get_advantage("grppo")
    with pytest.raises(ValueError, match=r"unknown policy loss: 'xyz'\. Allowed: (\w+, )*cispo, (\w+, )*clip_cov, "):
        get_policy_loss("xyz")


def test_unknown_own_option_tells_the_nearest():
    with pytest.raises(ValueError, match=r"unknown option of 'sapo': 'tau_po'\. Did you mean 'tau_pos'"):
        get_policy_loss("sapo").resolve_extra({"tau_po": 1.0})
    with pytest.raises(ValueError, match=r"unknown option of 'vanilla': 'tau'\. Allowed: none"):
        get_policy_loss("vanilla").resolve_extra({"tau": 1.0})
    assert get_policy_loss("sapo").resolve_extra({"tau_pos": 2.0}) == {"tau_pos": 2.0, "tau_neg": 1.05}


def test_a_users_own_estimator():
    registry: Registry = Registry("advantage estimator", AdvantageEstimator, "verl.algorithms.advantages")

    @registry.register("constant", needs=Needs(critic=True), reads=("gamma",), extra={"height": 3.0})
    def constant(inputs, options):
        """A constant."""
        return torch.full_like(inputs.token_rewards, options.extra["height"] * options.gamma), inputs.token_rewards

    inputs = AdvantageInputs(torch.ones(2), torch.tensor([True, False]), torch.tensor([2]), torch.tensor([0]))
    with pytest.raises(ValueError, match="'constant' needs values: the critic's values"):
        registry.get("constant")(inputs, AdvantageOptions())
    with_values = AdvantageInputs(
        torch.ones(2), torch.tensor([True, False]), torch.tensor([2]), torch.tensor([0]), values=torch.ones(2)
    )
    advantages, returns = registry.get("constant")(with_values, AdvantageOptions(gamma=0.5))
    assert advantages.tolist() == [1.5, 0.0]
    assert returns.tolist() == [1.0, 0.0]


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match=r"'grpo' is taken by verl\.algorithms\.advantages\.group\.grpo"):
        register_advantage("grpo")(lambda inputs, options: None)
    assert get_advantage("grpo").function.__module__ == "verl.algorithms.advantages.group"


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES])
def test_a_module_may_be_imported_twice(registry):
    entry = registry.get("gpg")
    assert registry.register("gpg", needs=entry.needs)(entry.function) is entry.function
    registry._entries["gpg"] = entry


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0


def test_a_users_file_may_register_before_anything_is_looked_up_and_needs_torch_alone():
    code = """
import sys
from verl.algorithms.registry import register_advantage, list_advantages
try:
    register_advantage("gae")(lambda i, o: None)
except ValueError as error:
    print("refused")
print("gae" in list_advantages(), [m for m in ("transformers", "ray", "pandas", "hydra") if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "refused\nTrue []\n"
