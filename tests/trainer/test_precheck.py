"""Mistakes that config and files show are found before anything slow is imported."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def test_a_mistake_in_config_or_files_is_found_without_torch(tmp_path: Path):
    pq.write_table(pa.table({"prompt": ["x"] * 8, "data_source": ["tiny/x"] * 8}), tmp_path / "a.parquet")
    code = (
        "import sys; from verl.config.command import run_main; from verl.trainer.main_ppo import main\n"
        "for word in sys.argv[2:]: print(run_main(main, [sys.argv[1], 'data.val_files=null', word]))\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    words = ["data.train_batch_size=9", "data.prompt_key=x", "custom_reward_function.path=no.py", "data.val_files=no.jsonl"]  # fmt: skip
    command = [sys.executable, "-c", code, f"data.train_files={tmp_path}/a.parquet", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["2", "2", "2", "2", "[]"]
    for line, said in zip(done.stderr.splitlines(), ["8 training prompts", "no such column", "no.py", "no.jsonl"]):
        assert said in line
