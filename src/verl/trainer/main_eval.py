"""`python3 -m verl.trainer.main_eval data.path=FILE`: score a file of responses with the reward function."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from verl.config.command import handle_flags, run_main
from verl.config.compose import compose, print_notice
from verl.config.schema import EvalConfig, RewardConfig
from verl.data.tables import check_output, read_table, with_column, write_table
from verl.errors import DataError
from verl.rewards.at_k import summary
from verl.rewards.manager import RewardManager
from verl.rewards.types import RewardInput, RewardResult

USAGE = """usage: python3 -m verl.trainer.main_eval data.path=FILE [key=value ...]

FILE is parquet or jsonl, with each prompt's responses in the column data.response_key, as main_generation writes them.
"""


def main(argv: list[str]) -> int:
    """Print one line of JSON: mean score by data source, and best, worst and majority of k where there are several."""
    config: EvalConfig = compose(handle_flags(argv, EvalConfig, USAGE), EvalConfig)
    _load_plugins(config)
    path, table = read_table(config.data.path, "data.path")
    output = check_output(config.data.output_path, "data.output_path") if config.data.output_path else None
    custom = config.custom_reward_function.path is not None
    groups = responses(table, config, str(path), require_truth=not custom)
    result = score([sample for group in groups for sample in group], config)
    metrics = evaluate(groups, result)
    if result.failures:
        print_notice(f"{result.failures} rewards failed. The first: {result.failure_messages[0]}")
    if output is not None:
        scores = iter(result.scores)
        column = pa.array([[next(scores) for _ in group] for group in groups], pa.list_(pa.float64()))
        write_table(with_column(table, "scores", column), output)
    print(json.dumps(metrics))
    return 0


def _load_plugins(config: EvalConfig) -> None:
    if config.trainer.plugins:
        from verl.trainer.algorithm import load_plugins

        load_plugins(config.trainer.plugins)


def responses(table: pa.Table, config: EvalConfig, where: str, *, require_truth: bool) -> list[list[RewardInput]]:
    """The samples of each row.

    Raises:
        DataError: a column is missing, or a row holds something else than a text or a list of texts.
    """
    data, groups = config.data, []
    for name in (data.response_key, data.data_source_key):
        if name not in table.column_names:
            raise DataError(f"{where} has no column '{name}'; it has {', '.join(table.column_names)}.")
    for number, row in enumerate(table.to_pylist()):
        given = row[data.response_key]
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}, row {number}, column '{data.response_key}': write a text, or a list of texts.")
        truth = (row.get(data.reward_model_key) or {}).get("ground_truth")
        if truth is None and require_truth:
            raise DataError(
                f"{where}, row {number}: no ground_truth in column '{data.reward_model_key}', which the built-in scorers "
                "compare with. Add it, or give a function of your own (custom_reward_function.path)."
            )
        source, extra = row[data.data_source_key] or "unknown", row.get("extra_info") or {}
        groups.append([RewardInput(source, text, truth, extra) for text in texts])
    return groups


def score(samples: list[RewardInput], config: EvalConfig) -> RewardResult:
    """Scores of all samples. Raises RewardError where no scorer fits, or too many fail."""
    reward = config.reward
    settings = RewardConfig(
        num_workers=reward.num_workers,
        timeout=reward.timeout,
        failure_score=reward.failure_score,
        max_failure_ratio=reward.max_failure_ratio,
    )
    with RewardManager(settings, config.custom_reward_function) as manager:
        manager.check({sample.data_source for sample in samples})
        return manager.score(samples)


def evaluate(groups: list[list[RewardInput]], result: RewardResult) -> dict[str, float]:
    """test_score/<data_source> (mean over prompts of their responses' mean), and of several responses a prompt
    <data_source>/best@k/mean, worst@k and maj@k; of each further number of the reward its mean.
    """
    sources = [group[0].data_source for group in groups]
    by_source: dict[str, list[int]] = defaultdict(list)
    for number, source in enumerate(sources):
        by_source[source].append(number)
    scores, answers = _regroup(result.scores, groups), _regroup(result.answers, groups)
    metrics: dict[str, float] = {}
    for source, rows in sorted(by_source.items()):
        metrics[f"test_score/{source}"] = _mean([_mean(scores[i]) for i in rows])
        voted = [answers[i] for i in rows] if any(a is not None for i in rows for a in answers[i]) else None
        at_k = summary([scores[i] for i in rows], voted)
        metrics |= {f"{source}/{name}": value for name, value in at_k.items()}
        for name, column in result.metrics.items():
            values = [v for i in rows for v in _regroup(column, groups)[i] if v is not None]
            if values:
                metrics[f"{source}/{name}/mean"] = _mean(values)
    return metrics | {"responses": len(result.scores), "reward_failures": result.failures}


def _regroup(column: list[Any], groups: list[list[RewardInput]]) -> list[list[Any]]:
    take: Callable[[], Any] = iter(column).__next__
    return [[take() for _ in group] for group in groups]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
