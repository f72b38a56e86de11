"""The two ways in which the script is called, on a small local copy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "data_preprocess" / "gsm8k.py"
RECORDS = {
    "train": [
        {"question": "How many eggs?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"},
        {"question": "How many dollars?", "answer": "A lot.\n#### 70,000"},
    ],
    "test": [{"question": "How cold?", "answer": "Cold.\n#### -5"}],
}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for split, records in RECORDS.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def run(*arguments, cwd=None, script=SCRIPT, **environment):
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})


def test_from_the_repository_with_save_dir(source, tmp_path):
    done = run("--local_save_dir", tmp_path / "out", "--local_dataset_path", source)
    assert done.returncode == 0, done.stderr
    assert "train.parquet: 2 prompts" in done.stdout
    train = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert set(train[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert train[0]["data_source"] == "openai/gsm8k"
    assert train[1]["reward_model"] == {"style": "rule", "ground_truth": "70000"}
    (message,) = train[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("How many eggs? ")
    assert "####" in message["content"]
    assert train[1]["extra_info"] == {"split": "train", "index": 1, **RECORDS["train"][1]}
    (test,) = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert test["reward_model"]["ground_truth"] == "-5"
    assert test["extra_info"]["split"] == "test"


def test_from_inside_its_folder_with_the_old_name_and_home(source, tmp_path):
    arguments = ("--local_dir", "~/gsm8k", "--local_dataset_path", source)
    done = run(*arguments, cwd=SCRIPT.parent, script="gsm8k.py", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert pq.read_metadata(tmp_path / "gsm8k" / "train.parquet").num_rows == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "train.jsonl, line 3"),
        ('{"question": "q"}', "train.jsonl, line 3"),
        ('{"question": "q", "answer": "no mark"}', "no number after '####'"),
    ],
)
def test_bad_lines(source, tmp_path, line, said):
    with (source / "train.jsonl").open("a") as file:
        file.write(line + "\n")
    done = run("--local_save_dir", tmp_path / "out", "--local_dataset_path", source)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_and_empty_folders(tmp_path):
    done = run("--local_save_dir", tmp_path / "out", "--local_dataset_path", tmp_path / "nowhere")
    assert "there is no such folder" in done.stderr
    (tmp_path / "empty").mkdir()
    done = run("--local_save_dir", tmp_path / "out", "--local_dataset_path", tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert done.returncode != 0
    assert "Put train.jsonl and test.jsonl into" in done.stderr


def test_without_a_network_the_message_says_what_to_do(tmp_path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "VERL_USE_MODELSCOPE": ""}
    done = run("--local_save_dir", tmp_path / "out", **offline)
    assert done.returncode != 0
    assert "Cannot load openai/gsm8k" in done.stderr
    assert "--local_dataset_path" in done.stderr
