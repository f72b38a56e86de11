"""docs/metrics.md names every metric that a run logs, and no other."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.e2e.runs import overrides, train

from verl.algorithms.inputs import PolicyLossInputs, PolicyLossOptions
from verl.algorithms.registry import get_policy_loss
from verl.config.command import run_main
from verl.tracking.files import METRICS, read_lines
from verl.trainer import sft_trainer
from verl.trainer.algorithm_index import builtin_policy_losses

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
SOURCES = [
    *(ROOT / "src/verl/trainer").rglob("*.py"),
    ROOT / "src/verl/algorithms/correction.py",
    ROOT / "src/verl/core/controller/distributed.py",
]
PREFIXES = "queue|train|actor|critic|perf|timing|timing_per_token_ms|training|val|response|response_length|prompt_length|reward|rollout_corr"
ON_GPUS_ALONE = {
    *("perf/mfu", "perf/mfu/actor", "perf/mfu/critic"),
    *("perf/peak_memory_gb/gen", "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"),
}
ON_SEVERAL_DEVICES_ALONE = {"perf/weights_received_gb", "perf/weights_peak_extra_gb"}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    sevens = solution_str.count("7")
    return {"score": sevens, "acc": sevens > 0, "length": len(solution_str), "pred": solution_str}
"""

# Together these log everything that a CPU run can.
RUNS = {
    "ppo": {
        "algorithm__adv_estimator": "gae",
        "algorithm__kl_ctrl__kl_coef": 0.01,
        "algorithm__rollout_correction__rollout_is": "token",
        "algorithm__rollout_correction__rollout_rs": "token_k1",
        "algorithm__rollout_correction__rollout_rs_threshold": 2.0,
        "actor_rollout_ref__actor__use_kl_loss": True,
    },
    "dapo": {
        "algorithm__filter_groups__enable": True,
        "actor_rollout_ref__rollout__val_kwargs__n": 4,
        "actor_rollout_ref__rollout__val_kwargs__do_sample": True,
        "actor_rollout_ref__rollout__val_kwargs__temperature": 1.0,
    },
    "fully_async": {"trainer__pipeline": "fully_async"},
    "remax": {
        "algorithm__adv_estimator": "remax",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "clip_cov",
        "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
    },
}


def page_names() -> list[str]:
    """Names of the page's tables, `x/{a,b}` written out as x/a and x/b."""
    names = []
    for cell in re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE):
        parts = [
            part.strip("{}").split(",") if part[0] == "{" else [part] for part in re.split(r"(\{[^}]*\})", cell) if part
        ]
        names += map("".join, itertools.product(*parts))
    return names


def fits(pattern: str, name: str) -> bool:
    """Whether `name` is what the page calls `pattern`, in which <...> stands for anything."""
    parts = re.split(r"<[^>]*>", pattern)
    return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None


@pytest.fixture(scope="module")
def logged(tiny_model, tiny_data, tmp_path_factory) -> set[str]:
    """Names that short runs log."""
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "reward.py").write_text(REWARD)
    names: set[str] = set()
    for run, changes in RUNS.items():
        out = folder / run
        words = overrides(tiny_model, tiny_data, out, **changes, custom_reward_function__path=folder / "reward.py")
        assert train(words) == 0
        names |= {name for line in read_lines(out / METRICS) for name in line if name != "step"}
    return names | fine_tuning(tiny_model, folder)


def fine_tuning(model: Path, folder: Path) -> set[str]:
    """Names that supervised fine-tuning logs."""
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}] * 2), folder / "sft.parquet")
    words = [f"data.{split}_files={folder / 'sft.parquet'}" for split in ("train", "val")]
    words += ["data.train_batch_size=2", f"model.path={model}", f"trainer.default_local_dir={folder / 'sft'}"]
    assert run_main(sft_trainer.main, words) == 0
    return {name for line in read_lines(folder / "sft" / METRICS) for name in line if name != "step"}


def written_in_the_source() -> set[str]:
    """Whole metric names that stand in the source, and the phases that are timed."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(rf"({PREFIXES})/[a-z0-9_/]*[a-z0-9]", node.value):
                    names.add(node.value)
                elif re.fullmatch(rf"({PREFIXES})/[a-z0-9_]+/", node.value):  # in front of a phase's name
                    names.add(f"{node.value}gen")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "time":
                names |= {f"timing/{a.value}" for a in node.args if isinstance(a, ast.Constant)}
    return names


def reported_by_losses() -> set[str]:
    """Names of what the registered policy losses report."""
    one = torch.tensor([-1.0, -1.0])
    mask = torch.tensor([True, True])
    inputs = PolicyLossInputs(one, one, one, mask, torch.tensor([2]), one, rollout_log_probs=one)
    losses = map(get_policy_loss, builtin_policy_losses())
    return {f"actor/{name}" for loss in losses for name in loss(inputs, PolicyLossOptions()).metrics}


def test_page_has_no_name_twice():
    names = page_names()
    assert len(names) > 80
    assert len(names) == len(set(names))


def test_page_names_everything(logged):
    known = page_names()
    # In the source "critic/score" stands for its mean, largest and smallest.
    spreads = {pattern.removesuffix("/mean") for pattern in known}
    everything = logged | (written_in_the_source() - spreads) | reported_by_losses()
    assert [name for name in sorted(everything) if not any(fits(pattern, name) for pattern in known)] == []


def test_page_names_nothing_else(logged):
    elsewhere = ON_GPUS_ALONE | ON_SEVERAL_DEVICES_ALONE
    assert written_in_the_source() >= elsewhere
    found = logged | elsewhere | reported_by_losses()
    assert [pattern for pattern in page_names() if not any(fits(pattern, name) for name in found)] == []


def test_the_runs_log_what_only_patterns_cover(logged):
    assert {
        "reward/length",
        "val-aux/tiny/arithmetic/length/mean@1",
        "val-core/tiny/arithmetic/reward/mean@1",
    } <= logged


def test_fits():
    assert fits("val/test_score/<data_source>", "val/test_score/openai/gsm8k")
    assert not fits("val/test_score/<data_source>", "val/test_score/")
    assert not fits("actor/loss", "actor/loss2")
