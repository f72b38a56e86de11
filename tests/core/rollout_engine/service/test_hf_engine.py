"""A server around transformers' own generation: requests join between batches, and text comes when a sample is finished."""

import openai
import pytest

from .conftest import serving


@pytest.fixture(scope="module")
def server(byte_model):
    with serving(byte_model, rollout={"name": "hf", "max_num_seqs": 8, "max_model_len": 1024}) as running:
        yield running


def test_it_draws_the_samples_of_the_native_engine(server, byte_model):
    body = {"prompt_ids": [5, 6, 7], "max_tokens": 8, "n": 2, "seed": 4, "ignore_eos": True}
    mine = server.http.post("/generate", json=body).json()["samples"]
    with serving(byte_model) as native:
        theirs = native.http.post("/generate", json=body).json()["samples"]
    assert server.state()["engine"] == "hf"
    for one, other in zip(mine, theirs, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["log_probs"] == pytest.approx(other["log_probs"], abs=1e-4)


def test_a_stop_text_is_cut_off_although_tokens_are_not_seen_as_they_are_drawn(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        options = {"model": server.service.facts.model, "prompt": "3+4=", "seed": 3, "max_tokens": 30}
        whole = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
        stop = whole[10:12]
        cut = client.completions.create(stop=stop, **options, extra_body={"ignore_eos": True}).choices[0]
        assert (cut.text, cut.finish_reason) == (whole[: whole.find(stop)], "stop")
        pieces = list(client.completions.create(stream=True, **options, extra_body={"ignore_eos": True}))
        assert "".join(piece.choices[0].text for piece in pieces) == whole


def test_a_client_that_goes_frees_its_slots(server):
    body = {"prompt_ids": [5, 6, 7], "max_tokens": 1000, "n": 3, "ignore_eos": True, "stream": "samples"}
    with server.http.stream("POST", "/generate", json=body):
        server.wait_for(lambda state: state["slots_used"] == 3)
    after = server.wait_for(lambda state: state["slots_used"] == 0, seconds=5)
    assert (after["slots_used"], after["running"]) == (0, 0)
