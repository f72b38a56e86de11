"""What the pages promise exists: links, keys, commands, and the names in the picture."""

from __future__ import annotations

import inspect
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from verl.algorithms.registry import get_policy_loss
from verl.config.compose import compose
from verl.config.keys import options, schema_keys
from verl.config.schema import EvalConfig, GenerationConfig, PPOConfig, ServeConfig, SFTConfig
from verl.config.validate import validate
from verl.model_merger.__main__ import parser
from verl.trainer import stages
from verl.trainer.algorithm_index import builtin_advantages, builtin_policy_losses

ROOT = Path(__file__).parents[2]
SCHEMAS = (PPOConfig, SFTConfig, EvalConfig, GenerationConfig, ServeConfig)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


@by_page
def test_keys_exist(page):
    if page.name == "config.md":  # made from the schema, and it lists retired keys
        return
    # Elsewhere a word such as rollout.n is short for a key of the RL trainer.
    schemas = SCHEMAS if page.name in ("trainers.md", "serving.md") else SCHEMAS[:1]
    known = {name: key for schema in schemas for name, key in options(schema).items()}
    sections = {name for schema in schemas for name in schema_keys(schema)} - set(known)
    roots = {name.partition(".")[0] for name in known}
    words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text())
    words += re.findall(r"(?:^|\s)([a-z_]+(?:\.[a-z_]+)+)=", page.read_text(), re.MULTILINE)
    wrong = [
        w for w in words if w.partition(".")[0] in roots and w not in known and w not in sections and not is_file(w)
    ]
    assert [w for w in wrong if not any(w.startswith(f"{name}.") for name in known if known[name].is_mapping)] == []


def is_file(word: str) -> bool:
    return word.endswith((".py", ".md", ".json", ".jsonl", ".html"))


def commands(page: Path, program: str) -> list[list[str]]:
    """Arguments of each command that starts `program` in the page's code blocks."""
    blocks = re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line.partition(program)[2]) for line in lines if program in line]


def test_the_training_command_composes():
    (words,) = commands(ROOT / "README.md", "-m verl.trainer.main_ppo")
    config = compose(words)
    validate(config)
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.total_epochs == 15


@by_page
def test_merger_commands_parse(page):
    for words in commands(page, "-m verl.model_merger"):
        assert parser().parse_args(words).backend == "fsdp"


def test_readme_counts_the_algorithms():
    text = (ROOT / "README.md").read_text()
    functions = {get_policy_loss(name).function for name in builtin_policy_losses()}
    assert f"{len(builtin_advantages())} advantage estimators and {len(functions)} policy losses" in text


def test_readme_reward_function_scores():
    source = re.search(r"```python\n(# custom_reward.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    space: dict = {}
    exec(source, space)
    reward = space["compute_reward"]
    assert [reward("d", text, "42", {}) for text in ("so #### 42", "#### 41\n#### 42 ", "42", "#### 43")] == [
        1,
        1,
        0,
        0,
    ]


def test_defaults_table_tells_our_defaults():
    table = (ROOT / "README.md").read_text().partition("## Defaults that differ")[2].partition("\n## ")[0]
    known = options()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]*) \|", table, re.MULTILINE))
    assert len(rows) >= 9
    for name, said in rows.items():
        matches = [key for full, key in known.items() if full == name or full.endswith(f".{name}")]
        assert matches, name
        default = matches[0].default
        word = {None: "null", "${actor_rollout_ref.model.path}": "the actor's", ("console",): "console"}.get(
            tuple(default) if isinstance(default, list) else default, str(default)
        )
        assert word in said, f"{name}: the page says {said}, the default is {default}"


def test_picture_names_stages_and_columns():
    texts = [t for t in ET.parse(ROOT / "docs" / "batch_flow.svg").iter() if t.tag.endswith("text")]
    names = [n for t in texts if t.get("class") == "name" for n in t.text.split(", ")]
    functions = [name for name in names if "_" in name or name == "generate"]
    assert len(functions) == 7
    assert all(inspect.isfunction(getattr(stages, name)) for name in functions)
    columns = [c for t in texts if t.get("class") == "col" for c in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", t.text)]
    source = "".join(
        (ROOT / "src/verl" / name).read_text()
        for name in ("trainer/stages.py", "trainer/losses.py", "data/prompts.py", "trainer/checkpoints.py")
    )
    assert len(columns) >= 14
    assert [c for c in columns if f'"{c}"' not in source and f"{c}=" not in source and c != "global_step_"] == []
