"""Routes, status codes and limits of a running server, and what happens to a request whose client goes."""

import http.client
import json
import threading
import time

import httpx
import pytest

LONG = {"prompt_ids": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}


def generate(server, **changes) -> httpx.Response:
    return server.http.post("/generate", json={"prompt_ids": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, **changes})


def test_samples_are_those_of_the_engine(server):
    from verl.core.rollout_engine.api import Request, SamplingParams

    answer = generate(server, n=3, seed=11, random_stream=4, temperature=0.7)
    assert answer.status_code == 200
    samples = answer.json()["samples"]
    engine = server.service.loop.engine
    asked = Request([5, 6, 7], SamplingParams(6, n=3, temperature=0.7, seed=11), 4)
    (direct,) = server.service.loop.call(lambda: engine.generate([asked]), abort=False).result(30)
    assert [s["token_ids"] for s in samples] == [c.token_ids for c in direct]
    for sample, completion in zip(samples, direct):
        assert sample["log_probs"] == pytest.approx(completion.log_probs, abs=1e-5)
        assert (sample["finish_reason"], sample["version"], sample["weights"]) == ("length", 0, "as loaded")


def test_a_stream_tells_tokens_as_they_are_drawn_and_then_the_samples(server):
    answer = generate(server, n=2, seed=3, stream="tokens", max_tokens=9)
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    whole = {line["sample"]: line for line in lines if line["finish_reason"]}
    assert len(whole) == 2
    for number, sample in whole.items():
        pieces = [line for line in lines if line["sample"] == number and line["finish_reason"] is None]
        shown = [token for piece in pieces for token in piece["token_ids"]]
        assert len(pieces) >= 4
        assert shown == sample["token_ids"][: len(shown)]
        assert len(sample["token_ids"]) == 9
    by_sample = generate(server, n=2, seed=3, stream="samples", max_tokens=9)
    assert [json.loads(line)["finish_reason"] for line in by_sample.text.splitlines() if line] == ["length", "length"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/generate", b"{not json", 400, "not JSON"),
        ("POST", "/generate", b'{"prompt_ids": "x", "max_tokens": 1}', 422, "prompt_ids"),
        ("POST", "/generate", b'{"prompt_ids": [], "max_tokens": 1}', 422, "prompt_ids"),
        ("POST", "/generate", b'{"prompt_ids": [1], "max_tokens": 0}', 422, "max_tokens"),
        ("POST", "/generate", b'{"prompt_ids": [1], "max_tokens": 1, "temprature": 1}', 422, "temprature"),
        ("POST", "/generate", b'{"prompt_ids": [1], "max_tokens": 1, "temperature": NaN}', 422, "temperature"),
        ("POST", "/generate", b'{"prompt_ids": [-1], "max_tokens": 1}', 422, "prompt_ids"),
        ("POST", "/generate", b'{"prompt_ids": [99999], "max_tokens": 1}', 400, "token 99999; the vocabulary has"),
        ("POST", "/generate", b'{"prompt_ids": [1], "max_tokens": 4096}', 400, "may reach 4097 tokens"),
        ("POST", "/generate", b"", 422, "prompt_ids"),
        ("POST", "/v1/completions", b'{"prompt": "a", "logprobs": 5}', 422, "logprobs"),
        ("POST", "/v1/completions", b'{"prompt": "a", "best_of": 3}', 422, "best_of=3 is not supported"),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "other"}', 404, "'other' is not served"),
        ("POST", "/v1/completions", b'{"prompt": ""}', 400, "no tokens"),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 422, "messages"),
        ("GET", "/nowhere", None, 404, "no route /nowhere"),
        ("GET", "/generate", None, 405, "does not take GET"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_what_is_wrong(server, method, path, body, status, words):
    answer = server.http.request(method, path, content=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_body_over_the_limit_is_not_read(server):
    body = b'{"prompt": "' + b"x" * 70_000 + b'"}'
    assert server.http.post("/v1/completions", content=body).status_code == 413
    pieces = (body[i : i + 10_000] for i in range(0, len(body), 10_000))  # without a content-length
    assert server.http.post("/v1/completions", content=pieces).status_code == 413
    assert generate(server).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 413), ("/pause", 401), ("/nowhere", 404), ("/health", 405)]
)
def test_an_error_before_the_body_is_read_leaves_the_connection_usable(server, path, status):
    """The body comes after the head: a server that closes the connection on it breaks what the client sends next."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.connect()
    connection.auto_open = 0  # a closed connection is an error
    for _ in range(2):
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", "100000")
        connection.endheaders()
        time.sleep(0.05)
        connection.send(b" " * 100_000)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def test_more_requests_than_may_wait_are_refused_and_the_others_come(server):
    server.control("/pause").raise_for_status()
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(generate(server))) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda state: state["waiting"] == 4)
    refused = generate(server)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert server.control("/resume").json()["paused"] is False
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200] * 4


@pytest.mark.parametrize("stream", ["tokens", "samples", "no"])
def test_a_client_that_goes_frees_its_slots(server, stream):
    before = server.service.loop.totals.abort
    with httpx.Client(base_url=server.url) as leaving:
        if stream == "tokens":
            with leaving.stream("POST", "/generate", json={**LONG, "n": 2, "stream": stream}) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert server.state()["slots_used"] == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/generate", json={**LONG, "n": 2, "stream": stream}, timeout=0.3).read()
    server.wait_for(lambda state: state["slots_used"] == 0, seconds=3)
    assert server.service.loop.totals.abort == before + 2


def test_a_client_that_goes_while_it_waits_is_forgotten(server):
    server.control("/pause").raise_for_status()
    with httpx.Client(base_url=server.url) as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post("/generate", json=LONG, timeout=0.3)
    server.wait_for(lambda state: state["waiting"] == 0)
    server.control("/resume").raise_for_status()


def test_a_request_joins_the_batch_that_is_running(server):
    with server.http.stream("POST", "/generate", json={**LONG, "stream": "tokens"}) as running:
        lines = running.iter_lines()
        next(lines)
        assert generate(server).status_code == 200  # and not after the other's thousands of tokens
        assert server.state()["slots_used"] == 1


def test_a_request_of_another_rule_comes_when_the_batch_has_drained(server):
    with server.http.stream("POST", "/generate", json={**LONG, "max_tokens": 400, "stream": "tokens"}) as running:
        lines = running.iter_lines()
        next(lines)
        other = generate(server, temperature=0.0)
        assert other.status_code == 200
        (last,) = [json.loads(line) for line in lines if line and json.loads(line)["finish_reason"]]
    assert len(last["token_ids"]) == 400


def test_metrics_count_what_was_answered(server):
    def value(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    drawn, answered = (
        value("verl_response_tokens_total"),
        value('verl_http_requests_total{route="/generate",status="200"}'),
    )
    generate(server, n=2, max_tokens=5)
    assert value("verl_response_tokens_total") == drawn + 10
    assert value('verl_http_requests_total{route="/generate",status="200"}') == answered + 1
    assert value("verl_slots_used") == 0
    assert value("verl_slots ") == 8
