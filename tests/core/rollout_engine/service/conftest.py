"""Servers in this process, each on a free port."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from verl.config.schema import ServeConfig, ServeRolloutConfig
from verl.core.rollout_engine.service.app import make_app
from verl.core.rollout_engine.service.context import Service
from verl.core.rollout_engine.service.server import HTTP_SETTINGS, bind, make_service

TOKEN = "the token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Running:
    """A server that answers. http: a client of its address, without the token."""

    def __init__(self, service: Service, url: str):
        self.service, self.url = service, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def control(self, path: str, **options) -> httpx.Response:
        return self.http.post(path, headers=BEARER, **options)

    def state(self) -> dict:
        return self.http.get("/health").json()

    def wait_for(self, condition, seconds: float = 20) -> dict:
        """The state as soon as `condition` of it holds."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
        return state


@contextmanager
def serving(model: Path, *, token: str = TOKEN, port: int = 0, **settings) -> Iterator[Running]:
    """A server of `model`. settings: of the config; rollout: those of its section."""
    rollout = ServeRolloutConfig(**settings.pop("rollout", {}))
    service = make_service(ServeConfig(model=str(model), rollout=rollout, **settings), token)
    listening = bind("127.0.0.1", port)
    server = uvicorn.Server(uvicorn.Config(make_app(service), **{**HTTP_SETTINGS, "timeout_graceful_shutdown": 1}))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    running = Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        yield running
    finally:
        running.http.close()
        server.should_exit = True
        thread.join(30)
        service.loop.engine.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(byte_model) -> Iterator[Running]:
    """One server for all tests that leave it as they found it: 8 slots, 4 requests may wait, bodies up to 64 KiB."""
    with serving(byte_model, max_waiting=4, max_body_megabytes=1 / 16, rollout={"max_num_seqs": 8}) as running:
        yield running
        assert running.state()["slots_used"] == 0
