"""The routes of the server as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl.core.rollout_engine.service import control, openai_api
from verl.core.rollout_engine.service.answers import CLIENT_GONE
from verl.core.rollout_engine.service.context import Service, discard_body
from verl.core.rollout_engine.service.generate import generate
from verl.core.rollout_engine.service.jobs import Refused
from verl.core.rollout_engine.service.metrics import CONTENT_TYPE

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


def make_app(service: Service) -> Starlette:
    """The application; its engine loop starts and ends with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.loop.outbox.loop = asyncio.get_running_loop()
        service.loop.start()
        yield
        await service.end()

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/generate", generate, methods=["POST"]),
        *openai_api.ROUTES,
        *control.ROUTES,
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            Refused: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _failure,
        },
    )
    app.state.service = service
    app.add_middleware(_Measured, service=service, paths={route.path for route in routes})
    return app


async def health(request: HTTPRequest) -> Response:
    """200 with what there is to know of the server; 503 when the engine will not run again."""
    service: Service = request.app.state.service
    state = service.loop.state()
    status = "paused" if state.paused else "sleeping" if state.sleeping else "ok"
    status = "no weights" if state.weights.label is None else status
    told = {
        "status": "broken" if state.broken else status,
        "version": state.weights.version,
        "weights": state.weights.label,
        "waiting": state.waiting,
        "running": state.running,
        "slots_used": state.samples,
        **vars(service.facts),
    }
    if state.broken:
        told["reason"] = state.broken
    return JSONResponse(told, 503 if state.broken else 200)


async def metrics(request: HTTPRequest) -> Response:
    """Counters and gauges for Prometheus."""
    return Response(request.app.state.service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def error_answer(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An error in the form in which OpenAI's clients read it."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers=headers
    )


async def _refused(request: HTTPRequest, error: Refused) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
    closing = await discard_body(request)
    return error_answer(error.status, error.message, error.code, {**headers.get(error.status, {}), **closing})


async def _http_error(request: HTTPRequest, error: HTTPException) -> Response:
    closing = await discard_body(request)
    words = {404: f"There is no route {request.url.path}.", 405: f"{request.url.path} does not take {request.method}."}
    return error_answer(
        error.status_code, words.get(error.status_code, error.detail), None, closing | dict(error.headers or {})
    )


def _client_gone(request: HTTPRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # nobody reads it


def _failure(request: HTTPRequest, error: Exception) -> Response:
    return error_answer(500, f"{type(error).__name__}: {error}")


class _Measured:
    """Counts answers and their seconds by route."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]):
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = scope["path"] if scope["path"] in self._paths else "unknown"
            self._service.metrics.answered(route, status, time.perf_counter() - started)
