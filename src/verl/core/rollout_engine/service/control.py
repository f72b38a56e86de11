"""Routes that change the server; each takes the token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pydantic import ValidationError
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl.core.rollout_engine.service.context import Service, explained, read_body
from verl.core.rollout_engine.service.schemas import AbortBody, DrainBody, FolderBody, PartQuery

Handler = Callable[[HTTPRequest, Service], Awaitable[None]]


def _guarded(path: str, handler: Handler) -> Route:
    """POST route that checks the token before it reads anything, and answers with the server's state."""

    async def endpoint(request: HTTPRequest) -> Response:
        service: Service = request.app.state.service
        service.check_token(request)
        await handler(request, service)
        state = service.loop.state()
        return JSONResponse(
            {
                "version": state.weights.version,
                "weights": state.weights.label,
                "paused": state.paused,
                "sleeping": state.sleeping,
                "running": state.running,
                "waiting": state.waiting,
            }
        )

    return Route(path, endpoint, methods=["POST"])


async def update_weights(request: HTTPRequest, service: Service) -> None:
    """A part of the weights (safetensors, named by the query), or JSON that names a folder."""
    if not request.query_params:
        await service.intake.folder(await service.parse(request, FolderBody))
        return
    try:
        query = PartQuery.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise explained(error) from None
    await service.intake.part(query, await read_body(request, limit=None))


async def pause(request: HTTPRequest, service: Service) -> None:
    """Start no more requests; answers when none runs."""
    body = await service.parse(request, DrainBody)
    await asyncio.wrap_future(service.loop.pause(abort=body.mode == "abort"))


async def resume(request: HTTPRequest, service: Service) -> None:
    """Undo pause."""
    service.loop.resume()


async def abort(request: HTTPRequest, service: Service) -> None:
    """End requests with what they have, which their clients get."""
    body = await service.parse(request, AbortBody)
    service.loop.abort(body.names)


async def sleep(request: HTTPRequest, service: Service) -> None:
    """Give back the memory that generation needs."""
    body = await service.parse(request, DrainBody)
    await asyncio.wrap_future(service.loop.sleep(abort=body.mode == "abort"))


async def wake(request: HTTPRequest, service: Service) -> None:
    """Undo sleep."""
    await asyncio.wrap_future(service.loop.wake())


async def check(request: HTTPRequest, service: Service) -> None:
    """Nothing but the token and the state."""


ROUTES = [
    _guarded("/update_weights", update_weights),
    _guarded("/pause", pause),
    _guarded("/resume", resume),
    _guarded("/abort", abort),
    _guarded("/sleep", sleep),
    _guarded("/wake", wake),
    _guarded("/check", check),
]
