"""OpenAI's own Python client against the server, and what it gets against what the engine and the tokenizer give."""

import openai
import pytest

from verl.core.rollout_engine.api import Request, SamplingParams


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(server):
    """(token ids, log-probs, text) of n samples that go on from a text, by the engine called directly."""

    def draw(text, *, n=1, seed=7, max_tokens=12, temperature=1.0):
        tokenizer, engine = server.service.tokenizer, server.service.loop.engine
        sampling = SamplingParams(
            max_tokens, n=n, temperature=temperature, seed=seed, stop_token_ids=server.service.stop_token_ids
        )
        asked = [Request(tokenizer(text)["input_ids"], sampling)]
        (drawn,) = server.service.loop.call(lambda: engine.generate(asked), abort=False).result(30)
        return [(c.token_ids, c.log_probs, tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in drawn]

    return draw


def test_the_model_is_listed(client, server):
    (model,) = client.models.list().data
    assert model.id == server.service.facts.model


def test_completion(client, server, expected):
    name = server.service.facts.model
    answer = client.completions.create(model=name, prompt="3+4=", n=2, seed=7, max_tokens=12, logprobs=0)
    for choice, (ids, log_probs, text) in zip(answer.choices, expected("3+4=", n=2), strict=True):
        assert choice.text == text
        assert choice.logprobs.token_logprobs == pytest.approx(log_probs, abs=1e-5)
        assert choice.logprobs.tokens == [server.service.tokenizer.decode([i]) for i in ids]
        assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == sum(len(ids) for ids, *_ in expected("3+4=", n=2))


def test_completion_of_token_ids_and_of_several_prompts(client, server):
    name, ids = server.service.facts.model, server.service.tokenizer("3+4=")["input_ids"]
    options = {"model": name, "seed": 7, "max_tokens": 6}
    by_text = client.completions.create(prompt="3+4=", **options).choices[0].text
    assert client.completions.create(prompt=ids, **options).choices[0].text == by_text
    both = client.completions.create(prompt=["3+4=", "9"], n=2, **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == by_text
    assert both.usage.prompt_tokens == 5


def test_streamed_completion_gives_the_same_text(client, server, expected):
    name = server.service.facts.model
    options = {"model": name, "prompt": "3+4=", "n": 2, "seed": 7, "max_tokens": 12, "logprobs": 0}
    texts, log_probs, reasons, usage = ["", ""], [[], []], {}, None
    for piece in client.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            log_probs[choice.index] += choice.logprobs.token_logprobs
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    wanted = expected("3+4=", n=2)
    assert texts == [text for *_, text in wanted]
    for got, (_, drawn, _) in zip(log_probs, wanted):
        assert got == pytest.approx(drawn, abs=1e-5)
    assert set(reasons) == {0, 1}
    assert usage.completion_tokens == sum(len(ids) for ids, *_ in wanted)


def test_chat_goes_through_the_template_and_streams_the_same(client, server):
    messages = [{"role": "user", "content": [{"type": "text", "text": "3+4="}]}]
    options = {"model": server.service.facts.model, "messages": messages, "seed": 5, "max_completion_tokens": 10}
    whole = client.chat.completions.create(logprobs=True, **options)
    tokenizer = server.service.tokenizer
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "3+4="}], add_generation_prompt=True)
        ids = ids if isinstance(ids, list) else ids["input_ids"]
    else:
        ids = tokenizer("3+4=")["input_ids"]
    assert whole.usage.prompt_tokens == len(ids)
    tokens = [entry.token for entry in whole.choices[0].logprobs.content]
    assert len(tokens) == whole.usage.completion_tokens
    pieces = list(client.chat.completions.create(stream=True, **options))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_template_that_rejects_a_conversation_is_told_in_the_requests_own_words(server, monkeypatch):
    refuses = "{% if wanted is undefined %}{{ raise_exception('say what is wanted') }}{% endif %}question"
    monkeypatch.setattr(server.service.tokenizer, "chat_template", refuses)
    body = {"model": server.service.facts.model, "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 1}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("the request: the model's chat template rejects the prompt (roles ['user']): say what is")
    assert message.endswith("Correct the messages or chat_template_kwargs.")
    body["chat_template_kwargs"] = {"wanted": "a sum"}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_stop_text_ends_the_response_and_frees_its_slot(client, server, expected):
    ((_, _, text),) = expected("3+4=", seed=3, max_tokens=40)
    stop = text[10:12]
    place = text.find(stop)
    options = {"model": server.service.facts.model, "prompt": "3+4=", "seed": 3, "stop": [stop], "max_tokens": 3000}
    before = server.service.loop.totals.response_tokens
    choice = client.completions.create(**options).choices[0]
    assert (choice.text, choice.finish_reason) == (text[:place], "stop")
    server.wait_for(lambda state: state["slots_used"] == 0, seconds=5)
    assert server.service.loop.totals.response_tokens < before + 1000
    streamed = list(client.completions.create(stream=True, **options))
    assert "".join(piece.choices[0].text for piece in streamed) == text[:place]
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_without_a_seed_answers_differ_and_greedy_ones_do_not(client, server):
    options = {"model": server.service.facts.model, "prompt": "3+4=", "max_tokens": 20}
    assert len({client.completions.create(**options).choices[0].text for _ in range(4)}) == 4
    assert len({client.completions.create(temperature=0, **options).choices[0].text for _ in range(3)}) == 1


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.BadRequestError, match="at most 4096"):
        client.completions.create(model=server.service.facts.model, prompt="1", max_tokens=5000)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "1"}])
    with pytest.raises(openai.UnprocessableEntityError, match="presence_penalty"):
        client.completions.create(model=server.service.facts.model, prompt="1", presence_penalty=1.0)
