"""Whether the servers that a run names are there and fit it, asked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from verl.config.schema import RolloutServerConfig
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SECONDS = 10.0


@dataclass(frozen=True)
class Servers:
    """What the servers that answered said. dtype: in which all of them generate; None: they differ."""

    dtype: Any
    engines: set[str]
    vocab_sizes: dict[str, int]
    model_types: dict[str, str]
    notices: list[str] = field(default_factory=list)

    def check_model(self, hf_config: PretrainedConfig) -> None:
        """ConfigError if a server's model does not have the trainer's vocabulary and family."""
        vocab_size, model_type = hf_config.get_text_config().vocab_size, hf_config.model_type
        for url, size in self.vocab_sizes.items():
            kind = self.model_types[url]
            if (size, kind) != (vocab_size, model_type):
                raise ConfigError(
                    f"rollout server {url} has a {kind} model of {size} tokens, and actor_rollout_ref.model.path a {model_type} "
                    f"model of {vocab_size}. Start it with verl serve model=(that path)."
                )


def token_of(server: RolloutServerConfig) -> str:
    """The servers' token. ConfigError if the variable is not set."""
    token = os.environ.get(server.token_env)
    if not token:
        raise ConfigError(
            f"rollout.name=server needs the servers' token in the environment variable {server.token_env} "
            "(actor_rollout_ref.rollout.server.token_env). Start the servers and the trainer with the same one."
        )
    return token


def check_servers(server: RolloutServerConfig, longest: int) -> Servers:
    """Ask every server.

    longest: bound of prompt plus response, in tokens.

    Raises:
        ConfigError: no server answers, or one does not take the token, is broken, or is too short for this run.
    """
    import torch

    headers = {"Authorization": f"Bearer {token_of(server)}"}
    facts: dict[str, dict[str, Any]] = {}
    absent: dict[str, str] = {}
    with httpx.Client(timeout=SECONDS, trust_env=False, headers=headers) as http:
        for url in server.urls:
            try:
                facts[url] = http.get(f"{url}/health").json()
                status = http.post(f"{url}/check").status_code
            except (httpx.HTTPError, ValueError) as error:
                absent[url] = str(error) or type(error).__name__
                continue
            _check_one(server, url, facts[url], status, longest)
    if not facts:
        words = "; ".join(f"{url}: {error}" for url, error in absent.items())
        raise ConfigError(
            f"actor_rollout_ref.rollout.server.urls: no server answers ({words}). Start one with verl serve model=PATH port=PORT."
        )
    notices = [
        f"rollout server {url} does not answer ({error}); it is used as soon as it does."
        for url, error in absent.items()
    ]
    dtypes = {f["dtype"] for f in facts.values()}
    return Servers(
        dtype=getattr(torch, dtypes.pop()) if len(dtypes) == 1 else None,
        engines={f["engine"] for f in facts.values()},
        vocab_sizes={url: f["vocab_size"] for url, f in facts.items()},
        model_types={url: f["model_type"] for url, f in facts.items()},
        notices=notices,
    )


def _check_one(server: RolloutServerConfig, url: str, facts: dict[str, Any], status: int, longest: int) -> None:
    if status == 401:
        raise ConfigError(
            f"rollout server {url} does not take the token in {server.token_env}: it was started with another one."
        )
    if facts.get("status") == "broken" or "slots" not in facts or status != 200:
        raise ConfigError(
            f"rollout server {url} cannot generate: {facts.get('reason', f'status {status}')}. Start it again."
        )
    if facts["longest"] < longest:
        raise ConfigError(
            f"rollout server {url} takes {facts['longest']} tokens of prompt and response, and data.max_prompt_length + "
            f"data.max_response_length is {longest}. Start it with rollout.max_model_len={longest}."
        )
