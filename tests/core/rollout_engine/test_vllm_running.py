"""Requests that join a stream of vLLM's, samples that are looked at while they are drawn, and aborts with what they have."""

import importlib.util
import time

import pytest
import torch

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Feed, Request, SamplingParams
from verl.core.rollout_engine.vllm_engine import VLLMEngine
from verl.errors import ConfigError

from .models import tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
]
LONGEST = 256


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", hidden_size=64, num_attention_heads=2, num_key_value_heads=1).save_pretrained(folder)
    config = RolloutConfig(name="vllm", max_num_seqs=16)
    made = VLLMEngine(folder, device="cpu", dtype=torch.float32, max_model_len=LONGEST, config=config)
    yield made
    made.close()


def request(first: int, tokens: int = 8, n: int = 2) -> Request:
    return Request([first, 4, 5], SamplingParams(tokens, n=n, seed=3), stream=first)


def feed(batches: list, **options) -> Feed:
    """Gives one of `batches` at each call, the last of which is None."""
    sampling = SamplingParams(LONGEST, seed=3)
    return Feed(lambda idle: batches.pop(0) if batches else [], sampling, longest=LONGEST, samples=16, **options)


def test_requests_join_a_stream_and_are_numbered_on(engine):
    alone = engine.generate([request(7), request(8), request(9)])
    batches = [[request(8)], [], [], [request(9)], None]
    came = {(i, j): c.token_ids for i, j, c in engine.stream([request(7)], feed(batches))}
    assert came == {(i, j): c.token_ids for i, group in enumerate(alone) for j, c in enumerate(group)}
    assert engine.stats.response_tokens == sum(map(len, came.values()))


def test_a_sample_goes_on_under_its_own_number(engine):
    ((_, whole),) = engine.generate([request(7, tokens=20)])
    asked = Request([7, 4, 5], SamplingParams(20, seed=3), stream=7, first=1)
    ((alone,),) = engine.generate([asked])
    assert alone.token_ids == whole.token_ids


def test_watched_samples_are_shown_as_they_are_drawn(engine):
    shown: dict = {}

    def show(number, sample, token_ids, log_probs):
        have = shown.setdefault((number, sample), ([], []))
        have[0].extend(token_ids)
        have[1].extend(log_probs)

    watching = feed([[request(7, 40), request(8, 40)], None], show=show, watched={1})
    came = {(i, j): c for i, j, c in engine.stream([], watching)}
    assert set(shown) == {(1, 0), (1, 1)}
    for key, (tokens, log_probs) in shown.items():
        assert len(tokens) >= 30
        assert tokens == came[key].token_ids[: len(tokens)]
        assert log_probs == came[key].log_probs[: len(tokens)]


def test_an_aborted_request_hands_back_what_it_has(engine):
    whole = engine.generate([request(7, 4), request(8, 200)])
    came = {}
    for number, sample, completion in engine.stream([request(7, 4), request(8, 200)]):
        engine.abort([1])
        came[number, sample] = completion
    assert [came[0, j].token_ids for j in range(2)] == [c.token_ids for c in whole[0]]
    for j in range(2):
        assert came[1, j].finish_reason == "abort"
        drawn = came[1, j].token_ids
        assert 3 <= len(drawn) < 200
        assert drawn == whole[1][j].token_ids[: len(drawn)]
        assert came[1, j].log_probs == pytest.approx(whole[1][j].log_probs[: len(drawn)], abs=1e-5)
    assert [c.token_ids for c in engine.generate([request(7, 4)])[0]] == [c.token_ids for c in whole[0]]


def test_a_stream_that_is_too_long_or_open_already_is_refused(engine):
    with pytest.raises(ConfigError, match=str(LONGEST)):
        engine.stream([], Feed(lambda idle: None, SamplingParams(4), longest=LONGEST + 1, samples=1))
    stream = engine.stream([request(7), request(8, 100)])
    next(stream)
    with pytest.raises(RuntimeError, match="stream of this engine is open"):
        engine.generate([request(7)])
    stream.close()
    assert len(engine.generate([request(7)])[0]) == 2


def test_a_server_streams_from_vllm_and_ends_what_its_client_leaves(tmp_path):
    import openai
    from examples.tiny import make_model

    from .service.conftest import serving

    tokenizer = make_model.byte_tokenizer()
    make_model.tiny_qwen2(tokenizer, hidden=128, layers=1, max_length=4096).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with serving(tmp_path, rollout={"name": "vllm", "max_num_seqs": 8, "max_model_len": 2048}) as server:
        assert server.state()["engine"] == "vllm"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            options = {"model": server.service.facts.model, "prompt": "3+4=", "seed": 7, "max_tokens": 40}
            whole = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
            pieces = list(client.completions.create(stream=True, **options, extra_body={"ignore_eos": True}))
            assert len(pieces) > 5
            assert "".join(piece.choices[0].text for piece in pieces) == whole
            leaving = client.completions.create(
                stream=True, **{**options, "max_tokens": 2000}, extra_body={"ignore_eos": True}
            )
            next(iter(leaving))
            leaving.close()
            began = time.monotonic()
            server.wait_for(lambda state: state["slots_used"] == 0, seconds=3)
            assert time.monotonic() - began < 3
