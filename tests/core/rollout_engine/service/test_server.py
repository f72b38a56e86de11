"""The command as a process of its own: what it says, what it refuses, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch

from verl.config.schema import ServeConfig, ServeRolloutConfig
from verl.core.rollout_engine.service.server import bind, longest_sequence
from verl.errors import ConfigError


def start(*words: object, **environment: str) -> subprocess.Popen:
    variables = {k: v for k, v in os.environ.items() if k != "VERL_SERVE_TOKEN"}
    return subprocess.Popen(
        [sys.executable, "-m", "verl.cli", "serve", *map(str, words)],
        env={**variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answering(url: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.e2e
def test_the_command_serves_prints_its_token_once_and_ends_on_sigterm(tiny_model):
    process = start(f"model={tiny_model}", "port=0", "served_name=sums", "rollout.max_num_seqs=4")
    address, token = process.stdout.readline(), process.stdout.readline()
    url = re.search(r"^sums \(native, float32\) at (http://127\.0\.0\.1:\d+)$", address.strip())[1]
    word = token.strip().rpartition(" ")[2]
    assert len(word) >= 24
    answering(url)
    assert httpx.post(f"{url}/check", headers={"Authorization": f"Bearer {word}"}).status_code == 200
    with httpx.stream(
        "POST", f"{url}/generate", json={"prompt_ids": [3], "max_tokens": 250, "ignore_eos": True, "stream": "tokens"}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = json.loads([line for line in lines if line][-1])
    assert last["finish_reason"] in ("abort", "length")
    assert last["token_ids"]
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert word not in out + err


@pytest.mark.e2e
def test_two_interrupts_end_it_at_once_and_without_a_traceback(tiny_model):
    process = start(f"model={tiny_model}", "port=0")
    url = process.stdout.readline().strip().rpartition(" ")[2]
    answering(url)
    work = {"prompt_ids": [3], "max_tokens": 250, "n": 8, "ignore_eos": True, "stream": "tokens"}
    with httpx.stream("POST", f"{url}/generate", json=work) as stream:
        next(stream.iter_lines())
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two at once would be one
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode in (0, 130)  # a busy machine may take the two for one
    assert "Traceback" not in err


def test_a_taken_address_is_told_of_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"host=127.0.0.1 port={port}: .*Choose another, or port=0"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host=192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_a_model_must_be_named():
    process = start("port=0")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err.startswith("error: model: give the model")


@pytest.mark.parametrize(("asked", "positions", "longest"), [(None, 300, 300), (None, 131072, 8192), (100, 300, 100)])
def test_the_longest_sequence(asked, positions, longest):
    class Config:
        max_position_embeddings = positions

        def get_text_config(self):
            return self

    config = ServeConfig(model="m", rollout=ServeRolloutConfig(max_model_len=asked))
    assert longest_sequence(config, Config()) == longest
    with pytest.raises(ConfigError, match=f"max_model_len={positions + 1}: the model attends to at most {positions}"):
        longest_sequence(ServeConfig(rollout=ServeRolloutConfig(max_model_len=positions + 1)), Config())


def test_a_server_generates_in_the_dtype_that_is_asked_for(byte_model):
    from verl.core.rollout_engine.service.server import make_service

    service = make_service(ServeConfig(model=str(byte_model), served_name="x"), "t")
    assert (service.facts.dtype, service.facts.model, service.facts.vocab_size) == ("float32", "x", 259)
    assert service.loop.engine.held_weights()["model.norm.weight"].dtype == torch.float32
