"""Turn a parquet of problems into conversations for supervised fine-tuning: the question, and the right answer to it.

python3 examples/tiny/make_messages.py quickstart/data/train.parquet messages.parquet --rows 2048
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write(problems: Path, out: Path, rows: int | None = None) -> int:
    """Write the first `rows` problems (None: all) with a column `messages`; returns how many."""
    table = pq.read_table(problems).slice(0, rows)
    conversations = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_model"]["ground_truth"]}]}
        for row in table.to_pylist()
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(conversations), out)
    return len(conversations)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write problems and their answers as conversations.")
    parser.add_argument("problems", type=Path, help="parquet file in the dataset's schema")
    parser.add_argument("out", type=Path, help="parquet file to write")
    parser.add_argument("--rows", type=int, help="take the first so many (default: all)")
    args = parser.parse_args()
    print(f"{args.out}: {write(args.problems, args.out, args.rows)} conversations")


if __name__ == "__main__":
    main()
