"""Scoring a file of responses: figures by hand, and what is said of files that do not fit."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.command import run_main
from verl.trainer.main_eval import main

ROWS = [
    {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}, "responses": ["#### 4", "#### 4", "#### 5"]},
    {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "9"}, "responses": ["nine", "#### 9", "#### 9.0"]},
    {"data_source": "tiny/sums", "reward_model": {"ground_truth": "7"}, "responses": ["7", "8", "8"]},
]


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def evaluate(capsys, *words):
    assert run_main(main, list(words)) == 0
    return json.loads(capsys.readouterr().out)


def test_scores_by_data_source(tmp_path, capsys):
    out = tmp_path / "scored.parquet"
    got = evaluate(capsys, f"data.path={write(tmp_path / 'r.parquet', ROWS)}", f"data.output_path={out}")
    assert got["test_score/openai/gsm8k"] == pytest.approx(2 / 3)
    assert got["test_score/tiny/sums"] == pytest.approx(1 / 3)
    assert got["openai/gsm8k/best@2/mean"] == 1.0
    assert got["openai/gsm8k/best@3/mean"] == 1.0
    assert got["openai/gsm8k/maj@3/mean"] == 1.0  # 9 and 9.0 are one vote, "nine" has none
    assert got["tiny/sums/maj@3/mean"] == 0.0
    assert got["tiny/sums/best@2/mean"] == pytest.approx(2 / 3)
    assert got["openai/gsm8k/format/mean"] == pytest.approx(5 / 6)
    assert got["responses"] == 9
    table = pq.read_table(out)
    assert table.column("scores").to_pylist() == [[1, 1, 0], [0, 1, 1], [1, 0, 0]]
    assert table.column("responses").to_pylist()[2] == ["7", "8", "8"]


def test_own_function_and_jsonl_and_single_responses(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def length(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
    )
    (tmp_path / "r.jsonl").write_text(
        '{"data_source": "any", "answer": "abc"}\n{"data_source": "any", "answer": "a"}\n'
    )
    words = [f"custom_reward_function.path={tmp_path / 'mine.py'}", "custom_reward_function.name=length"]
    got = evaluate(capsys, f"data.path={tmp_path / 'r.jsonl'}", "data.response_key=answer", *words)
    assert got["test_score/any"] == 2.0


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (ROWS, ["data.response_key=answers"], "no column 'answers'; it has data_source"),
        ([{**ROWS[0], "reward_model": None}], [], "row 0: no ground_truth in column 'reward_model'"),
        ([{**ROWS[0], "responses": []}], [], "row 0, column 'responses': write a text, or a list of texts"),
        ([{**ROWS[0], "data_source": "gsm9k"}], [], "No scorer for data_source 'gsm9k'"),
        (ROWS, ["data.respons_key=x"], "data.respons_key"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, capsys, rows, words, message):
    assert run_main(main, [f"data.path={write(tmp_path / 'r.parquet', rows)}", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_file(capsys):
    assert run_main(main, []) == 2
    assert "data.path is not set" in capsys.readouterr().err


def test_help_lists_its_own_options(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "data.response_key=responses" in text
    assert "actor_rollout_ref" not in text
