"""Checks of `rollout.name=server` that need the config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from verl.config.schema import PPOConfig

if TYPE_CHECKING:
    from verl.config.validate import Findings

_SECTION = "actor_rollout_ref.rollout.server"


def check_rollout_servers(config: PPOConfig, found: Findings) -> None:
    """Addresses, and what does not go together with servers."""
    rollout = config.actor_rollout_ref.rollout
    urls = rollout.server.urls
    if rollout.name != "server":
        found.problem(
            bool(urls),
            f"{_SECTION}.urls is read with actor_rollout_ref.rollout.name=server; it is {rollout.name}. Set both or neither.",
        )
        return
    found.problem(not urls, f"{_SECTION}.urls names no server. Write {_SECTION}.urls=[http://127.0.0.1:8000].")
    for url in urls:
        problem = _problem_of(url)
        found.problem(bool(problem), f"{_SECTION}.urls: {url} {problem}, such as http://127.0.0.1:8000.")
    found.problem(len(set(urls)) < len(urls), f"{_SECTION}.urls={urls} names a server twice.")
    found.problem(
        rollout.nnodes > 0,
        f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} sets devices apart for generation, and with rollout.name=server the "
        "servers generate, on devices of theirs. Leave rollout.nnodes out, or set rollout.name=native or vllm.",
    )
    found.problem(
        rollout.checkpoint_engine.verify,
        "actor_rollout_ref.rollout.checkpoint_engine.verify=True: the weights that a server holds cannot be read back. Set it "
        "to False.",
    )


def _problem_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits:
        return "is not an address"
    return "has a path; write the address alone" if parts.path or parts.query or parts.fragment else ""
