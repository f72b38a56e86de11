"""docs/algorithms.md is what the registries say, and its settings are ones that the command line takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.algorithms.aggregate import MODES
from verl.algorithms.inputs import AdvantageOptions, PolicyLossOptions
from verl.algorithms.kl import KINDS
from verl.algorithms.registry import get_advantage, get_policy_loss
from verl.config.compose import compose
from verl.config.keys import options
from verl.config.validate import validate
from verl.trainer.algorithm_index import (
    NEED_WORDS,
    OPTION_KEYS,
    builtin_advantages,
    builtin_policy_losses,
    main,
    markdown,
)

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ENTRIES = [
    *(("algorithm.adv_estimator", get_advantage(name)) for name in builtin_advantages()),
    *(("actor_rollout_ref.actor.policy_loss.loss_mode", get_policy_loss(name)) for name in builtin_policy_losses()),
]


def entry_text(title: str) -> str:
    """The part of the page under one heading."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"no heading '{title}'"
    return found[1]


def settings_of(text: str) -> list[str]:
    return re.search(r"```\n(.*?)\n```", text, re.DOTALL)[1].split("\n")


def test_page_is_current():
    assert PAGE.read_text() == markdown(), "run: python -m verl.trainer.algorithm_index --markdown > docs/algorithms.md"


@pytest.mark.parametrize(("key", "entry"), ENTRIES, ids=[f"{k.rpartition('.')[2]}-{e.name}" for k, e in ENTRIES])
def test_entry_has_its_papers_and_settings_that_compose(key, entry):
    kind = "advantage" if key == "algorithm.adv_estimator" else "policy loss"
    text = entry_text(f"{entry.name} ({kind})")
    assert all(f"https://arxiv.org/abs/{paper.arxiv}" in text for paper in entry.papers)
    assert "Example: " in text
    settings = settings_of(text)
    assert f"{key}={entry.name}" in settings
    config = compose(settings)
    validate(config)
    known = options()
    given = {setting.partition("=")[0]: setting.partition("=")[2] for setting in entry.settings}
    assert {s.partition("=")[0] for s in settings} == given.keys() <= known.keys()
    assert all(f"`{name}`" in text for name in entry.extra)


def test_links_in_the_table_go_to_headings():
    text = PAGE.read_text()
    headings = {
        h.lower().replace(" ", "-").replace("(", "").replace(")", "")
        for h in re.findall(r"^### (.*)$", text, re.MULTILINE)
    }
    anchors = re.findall(r"^\| \[`[^`]+`\]\(#([^)]+)\)", text, re.MULTILINE)
    assert len(anchors) == len(ENTRIES)
    assert set(anchors) == headings


def test_kl_cov_says_where_its_default_is_not_the_papers():
    text = entry_text("kl_cov (policy loss)")
    assert "`ppo_kl_coef`, 0.1 by default, the paper's 1.0" in text


def test_option_words_cover_the_registry():
    shared = set(AdvantageOptions.__dataclass_fields__) | set(PolicyLossOptions.__dataclass_fields__)
    assert shared - {"extra"} == OPTION_KEYS.keys()
    assert all(key is None or key in options() for key in OPTION_KEYS.values())
    needs = {name for _, entry in ENTRIES for name, value in vars(entry.needs).items() if value is True}
    assert needs <= NEED_WORDS.keys()


def test_settings_of_dapo_compose():
    text = PAGE.read_text().partition("## DAPO")[2]
    config = compose([*settings_of(text), "data.train_batch_size=512", "data.max_response_length=20480"])
    validate(config)
    assert config.algorithm.filter_groups.enable
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 4096


def test_last_section_names_every_mode_and_kl_estimator():
    last = PAGE.read_text().partition("## Around them")[2]
    assert all(f"| `{mode}` |" in last for mode in MODES)
    assert all(f"`{kind}`" in last for kind in KINDS if not kind.endswith("+"))


def test_without_a_flag_the_names_are_listed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {entry.name} " in out for _, entry in ENTRIES)
