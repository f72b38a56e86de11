"""The routes that change a server: who may call them, and what they do to requests that run and wait."""

import json
import threading

import httpx
import pytest
import torch
from safetensors.torch import save, save_file
from transformers import AutoModelForCausalLM

from .conftest import BEARER, serving

LONG = {"prompt_ids": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt_ids": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "seed": 2}
CONTROL = ("/update_weights", "/pause", "/resume", "/abort", "/sleep", "/wake", "/check")


@pytest.fixture(scope="module")
def own(byte_model):
    """A server that tests may change."""
    with serving(byte_model, rollout={"max_num_seqs": 8}) as running:
        yield running


def other_weights(model, scale=1.5) -> dict[str, torch.Tensor]:
    """Those of the model, each made larger: other tokens come."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    return {name: tensor * scale for name, tensor in weights.items() if name != "lm_head.weight"}


def part(own, tensors, **query) -> httpx.Response:
    body = save(tensors) if isinstance(tensors, dict) else tensors
    kind = {"Content-Type": "application/octet-stream"}
    return own.http.post("/update_weights", params=query, content=body, headers={**BEARER, **kind}, timeout=30)


def tokens(own, **changes) -> list[int]:
    answer = own.http.post("/generate", json={**SHORT, **changes})
    answer.raise_for_status()
    return answer.json()["samples"][0]["token_ids"]


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "the token"}], ids=str)
def test_without_the_token_nothing_changes(own, path, headers):
    answer = own.http.post(path, headers=headers, content=b"x" * 100)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert own.state()["status"] == "ok"


def test_an_abort_hands_the_tokens_so_far_to_who_waits(own):
    whole = own.http.post("/generate", json={**LONG, "max_tokens": 60}).json()["samples"][0]["token_ids"]
    with own.http.stream("POST", "/generate", json={**LONG, "name": "first", "stream": "tokens"}) as first:
        lines = first.iter_lines()
        for _ in range(5):
            next(lines)
        assert own.control("/abort", json={"names": ["nobody"]}).json()["running"] == 1
        own.control("/abort", json={"names": ["first"]}).raise_for_status()
        last = [json.loads(line) for line in lines if line][-1]
    assert last["finish_reason"] == "abort"
    assert 5 <= len(last["token_ids"]) < 4000
    shared = min(60, len(last["token_ids"]))
    assert last["token_ids"][:shared] == whole[:shared]


def test_an_abort_of_all_answers_those_that_wait_too(own):
    own.control("/pause").raise_for_status()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(own.http.post("/generate", json={**LONG, "n": 2})))
    thread.start()
    own.wait_for(lambda state: state["waiting"] == 1)
    own.control("/abort", json={"names": None}).raise_for_status()
    thread.join(20)
    own.control("/resume").raise_for_status()
    (answer,) = answers
    assert [(s["token_ids"], s["finish_reason"]) for s in answer.json()["samples"]] == [([], "abort")] * 2


def test_a_pause_lets_what_runs_finish_and_holds_the_rest(own):
    running, waiting = [], []
    first = threading.Thread(target=lambda: running.append(tokens(own, max_tokens=300)))
    first.start()
    own.wait_for(lambda state: state["running"] == 1)
    assert own.control("/pause").json() | {"waiting": 0} == {
        "version": 0, "weights": "as loaded", "paused": True, "sleeping": False, "running": 0, "waiting": 0,
    }  # fmt: skip
    first.join(20)
    assert len(running[0]) == 300
    second = threading.Thread(target=lambda: waiting.append(tokens(own)))
    second.start()
    own.wait_for(lambda state: state["waiting"] == 1)
    assert waiting == []
    own.control("/resume").raise_for_status()
    second.join(20)
    assert len(waiting[0]) == 6


def test_a_sleeping_engine_says_so_and_wakes(own):
    before = tokens(own)
    assert own.control("/sleep", json={"mode": "abort"}).json()["sleeping"] is True
    refused = own.http.post("/generate", json=SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert own.control("/wake").json()["sleeping"] is False
    assert tokens(own) == before


def test_weights_in_parts_take_the_place_of_the_old_ones(byte_model):
    weights = other_weights(byte_model)
    names = sorted(weights)
    halves = [{n: weights[n] for n in names[:7]}, {n: weights[n] for n in names[7:]}]
    with serving(byte_model) as own:
        before = tokens(own)
        query = {"update": "u", "version": 3, "label": "run-3"}
        part(own, halves[0], part=0, **query).raise_for_status()
        own.wait_for(lambda state: state["weights"] is None)  # none that are whole
        meanwhile = []
        thread = threading.Thread(target=lambda: meanwhile.append(own.http.post("/generate", json=SHORT).json()))
        thread.start()
        own.wait_for(lambda state: state["waiting"] == 1)
        answer = part(own, halves[1], part=1, last=True, **query)
        assert (answer.json()["version"], answer.json()["weights"]) == (3, "run-3")
        thread.join(20)
        (sample,) = meanwhile[0]["samples"]
        assert (sample["version"], sample["weights"]) == (3, "run-3")
        assert sample["token_ids"] != before
        stale = own.http.post("/generate", json={**SHORT, "weights": "run-4"})
        assert stale.status_code == 409
        assert "run-3" in stale.json()["error"]["message"]
        assert tokens(own, weights="run-3") == sample["token_ids"]


def test_weights_of_a_folder(byte_model, tmp_path):
    save_file(other_weights(byte_model), tmp_path / "model.safetensors")
    with serving(byte_model) as own:
        body = {"path": str(tmp_path), "version": 8, "label": "x"}
        answer = own.control("/update_weights", json=body)
        assert (answer.json()["version"], answer.json()["weights"]) == (8, "x")
        parts = tokens(own)
        part(own, other_weights(byte_model), update="u", part=0, last=True, version=9, label="y").raise_for_status()
        assert tokens(own) == parts
        as_curl_sends_it = {**BEARER, "content-type": "application/x-www-form-urlencoded"}
        answer = own.http.post("/update_weights", content=json.dumps(body), headers=as_curl_sends_it)
        assert answer.json()["version"] == 8
        missing = own.control("/update_weights", json={**body, "path": str(tmp_path / "none")})
        assert missing.status_code == 400
        assert tokens(own) == parts


def test_weights_that_do_not_fit_are_told_of_and_nothing_is_generated_until_whole_ones_come(byte_model):
    weights = other_weights(byte_model)
    good = {"update": "b", "part": 0, "last": True, "version": 2, "label": "good"}
    bad = {**good, "update": "a", "label": "bad"}
    with serving(byte_model) as own:
        broken = {**weights, "model.norm.weight": torch.ones(3)}
        answer = part(own, broken, **bad)
        assert answer.status_code == 400
        assert "model.norm.weight has shape [3]" in answer.json()["error"]["message"]
        assert own.state()["status"] == "no weights"
        assert own.http.post("/generate", json=SHORT).status_code == 503
        assert part(own, b"no tensors", **bad).status_code == 400
        assert part(own, weights, **{**bad, "part": 3}).status_code == 409
        assert part(own, weights, **{**bad, "version": "x"}).status_code == 422
        assert part(own, weights, **good).json()["weights"] == "good"
        assert len(tokens(own)) == 6


def test_a_sender_that_died_in_the_middle_is_forgotten_when_another_begins(byte_model):
    weights = other_weights(byte_model)
    first = dict(list(weights.items())[:3])
    with serving(byte_model) as own:
        part(own, first, update="dead", part=0, version=1, label="dead").raise_for_status()
        whole = part(own, weights, update="alive", part=0, last=True, version=2, label="alive")
        assert whole.json()["weights"] == "alive"
        late = part(own, first, update="dead", part=1, last=True, version=1, label="dead")
        assert late.status_code == 409


def test_a_server_ends_although_half_of_the_weights_are_missing(byte_model):
    first = dict(list(other_weights(byte_model).items())[:3])
    with serving(byte_model) as own:
        part(own, first, update="u", part=0, version=1, label="half").raise_for_status()
        own.wait_for(lambda state: state["weights"] is None)
    with pytest.raises(httpx.ConnectError):
        httpx.get(own.url)


def test_an_update_can_end_what_runs(byte_model):
    weights = other_weights(byte_model)
    with serving(byte_model) as own, own.http.stream("POST", "/generate", json={**LONG, "stream": "samples"}) as answer:
        own.wait_for(lambda state: state["running"] == 1)
        part(own, weights, update="u", part=0, last=True, version=1, label="new", mode="abort").raise_for_status()
        (sample,) = [json.loads(line) for line in answer.iter_lines() if line]
        assert (sample["finish_reason"], sample["version"], sample["weights"]) == ("abort", 0, "as loaded")
