"""A server under load on this machine, against its engine called directly in the same run.

    python3 benchmarks/serve_load.py --seconds 120 --clients 64

Clients ask for completions, streamed and not, and mix in what a server meets: bad JSON, prompts and bodies that are too
large, a wrong token, unknown routes, clients that go in mid-stream. The server is a process of its own; the clients share
another one, so on few cores they take their share of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 32
BAD_SHARE = 0.15

# What is sent wrong on purpose, and the status that it has to get.
BAD = {
    "bad JSON": 400,
    "prompt too long": 400,
    "wrong field": 422,
    "body too large": 413,
    "wrong token": 401,
    "unknown route": 404,
    "client gone": 200,
}


class Load:
    """What the clients saw. seconds: of each good request by kind; first: to a stream's first token."""

    def __init__(self, url: str, tokens: int, vocab: int):
        self.url, self.tokens, self.vocab = url, tokens, vocab
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.first: list[float] = []
        self.drawn = 0
        self.bad: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()

    async def client(self, number: int, until: float) -> None:
        """One client with a connection of its own: a request after the other."""
        dice = random.Random(number)
        async with httpx.AsyncClient(timeout=120, trust_env=False, verify=False) as http:
            while time.perf_counter() < until:
                if dice.random() < BAD_SHARE:
                    await self._bad(http, dice, dice.choice(list(BAD)))
                else:
                    await self._good(http, dice, streamed=dice.random() < 0.5)

    def _body(self, dice: random.Random, **changes: object) -> dict:
        prompt = [dice.randrange(3, self.vocab) for _ in range(PROMPT_TOKENS)]
        return {
            "prompt": prompt,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "seed": dice.getrandbits(32),
            **changes,
        }

    async def _good(self, http: httpx.AsyncClient, dice: random.Random, streamed: bool) -> None:
        began, kind = time.perf_counter(), "streamed" if streamed else "whole"
        try:
            if streamed:
                usage = await self._stream(http, self._body(dice, stream=True, stream_options={"include_usage": True}))
            else:
                answer = await http.post(f"{self.url}/v1/completions", json=self._body(dice))
                answer.raise_for_status()
                usage = answer.json()["usage"]
        except httpx.HTTPError as error:
            self.wrong[f"{kind}: {type(error).__name__}"] += 1
            return
        if usage["completion_tokens"] != self.tokens:
            self.wrong[f"{kind}: {usage['completion_tokens']} tokens"] += 1
        self.seconds[kind].append(time.perf_counter() - began)
        self.drawn += usage["completion_tokens"]

    async def _stream(self, http: httpx.AsyncClient, body: dict) -> dict:
        began, first, usage = time.perf_counter(), True, {"completion_tokens": 0}
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if first and line:
                    self.first.append(time.perf_counter() - began)
                    first = False
                if line.startswith("data: {") and '"usage"' in line:
                    usage = json.loads(line[6:])["usage"]
        return usage

    async def _bad(self, http: httpx.AsyncClient, dice: random.Random, kind: str) -> None:
        path, options = "/v1/completions", {}
        if kind == "bad JSON":
            options["content"] = b'{"prompt": '
        elif kind == "prompt too long":
            options["json"] = self._body(dice, max_tokens=10**6)
        elif kind == "wrong field":
            options["json"] = self._body(dice, temperature="hot")
        elif kind == "body too large":
            options["content"] = b" " * (2 << 20)
        elif kind == "wrong token":
            path, options["headers"] = "/pause", {"Authorization": "Bearer guess"}
        elif kind == "unknown route":
            path = "/v2/completions"
        else:
            options["json"] = self._body(dice, stream=True)
        try:
            async with http.stream("POST", f"{self.url}{path}", **options) as answer:
                if kind == "client gone":
                    async for _ in answer.aiter_lines():
                        break
                status = answer.status_code
        except httpx.HTTPError as error:
            self.wrong[f"{kind}: {type(error).__name__}"] += 1
            return
        self.bad[kind] += 1
        if status != BAD[kind]:
            self.wrong[f"{kind}: status {status}"] += 1


@contextmanager
def server(model: str, slots: int) -> Iterator[tuple[str, psutil.Process]]:
    """(address, process) of a server of `model`."""
    words = [f"model={model}", "port=0", "max_body_megabytes=1", f"rollout.max_num_seqs={slots}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "verl.cli", "serve", *words],
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "VERL_SERVE_TOKEN": "benchmark"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start; see above")
        url = line.split()[-1]
        while True:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


async def drive(load: Load, clients: int, seconds: float) -> float:
    """All clients at once; the seconds that they took."""
    began = time.perf_counter()
    await asyncio.gather(*(load.client(i, began + seconds) for i in range(clients)))
    return time.perf_counter() - began


def direct(model: str, slots: int, in_flight: int, tokens: int, seconds: float) -> float:
    """Tokens a second of the same engine, called in this process, with as many requests at once."""
    from verl.config.schema import ServeConfig, ServeRolloutConfig
    from verl.core.rollout_engine.api import Feed, Request, SamplingParams
    from verl.core.rollout_engine.service.server import make_service

    rollout = ServeRolloutConfig(max_num_seqs=slots)
    service = make_service(ServeConfig(model=model, rollout=rollout), "benchmark")
    engine, facts, dice = service.loop.engine, service.facts, random.Random(0)
    sampling = SamplingParams(tokens, ignore_eos=True, seed=1)
    began, asked, drawn, samples = time.perf_counter(), 0, 0, 0

    def take(idle: bool) -> list[Request] | None:
        nonlocal asked
        if time.perf_counter() - began > seconds:
            return None
        new = [
            Request([dice.randrange(3, facts.vocab_size) for _ in range(PROMPT_TOKENS)], sampling, asked + i)
            for i in range(in_flight - (asked - samples))
        ]
        asked += len(new)
        return new

    for _, _, completion in engine.stream([], Feed(take, sampling, longest=facts.longest, samples=slots)):
        samples += 1
        drawn += len(completion.token_ids)
    return drawn / (time.perf_counter() - began)


def measure(arguments: argparse.Namespace) -> dict:
    """Load, then the engine alone, and the figures of both."""
    with server(arguments.model, arguments.slots) as (url, process):
        facts = httpx.get(f"{url}/health").json()
        load = Load(url, arguments.tokens, facts["vocab_size"])
        asyncio.run(drive(Load(url, arguments.tokens, facts["vocab_size"]), arguments.clients, arguments.warm_up))
        memory = process.memory_info().rss
        seconds = asyncio.run(drive(load, arguments.clients, arguments.seconds))
        time.sleep(1.0)
        state = httpx.get(f"{url}/health").json()
        grown = process.memory_info().rss - memory
    alone = direct(arguments.model, arguments.slots, arguments.clients, arguments.tokens, arguments.direct_seconds)
    good = [s for kind in load.seconds.values() for s in kind]
    return {
        "clients": arguments.clients,
        "seconds": seconds,
        "requests_per_second": (len(good) + load.bad.total()) / seconds,
        "tokens_per_second": load.drawn / seconds,
        "direct_tokens_per_second": alone,
        "latency": {kind: quantiles(values) for kind, values in load.seconds.items()}
        | {"first token": quantiles(load.first)},
        "requests": {kind: len(values) for kind, values in load.seconds.items()},
        "bad": dict(load.bad),
        "wrong": dict(load.wrong),
        "slots_used_at_the_end": state["slots_used"],
        "waiting_at_the_end": state["waiting"],
        "memory_grown_mb": grown / 2**20,
    }


def quantiles(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    if len(values) < 2:
        return (values or [0.0])[0], (values or [0.0])[0]
    cuts = statistics.quantiles(values, n=20)
    return statistics.median(values), cuts[18]


def table(found: dict) -> str:
    lines = [
        f"{found['clients']} clients for {found['seconds']:.0f} s",
        f"  requests/s        {found['requests_per_second']:8.1f}   bad ones included",
        f"  tokens/s          {found['tokens_per_second']:8.0f}   of answered requests",
        f"  tokens/s, direct  {found['direct_tokens_per_second']:8.0f}   the engine alone, as many requests at once",
    ]
    for kind, (median, tail) in found["latency"].items():
        lines.append(f"  {kind:16s}  p50 {median:6.3f} s   p95 {tail:6.3f} s   {found['requests'].get(kind, '')}")
    lines.append(
        f"  answered with the right status: {', '.join(f'{n} x {kind} ({BAD[kind]})' for kind, n in found['bad'].items())}"
    )
    lines.append(f"  unexpected: {found['wrong'] or 'none'}")
    lines.append(
        f"  at the end: {found['slots_used_at_the_end']} slots used, {found['waiting_at_the_end']} requests waiting, server's "
        f"memory {found['memory_grown_mb']:+.0f} MB"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(ROOT / "examples/tiny/model"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--warm-up", type=float, default=5)
    parser.add_argument("--direct-seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="tokens a response")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.clients, arguments.seconds, arguments.warm_up = 8, 2, 0.2
        arguments.direct_seconds, arguments.tokens = 0.5, 8
    found = measure(arguments)
    print(table(found))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    return 1 if found["wrong"] or found["slots_used_at_the_end"] else 0


if __name__ == "__main__":
    sys.exit(main())
