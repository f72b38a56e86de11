"""Time what the transfer queue adds to a step: putting samples in and taking whole groups out.

    python3 benchmarks/transfer_queue.py           1,024 prompts x 5 samples of 400 tokens
    python3 benchmarks/transfer_queue.py --smoke   a few, to see that it runs

Every store gets the same samples twice: what generation gives, in calls of one sample, a group or several, and the scores, a
group or several at a time. Then groups are taken in batches of 256 and put together as a SampleBatch. A plain list of dicts, which bounds nothing
and waits for nobody, is the limit; `queue.Queue` passes rows on but cannot wait for a row's later fields.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from verl.core.transfer_queue.local import LocalTransferQueue
from verl.core.transfer_queue.rows import batch_of, sizes

STEP_SECONDS = 50.0
"""Of a step on these samples: one H200 trains 333,000 response tokens of a 0.5B model in 8.2 s (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Work:
    prompts: int = 1024
    samples: int = 5
    tokens: int = 400
    prompt_tokens: int = 100
    groups_a_take: int = 256

    def uids(self) -> list[str]:
        return [f"prompt-{i}" for i in range(self.prompts)]

    def generated(self) -> dict[str, Any]:
        """Fields of one sample as generation gives them."""
        return {
            "prompt_ids": torch.arange(self.prompt_tokens),
            "response_ids": torch.arange(self.tokens),
            "response_mask": torch.ones(self.tokens, dtype=torch.bool),
            "rollout_log_probs": torch.full((self.tokens,), -0.5),
            "policy_versions": torch.zeros(self.tokens, dtype=torch.int64),
            "finish_reason": "stop",
        }


@dataclass(frozen=True)
class Figures:
    """Seconds for all samples."""

    put: float
    score: float
    take: float


class PlainList:
    """The limit: fields in dicts in a list."""

    def __init__(self, work: Work):
        self.groups = {uid: [{} for _ in range(work.samples)] for uid in work.uids()}

    def put_many(self, rows) -> None:
        for uid, index, fields in rows:
            self.groups[uid][index].update(fields)

    def take(self, groups: int):
        uids = [uid for uid, _ in zip(self.groups, range(groups))]
        rows = [(uid, row) for uid in uids for row in self.groups.pop(uid)]
        return batch_of([uid for uid, _ in rows], [row for _, row in rows])


class StandardQueue:
    """Rows through `queue.Queue`, generated and scored ones apart, joined by whoever takes."""

    def __init__(self, work: Work):
        self.size, self.queues = work.samples, (queue.Queue(), queue.Queue())

    def put_many(self, rows) -> None:
        for row in rows:
            self.queues["score" in row[2]].put(row)

    def take(self, groups: int):
        rows = {}
        for _ in range(groups * self.size):
            for each in self.queues:
                uid, index, fields = each.get()
                rows.setdefault((uid, index), {}).update(fields)
        return batch_of([uid for uid, _ in rows], list(rows.values()))


class Bounded:
    """A transfer queue with both of its bounds on."""

    def __init__(self, kind: Callable[..., Any], work: Work):
        self.queue = kind(capacity=work.prompts, staleness=1, groups_per_version=work.prompts)
        self.queue.register("trainer", ["response_ids", "score"])
        for order, uid in enumerate(work.uids()):
            self.queue.add_group(uid, work.samples, order, 0)
        self.put_many = self.queue.put_many

    def take(self, groups: int):
        batch = self.queue.take("trainer", groups, timeout=0)
        self.queue.release(batch["uid"])
        return batch


def measure(make: Callable[[Work], Any], work: Work, together: int, repeats: int = 3) -> Figures:
    """The fastest of a few passes of all samples through a new store. together: samples put in one call."""
    passes = [one_pass(make(work), work, together) for _ in range(repeats)]
    return Figures(*(min(values) for values in zip(*passes)))


def one_pass(store: Any, work: Work, together: int) -> tuple[float, float, float]:
    """Seconds of putting samples, of putting scores, and of taking."""
    places = [(uid, i) for uid in work.uids() for i in range(work.samples)]
    made = [(uid, i, work.generated()) for uid, i in places]
    scores = [(uid, i, {"score": 1.0}) for uid, i in places]
    marks = [time.perf_counter()]
    for rows, size in ((made, together), (scores, max(together, work.samples))):
        for first in range(0, len(rows), size):
            store.put_many(rows[first : first + size])
        marks.append(time.perf_counter())
    taken = 0
    while taken < work.prompts:
        batch = store.take(min(work.groups_a_take, work.prompts - taken))
        taken += len(batch) // work.samples
    marks.append(time.perf_counter())
    if len(batch["response_ids"].values) != len(batch) * work.tokens or float(batch["score"].min()) != 1.0:
        raise AssertionError("samples came out other than they went in")
    return tuple(after - before for before, after in pairwise(marks))


def table(results: dict[str, Figures], work: Work, step_seconds: float) -> str:
    """Rates of putting (without scores) and taking, and the whole as a share of a step."""
    rows = work.prompts * work.samples
    megabytes = rows * sizes(work.generated())[1] / 1e6
    lines = [
        f"{work.prompts} prompts x {work.samples} samples of {work.tokens} tokens, {megabytes:.0f} MB",
        "",
        "| store | put rows/s | put MB/s | scores rows/s | take rows/s | take MB/s | seconds in all | "
        f"of a step of {step_seconds:g} s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, f in results.items():
        rates = f"{rows / f.put:,.0f} | {megabytes / f.put:,.0f} | {rows / f.score:,.0f} | {rows / f.take:,.0f} | {megabytes / f.take:,.0f}"
        total = f.put + f.score + f.take
        lines.append(f"| {name} | {rates} | {total:.3f} | {total / step_seconds:.2%} |")
    return "\n".join(lines)


def run(work: Work, with_ray: bool, repeats: int) -> dict[str, Figures]:
    """Figures of each store."""
    results = {
        "a plain list": measure(PlainList, work, 1, repeats),
        "queue.Queue": measure(StandardQueue, work, 1, repeats),
    }
    kinds: dict[str, Callable[..., Any]] = {"local": LocalTransferQueue}
    if with_ray:
        from verl.core.transfer_queue.ray_queue import RayTransferQueue

        kinds["Ray"] = RayTransferQueue
    for name, kind in kinds.items():
        calls = {"a sample": 1, "a group": work.samples, "64 groups": 64 * work.samples}
        for words, together in calls.items():
            results[f"{name}, a call for {words}"] = measure(
                lambda work, kind=kind: Bounded(kind, work), work, together, repeats
            )
    return results


def bare_call() -> float:
    """Milliseconds of a call to an actor that only answers: what Ray itself takes, here and now."""
    import ray

    class Echo:
        async def answer(self) -> None:
            return None

    echo = ray.remote(Echo).options(num_cpus=0).remote()
    ray.get(echo.answer.remote())
    start = time.perf_counter()
    for _ in range(500):
        ray.get(echo.answer.remote())
    return (time.perf_counter() - start) * 2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="4 prompts x 2 samples of 8 tokens, once")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = Work(4, 2, 8, 3, 3) if options.smoke else Work()
    cluster = None
    if not options.no_ray:
        from verl.config.compose import compose
        from verl.core.controller.cluster import Cluster

        cluster = Cluster(compose(["data.train_files=none", "ray_kwargs.ray_init.num_cpus=2"]))
    results = run(work, cluster is not None, 1 if options.smoke else options.repeats)
    print(table(results, work, options.step_seconds))
    if cluster is not None:
        print(f"\nA call to a Ray actor that only answers: {bare_call():.2f} ms.")
        cluster.close()


if __name__ == "__main__":
    main()
