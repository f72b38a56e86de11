"""The file in docs/your_own.md really registers, computes what it says, and trains."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from tests.e2e.runs import overrides, train

from verl.algorithms.inputs import AdvantageInputs, AdvantageOptions, PolicyLossInputs, PolicyLossOptions
from verl.algorithms.registry import ADVANTAGES, POLICY_LOSSES, get_advantage, get_policy_loss
from verl.rewards import find_scorer
from verl.rewards.registry import _SCORERS
from verl.tracking.files import METRICS, read_lines
from verl.trainer.algorithm import load_plugins

PAGE = Path(__file__).parents[2] / "docs" / "your_own.md"


@pytest.fixture
def plugin(tmp_path):
    """The page's file; what it registers is forgotten afterwards."""
    ADVANTAGES.names(), POLICY_LOSSES.names(), find_scorer("tiny/arithmetic")
    places = (ADVANTAGES._entries, POLICY_LOSSES._entries, _SCORERS)
    before = [dict(place) for place in places]
    path = tmp_path / "my_algorithm.py"
    path.write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    yield path
    for place, entries in zip(places, before):
        place.clear()
        place.update(entries)


def test_the_file_is_about_thirty_lines(plugin):
    lines = [line for line in plugin.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 32


def test_values_by_hand(plugin):
    load_plugins(str(plugin))
    score = find_scorer("tiny/arithmetic").function("tiny/arithmetic", "1234", "1299", {})
    assert score == {"score": 0.5, "exact": False}

    # Groups (0, 1, 5) and (2, 4): medians 1 and 3. The second sample has a token that the policy did not choose.
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([0.0, 0.0, 1.0, 5.0, 2.0, 4.0]),
        mask=torch.tensor([True, False, True, True, True, True]),
        lengths=torch.tensor([1, 2, 1, 1, 1]),
        groups=torch.tensor([0, 0, 0, 1, 1]),
    )
    advantages, returns = get_advantage("above_median")(inputs, AdvantageOptions())
    assert advantages.tolist() == [-1.0, 0.0, 0.0, 4.0, -1.0, 1.0]
    assert returns.tolist() == [0.0, 0.0, 1.0, 5.0, 2.0, 4.0]

    # log r = 0.2 with c = 0.2: L = -2 * 0.2 * tanh(1), gradient -2 * (1 - tanh(1)^2).
    log_probs = torch.tensor([-1.0], requires_grad=True)
    one = torch.ones(1, dtype=torch.bool)
    out = get_policy_loss("soft_clip")(
        PolicyLossInputs(log_probs, torch.tensor([-1.2]), torch.tensor([2.0]), one, torch.tensor([1]), torch.ones(1)),
        PolicyLossOptions(clip_high=0.2),
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.4 * math.tanh(1), abs=1e-6)
    assert log_probs.grad.item() == pytest.approx(-2 * (1 - math.tanh(1) ** 2), abs=1e-5)
    assert out.metrics["distance"].mean() == pytest.approx(0.2, abs=1e-6)


def test_the_pages_command_trains(plugin, tiny_model, tiny_data, tmp_path):
    page = PAGE.read_text()
    words = re.search(r"bash examples/tiny/grpo.sh (.*?)```", page, re.DOTALL)[1].replace("\\\n", "").split()
    words = [word.replace("$PWD", str(plugin.parent)) for word in words]
    assert words[0] == f"trainer.plugins={plugin}"
    out = tmp_path / "run"
    assert train([*overrides(tiny_model, tiny_data, out), *words]) == 0
    last = read_lines(out / METRICS)[-1]
    promised = re.search(r"The\s+log\s+then\s+has\s+(.*?)\s+at\s+validation", page, re.DOTALL)[1]
    names = re.findall(r"`([^`]+)`", promised)
    assert len(names) == 3
    assert all(math.isfinite(last[name]) for name in names)
    assert last["actor/distance"] > 0  # two updates a step: the second one starts away from the policy that sampled
