"""What all routes of one server share."""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from verl.core.rollout_engine.api import Request
from verl.core.rollout_engine.service.jobs import Refused
from verl.core.rollout_engine.service.loop import EngineLoop
from verl.core.rollout_engine.service.metrics import Metrics
from verl.core.rollout_engine.service.weight_intake import WeightIntake

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

B = TypeVar("B", bound=BaseModel)

# Of a body that is not wanted.
DISCARD_BYTES = 64 << 20
DISCARD_SECONDS = 2.0


@dataclass(frozen=True)
class Facts:
    """What a client may know of the server. longest: bound of prompt plus response, in tokens. dtype: of generation."""

    model: str
    model_type: str
    engine: str
    dtype: str
    vocab_size: int
    longest: int
    slots: int
    started: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Service:
    """One server. token: of the control routes. stop_token_ids: the model's end tokens. body_bytes: largest request."""

    loop: EngineLoop
    tokenizer: PreTrainedTokenizerBase
    facts: Facts
    token: str
    stop_token_ids: tuple[int, ...]
    body_bytes: int
    metrics: Metrics
    intake: WeightIntake

    async def end(self) -> None:
        """End what runs with what it has; nothing is taken after this. Twice is as once."""
        self.intake.close()
        await asyncio.to_thread(self.loop.close)

    def check_token(self, request: HTTPRequest) -> None:
        """Refused unless the request carries the bearer token."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise Refused(401, "This route takes the server's token: Authorization: Bearer TOKEN.", "wrong_token")

    async def parse(self, request: HTTPRequest, body_class: type[B]) -> B:
        """The request's JSON body. An empty one stands for all defaults.

        Raises:
            Refused: 413 too large, 400 not JSON, 422 not what the route takes.
        """
        data = await read_body(request, self.body_bytes)
        try:
            return body_class.model_validate_json(data or b"{}")
        except ValidationError as error:
            raise explained(error) from None

    def check_request(self, request: Request) -> None:
        """Refused for what the engine cannot take."""
        longest, vocab = self.facts.longest, self.facts.vocab_size
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if total > longest:
            raise Refused(
                400,
                f"A prompt of {len(request.prompt_ids)} tokens with max_tokens={request.sampling.max_tokens} may reach {total} "
                f"tokens; this server takes at most {longest} (max_model_len).",
                "context_length_exceeded",
            )
        for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.sampling.stop_token_ids)):
            if ids and max(ids) >= vocab:
                raise Refused(400, f"{name} has token {max(ids)}; the vocabulary has {vocab} tokens.", "no_such_token")


async def read_body(request: HTTPRequest, limit: int | None) -> bytes:
    """The whole body; Refused 413 as soon as it is known to be larger than `limit` bytes."""
    said = request.headers.get("content-length", "0")
    chunks, size = [], int(said) if said.isdigit() else 0
    if limit is not None and size > limit:
        raise _too_large(limit)
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if limit is not None and size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def discard_body(request: HTTPRequest) -> dict[str, str]:
    """Read what is left of a body before an error is answered, for closing a connection on it may cost the client the answer.

    Returns headers of the answer: those that end the connection where the body is too long or too slow for that.
    """
    size = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > DISCARD_BYTES:
                    return {"Connection": "close"}
    except TimeoutError:
        return {"Connection": "close"}
    except (RuntimeError, ClientDisconnect):  # it has been read, or nobody waits
        pass
    return {}


def _too_large(limit: int) -> Refused:
    return Refused(413, f"The body is larger than {limit} bytes.", "body_too_large")


def explained(error: ValidationError) -> Refused:
    """400 for what is not JSON, 422 for what is not what the route takes, with every field that is wrong."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        return Refused(400, f"The body is not JSON. {problems[0]['msg']}", "bad_json")
    words = dict.fromkeys(f"{_place(p['loc'])}{p['msg'].removeprefix('Value error, ')}" for p in problems)
    return Refused(422, "; ".join(list(words)[:8]), "bad_field")


def _place(location: tuple) -> str:
    return f"{'.'.join(map(str, location))}: " if location else ""
