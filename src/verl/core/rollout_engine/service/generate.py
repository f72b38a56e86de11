"""POST /generate: token ids in, token ids, log-probs and the weights' version out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.service.answers import JobStream, events, finished, unless_gone, with_beats
from verl.core.rollout_engine.service.context import Service
from verl.core.rollout_engine.service.jobs import Finished, Job, Refused, Tokens
from verl.core.rollout_engine.service.schemas import GenerateBody

# A stream that has nothing to say sends an empty line after so long, so that its client can tell slow from dead.
BEAT_SECONDS = 5.0


async def generate(request: HTTPRequest) -> Response:
    """The route."""
    service: Service = request.app.state.service
    body = await service.parse(request, GenerateBody)
    job = make_job(service, body)
    service.loop.submit([job])
    if body.stream != "no":
        return JobStream(_lines(job), [job], service.loop, media_type="application/x-ndjson")
    (samples,) = await unless_gone(request, service.loop, [job], finished([job]))
    return JSONResponse({"samples": [sample_json(sample) for sample in samples]})


def make_job(service: Service, body: GenerateBody) -> Job:
    sampling = SamplingParams(
        max_tokens=body.max_tokens,
        n=body.n,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
    )
    request = Request(body.prompt_ids, sampling, body.random_stream, body.first)
    service.check_request(request)
    return Job(request, asyncio.Queue(), body.name, watched=body.stream == "tokens", expects=body.weights)


def sample_json(event: Finished) -> dict[str, Any]:
    """A finished sample as it is sent."""
    completion = event.completion
    return {
        "sample": event.sample,
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "finish_reason": completion.finish_reason,
        "version": completion.version,
        "weights": event.weights.label,
    }


async def _lines(job: Job) -> AsyncIterator[str]:
    """One JSON object a line: tokens as they are drawn (finish_reason null), samples as they finish; or an error."""
    try:
        async for item in with_beats(events([job]), BEAT_SECONDS):
            if item is None:
                yield "\n"
                continue
            event = item[1]
            if isinstance(event, Tokens):
                shown = {"sample": event.sample, "token_ids": event.token_ids, "log_probs": event.log_probs}
                yield json.dumps({**shown, "finish_reason": None}) + "\n"
            else:
                yield json.dumps(sample_json(event)) + "\n"
    except Refused as refused:
        yield json.dumps({"error": {"status": refused.status, "message": refused.message}}) + "\n"
