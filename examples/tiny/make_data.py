"""Write the tiny task's problems as train.parquet and test.parquet, in the schema of every dataset here.

A problem is the addition or subtraction of two numbers of two or three digits, such as "12+345=". No held-out problem is
ever trained on, whatever the seeds: a checksum of the problem decides to which side it belongs.

    python3 examples/tiny/make_data.py --out quickstart/data
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "tiny/arithmetic"
SEED = 0  # of the default files
HELD_OUT_SHARE = 8  # one problem in so many is held out


def is_held_out(a: int, op: str, b: int) -> bool:
    """Whether the problem is for validation only; 12+345 and 345+12 are on the same side."""
    low, high = sorted((a, b)) if op == "+" else (a, b)
    return zlib.crc32(f"{low}{op}{high}".encode()) % HELD_OUT_SHARE == 0


def problems(rng: random.Random, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """An endless stream of (prompt, answer), such as ("12+345=", "357"), from one side of the split.

    Two- and three-digit numbers are equally likely, and so are the two operators; no difference is below zero.
    """
    while True:
        a, b = (rng.randint(*rng.choice(((10, 99), (100, 999)))) for _ in range(2))
        op = rng.choice("+-")
        if op == "-":
            a, b = max(a, b), min(a, b)
        if is_held_out(a, op, b) == held_out:
            yield f"{a}{op}{b}=", str(a + b if op == "+" else a - b)


def distinct_problems(count: int, seed: int, *, held_out: bool) -> list[tuple[str, str]]:
    """`count` different problems with their answers, the same for the same seed."""
    found: dict[str, str] = {}
    stream = problems(random.Random(seed), held_out=held_out)
    while len(found) < count:
        prompt, answer = next(stream)
        found.setdefault(prompt, answer)
    return list(found.items())


def rows(pairs: list[tuple[str, str]], split: str) -> list[dict]:
    """Dataset rows: data_source, prompt (chat messages), ability, reward_model, extra_info."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, answer) in enumerate(pairs)
    ]


def write(out: Path, train: int = 16384, test: int = 1000, seed: int = SEED) -> tuple[Path, Path]:
    """Write both files into folder `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, count, held_out in (("train", train, False), ("test", test, True)):
        paths.append(out / f"{split}.parquet")
        pq.write_table(pa.Table.from_pylist(rows(distinct_problems(count, seed, held_out=held_out), split)), paths[-1])
    return paths[0], paths[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write arithmetic problems as train.parquet and test.parquet.")
    parser.add_argument("--out", type=Path, default=Path("quickstart/data"), help="folder (default: %(default)s)")
    parser.add_argument("--train", type=int, default=16384, help="training problems (default: %(default)s)")
    parser.add_argument("--test", type=int, default=1000, help="held-out problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="which problems (default: %(default)s)")
    args = parser.parse_args()
    for path in write(args.out, args.train, args.test, args.seed):
        print(path)


if __name__ == "__main__":
    main()
