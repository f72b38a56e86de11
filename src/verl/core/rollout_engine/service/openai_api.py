"""Routes that OpenAI's clients talk to: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.service.answers import JobStream, events, unless_gone
from verl.core.rollout_engine.service.choices import ChatForm, Choice, CompletionForm, Form
from verl.core.rollout_engine.service.context import Service
from verl.core.rollout_engine.service.jobs import Job, Refused, Tokens
from verl.core.rollout_engine.service.schemas import ChatBody, CompletionBody, OpenAIBody
from verl.data.schema import PromptRow
from verl.data.tokenizing import tokenize_rows
from verl.errors import DataError

DEFAULT_COMPLETION_TOKENS = 16


async def models(request: HTTPRequest) -> Response:
    """The one model that is served."""
    facts = request.app.state.service.facts
    model = {"id": facts.model, "object": "model", "created": facts.started, "owned_by": "verl"}
    return JSONResponse({"object": "list", "data": [{**model, "max_model_len": facts.longest}]})


async def completions(request: HTTPRequest) -> Response:
    """Text that goes on from each prompt, which is a text or its token ids."""
    service: Service = request.app.state.service
    body = await service.parse(request, CompletionBody)
    prompts = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    ids = [_encode(service, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    form = CompletionForm(service.facts.model, service.tokenizer, body.logprobs is not None)
    return await _answer(request, service, body, ids, body.max_tokens or DEFAULT_COMPLETION_TOKENS, form)


async def chat(request: HTTPRequest) -> Response:
    """The assistant's next message, through the model's chat template."""
    service: Service = request.app.state.service
    body = await service.parse(request, ChatBody)
    ids = _render(service, body)
    most = body.max_completion_tokens or body.max_tokens or max(1, service.facts.longest - len(ids))
    form = ChatForm(service.facts.model, service.tokenizer, body.logprobs)
    return await _answer(request, service, body, [ids], most, form)


ROUTES = [
    Route("/v1/models", models),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
]


async def _answer(
    request: HTTPRequest, service: Service, body: OpenAIBody, prompts: list[list[int]], most: int, form: Form
) -> Response:
    if body.model not in (None, service.facts.model):
        raise Refused(
            404, f"The model {body.model!r} is not served here, but {service.facts.model!r}.", "model_not_found"
        )
    jobs = _make_jobs(service, body, prompts, most)
    choices = _Choices(service, jobs, body.stops)
    service.loop.submit(jobs)
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        lines = _stream(choices, form, with_usage)
        return JobStream(lines, jobs, service.loop, media_type="text/event-stream")
    await unless_gone(request, service.loop, jobs, choices.to_the_end())
    return JSONResponse(form.whole(choices.ordered, choices.prompt_tokens))


def _make_jobs(service: Service, body: OpenAIBody, prompts: list[list[int]], most: int) -> list[Job]:
    """A job a prompt. Without a seed each request has random streams of its own."""
    sampling = SamplingParams(
        max_tokens=most,
        n=body.n,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop_token_ids=tuple(sorted({*service.stop_token_ids, *body.stop_token_ids})),
        ignore_eos=body.ignore_eos,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
    )
    queue: asyncio.Queue = asyncio.Queue()
    jobs = []
    for number, ids in enumerate(prompts):
        request = Request(ids, sampling, number)
        service.check_request(request)
        # Stop texts are looked for while the tokens come, so that what follows them is not generated.
        jobs.append(Job(request, queue, watched=body.stream or bool(body.stops)))
    return jobs


class _Choices:
    """The choices of an answer, fed by the events of its jobs."""

    def __init__(self, service: Service, jobs: list[Job], stops: tuple[str, ...]):
        self._loop, self._of = service.loop, {}
        self.ordered: list[Choice] = []
        self.prompt_tokens = sum(len(job.request.prompt_ids) for job in jobs)
        for job in jobs:
            first = len(self.ordered)
            self._of[job] = [Choice(first + j, service.tokenizer, stops) for j in range(job.request.sampling.n)]
            self.ordered += self._of[job]

    async def pieces(self) -> AsyncIterator[tuple[Choice, str]]:
        """(choice, its new text), until all are finished."""
        async with aclosing(events(list(self._of))) as coming:
            async for job, event in coming:
                choice = self._of[job][event.sample]
                if choice.finish_reason is not None:
                    continue  # a stop text has ended it, and the engine goes on with the job's other samples
                drawn = isinstance(event, Tokens)
                text = choice.add(event.token_ids, event.log_probs) if drawn else choice.finish(event.completion)
                yield choice, text
                if all(other.finish_reason for other in self.ordered):
                    return
                if all(other.finish_reason for other in self._of[job]):
                    self._loop.abandon([job])

    async def to_the_end(self) -> None:
        async for _ in self.pieces():
            pass


async def _stream(choices: _Choices, form: Form, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: pieces of text, the last of each choice with its finish reason, and [DONE]."""
    try:
        for choice in choices.ordered:
            if first := form.first(choice):
                yield form.event(first)
        async for choice, text in choices.pieces():
            if piece := form.piece(choice, text):
                yield form.event(piece)
        if with_usage:
            yield form.event(form.usage_piece(choices.ordered, choices.prompt_tokens))
    except Refused as refused:
        yield form.event({"error": {"message": refused.message, "type": "server_error", "code": refused.code}})
    yield "data: [DONE]\n\n"


def _encode(service: Service, text: str) -> list[int]:
    ids = service.tokenizer(text)["input_ids"]
    if not ids:
        raise Refused(400, "The prompt has no tokens.", "empty_prompt")
    return ids


def _render(service: Service, body: ChatBody) -> list[int]:
    """Token ids of the conversation up to where the assistant's message begins, as training makes them."""
    row = PromptRow("the request", [message.plain() for message in body.messages], data_source="", ground_truth=None)
    try:
        (ids,) = tokenize_rows([row], service.tokenizer, body.chat_template_kwargs, key="chat_template_kwargs")
    except DataError as error:
        raise Refused(400, str(error), "bad_messages") from None
    return ids
