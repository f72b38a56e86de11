"""Generation by servers against the same generation in this process, and what it does when servers fail it."""

import os
import signal
import socket
import threading
import time

import httpx
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from verl.config.schema import RolloutConfig, RolloutServerConfig
from verl.core.rollout_engine.api import Feed, Request, SamplingParams
from verl.core.rollout_engine.engine import NativeEngine
from verl.core.rollout_engine.service.check import check_servers
from verl.core.rollout_engine.service.client import ServerRolloutEngine
from verl.errors import CheckpointError, ConfigError, UserError, WorkerDied

from .conftest import BEARER, TOKEN, serving
from .processes import start


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("VERL_SERVE_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def weights(byte_model) -> dict[str, torch.Tensor]:
    """The trainer's: those of the folder, each a little larger."""
    model = AutoModelForCausalLM.from_pretrained(byte_model, dtype=torch.float32)
    return {name: p.detach() * 1.2 for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def direct(byte_model, weights) -> NativeEngine:
    """An engine in this process with the trainer's weights."""
    config = AutoModelForCausalLM.from_pretrained(byte_model).config
    engine = NativeEngine(config)
    engine.load_weights(weights.items(), 7)
    return engine


@pytest.fixture(scope="module")
def pair(byte_model):
    """Two servers."""
    with (
        serving(byte_model, rollout={"max_num_seqs": 16}) as one,
        serving(byte_model, rollout={"max_num_seqs": 16}) as two,
    ):
        yield one, two


def connect(*urls: str, notes: list | None = None, bucket_mb: int = 1, **settings) -> ServerRolloutEngine:
    server = RolloutServerConfig(urls=list(urls), **{"wait_seconds": 20.0, "silence_seconds": 20.0, **settings})
    config = RolloutConfig(name="server", server=server)
    config.checkpoint_engine.update_weights_bucket_megabytes = bucket_mb
    return ServerRolloutEngine(config, check_servers(server, 100), (notes if notes is not None else []).append)


@pytest.fixture
def engine(pair, weights):
    """A client of both servers that has sent them the trainer's weights."""
    made = connect(*(server.url for server in pair))
    made.load_weights(weights.items(), 7)
    yield made
    made.close()


def asked(number: int, n: int = 2, tokens: int = 12, first: int = 0) -> list[Request]:
    sampling = SamplingParams(tokens, n=n, seed=5, ignore_eos=True)
    return [Request([3 + i % 50, 4, 5], sampling, first + i) for i in range(number)]


def ids(groups) -> list[list[list[int]]]:
    return [[c.token_ids for c in group] for group in groups]


def test_samples_are_those_of_an_engine_in_this_process_and_both_servers_draw_them(engine, pair, direct):
    before = [server.service.loop.totals.response_tokens for server in pair]
    answers = engine.generate(asked(20))
    expected = direct.generate(asked(20))
    assert ids(answers) == ids(expected)
    for mine, theirs in zip(answers[3], expected[3]):
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        assert (mine.finish_reason, mine.version) == ("length", 7)
    drawn = [server.service.loop.totals.response_tokens - b for server, b in zip(pair, before)]
    assert sum(drawn) == 20 * 2 * 12 == engine.stats.response_tokens
    assert min(drawn) >= 20 * 2 * 12 / 4
    assert engine.stats.prompt_tokens == 60
    assert (engine.dtype, engine.native) == (torch.float32, True)


def test_new_weights_change_what_is_drawn_and_its_version(engine, pair, weights, direct):
    old = ids(engine.generate(asked(2)))
    engine.load_weights(((name, tensor * 1.3) for name, tensor in weights.items()), 8)
    answers = engine.generate(asked(2))
    assert {c.version for group in answers for c in group} == {8} == {engine.version}
    assert ids(answers) != old
    assert {server.state()["version"] for server in pair} == {8}
    engine.load_weights(weights.items(), 9)
    assert ids(engine.generate(asked(2))) == old == ids(direct.generate(asked(2)))


def test_weights_through_a_folder(pair, weights, direct, tmp_path):
    engine = connect(*(server.url for server in pair), weights_folder=str(tmp_path))
    engine.load_weights(weights.items(), 1)
    engine.load_weights(weights.items(), 2)
    assert ids(engine.generate(asked(3))) == ids(direct.generate(asked(3)))
    assert len(list(tmp_path.iterdir())) == 1  # the newest alone
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_server_with_other_weights_is_noticed_and_gets_the_right_ones(pair, weights, direct):
    notes: list[str] = []
    engine = connect(*(server.url for server in pair), notes=notes)
    engine.load_weights(weights.items(), 3)
    body = save({name: tensor * 2 for name, tensor in weights.items()})
    query = {"update": "x", "part": 0, "last": True, "version": 3, "label": "another run's"}
    httpx.post(f"{pair[0].url}/update_weights", params=query, content=body, headers=BEARER).raise_for_status()
    assert ids(engine.generate(asked(20))) == ids(direct.generate(asked(20)))
    labels = [server.wait_for(lambda state: state["weights"] != "another run's")["weights"] for server in pair]
    assert labels[0] == labels[1]
    engine.close()


def test_samples_come_as_they_finish_and_an_abort_brings_the_rest(engine):
    long = SamplingParams(4000, n=2, ignore_eos=True)
    requests = [*asked(3, tokens=5), Request([9, 9], long, 9), Request([8, 8], long, 10)]
    order, came = [], {}
    for number, sample, completion in engine.stream(requests):
        order.append(number)
        came[number, sample] = completion
        if len(order) == 6:
            assert set(order) == {0, 1, 2}
            engine.abort([3, 4])
    assert len(came) == len(order) == 10
    for number in (3, 4):
        assert came[number, 0].finish_reason == came[number, 1].finish_reason == "abort"
        assert len(came[number, 0].token_ids) < 4000


def test_an_aborted_request_that_no_server_has_taken_ends_empty(pair, engine):
    for server in pair:
        server.control("/pause").raise_for_status()
    requests = asked(40, n=4)  # more than both servers are given at once
    stream = engine.stream(requests)
    threading.Timer(0.5, lambda: engine.abort(range(40))).start()
    came = {(number, sample): completion for number, sample, completion in stream}
    for server in pair:
        server.control("/resume").raise_for_status()
    assert len(came) == 160
    assert {c.finish_reason for c in came.values()} == {"abort"}
    assert all(c.token_ids == [] for c in came.values())


def test_leaving_a_stream_frees_the_servers(engine, pair, direct):
    stream = engine.stream([*asked(1, n=1, tokens=2), *asked(6, tokens=4000)])
    next(stream)
    with pytest.raises(RuntimeError, match="one stream at a time"):
        engine.generate(asked(1))
    stream.close()
    for server in pair:
        server.wait_for(lambda state: state["slots_used"] == state["waiting"] == 0, seconds=10)
    assert ids(engine.generate(asked(2))) == ids(direct.generate(asked(2)))


def test_requests_join_a_stream(engine, direct):
    batches = [asked(2), [], asked(3, first=2), None]
    sampling = SamplingParams(12, seed=5, ignore_eos=True)
    feed = Feed(take=lambda idle: batches.pop(0), sampling=sampling, longest=100, samples=16)
    came = {(number, sample): completion for number, sample, completion in engine.stream([], feed)}
    expected = direct.generate([*asked(2), *asked(3, first=2)])
    assert {key: c.token_ids for key, c in came.items()} == {
        (i, j): c.token_ids for i, group in enumerate(expected) for j, c in enumerate(group)
    }


def test_what_a_server_refuses_is_the_users_error(engine, weights):
    with pytest.raises(UserError, match="may reach 5003 tokens"):
        engine.generate(asked(1, tokens=5000))
    with pytest.raises(CheckpointError, match=r"rollout server http.*model\.norm\.weight has shape \[3\]"):
        engine.load_weights({**weights, "model.norm.weight": torch.ones(3)}.items(), 8)
    engine.load_weights(weights.items(), 8)
    assert len(engine.generate(asked(1))[0]) == 2


def test_a_sleeping_server_wakes_for_the_weights(pair, weights, direct):
    engine = connect(*(server.url for server in pair), shares_devices=True)
    engine.load_weights(weights.items(), 1)
    engine.sleep()
    wait_until(lambda: {server.state()["status"] for server in pair} == {"sleeping"})  # a slow one may come later
    engine.wake()
    engine.load_weights(weights.items(), 2)
    assert ids(engine.generate(asked(2))) == ids(direct.generate(asked(2)))
    engine.close()


def test_a_server_that_comes_while_the_others_sleep_sleeps_too(byte_model, pair, weights, direct):
    port = free_port()
    engine = connect(pair[0].url, f"http://127.0.0.1:{port}", shares_devices=True)
    engine.load_weights(weights.items(), 1)
    engine.sleep()
    with serving(byte_model, port=port, rollout={"max_num_seqs": 16}) as late:
        late.wait_for(lambda state: state["status"] == "sleeping", 30)
        assert late.state()["weights"] == "as loaded"  # it would be sent some that the trainer is about to replace
        engine.wake()
        engine.load_weights(weights.items(), 2)
        assert late.state()["status"] == "ok"
        assert late.state()["weights"] == pair[0].state()["weights"]
        assert ids(engine.generate(asked(2))) == ids(direct.generate(asked(2)))
        engine.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def wait_until(condition, seconds=60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.e2e
def test_a_killed_server_costs_nothing_and_is_used_again_when_it_is_back(byte_model, weights, direct):
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    processes = [start(byte_model, port, TOKEN) for port in ports]
    notes: list[str] = []
    try:
        wait_until(lambda: all(map(answers, urls)))
        engine = connect(*urls, notes=notes)
        engine.load_weights(weights.items(), 7)
        came = []
        for item in engine.stream(asked(16, n=3, tokens=150)):
            came.append(item)
            if len(came) == 1:
                os.kill(processes[0].pid, signal.SIGKILL)  # with requests inside
        assert sorted((number, sample) for number, sample, _ in came) == [(i, j) for i in range(16) for j in range(3)]
        expected = direct.generate(asked(16, n=3, tokens=150))
        assert all(c.token_ids == expected[i][j].token_ids for i, j, c in came)
        assert any(f"{urls[0]} is lost" in note for note in notes)
        processes[0].join()
        processes[0] = start(byte_model, ports[0], TOKEN)
        wait_until(lambda: len(engine._fleet.ready) == 2)
        os.kill(
            processes[1].pid, signal.SIGSTOP
        )  # it hangs; the one that is back has the right weights and does it all
        for http in [engine._fleet.http, *engine._fleet.remotes[1].lanes]:
            http.timeout = httpx.Timeout(5.0, read=1.5)
        assert ids(engine.generate(asked(6))) == ids(direct.generate(asked(6)))
        engine.close()
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_without_any_server_the_run_ends_with_their_names(byte_model, weights):
    with serving(byte_model) as server:
        engine = connect(server.url, wait_seconds=1.0)
        engine.load_weights(weights.items(), 1)
    with pytest.raises(WorkerDied, match=rf"no rollout server was ready for 1 seconds.*{server.url}: no connection"):
        engine.generate(asked(2))
    with pytest.raises(WorkerDied):
        engine.load_weights(weights.items(), 2)
    engine.close()


def test_servers_are_checked_before_the_launch(pair, byte_model, monkeypatch):
    one, two = pair
    found = check_servers(RolloutServerConfig(urls=[one.url, "http://127.0.0.1:1"]), 4096)
    assert (found.dtype, found.engines) == (torch.float32, {"native"})
    assert "http://127.0.0.1:1 does not answer" in found.notices[0]
    config = AutoModelForCausalLM.from_pretrained(byte_model).config
    found.check_model(config)
    config.vocab_size = 300
    with pytest.raises(
        ConfigError, match=r"has a qwen2 model of 259 tokens, and actor_rollout_ref.model.path a qwen2 model of 300"
    ):
        found.check_model(config)
    with pytest.raises(ConfigError, match="no server answers"):
        check_servers(RolloutServerConfig(urls=["http://127.0.0.1:1"]), 10)
    with pytest.raises(ConfigError, match=r"takes 4096 tokens.*is 5000.*rollout.max_model_len=5000"):
        check_servers(RolloutServerConfig(urls=[two.url]), 5000)
    monkeypatch.setenv("OTHER", "wrong")
    with pytest.raises(ConfigError, match="does not take the token in OTHER"):
        check_servers(RolloutServerConfig(urls=[one.url], token_env="OTHER"), 10)
    with pytest.raises(ConfigError, match="environment variable NOT_SET"):
        check_servers(RolloutServerConfig(urls=[one.url], token_env="NOT_SET"), 10)
