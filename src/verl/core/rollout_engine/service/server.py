"""`serve`: from a config to a server that answers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from verl.config.compose import print_notice
from verl.config.schema import RolloutConfig, ServeConfig
from verl.core.controller.roles import choose_device
from verl.core.model_engine.loading import end_tokens, load_config, load_policy, load_tokenizer, resolve_model_path
from verl.core.rollout_engine.api import RolloutEngine
from verl.core.rollout_engine.factory import DTYPES, check_engine, make_rollout_engine
from verl.core.rollout_engine.standalone import engine_config
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.core.rollout_engine.service.context import Service

TOKEN_VARIABLE = "VERL_SERVE_TOKEN"
STARTING_WEIGHTS = "as loaded"  # label of the weights that the model's folder holds
DEFAULT_LONGEST = 8192
HTTP_SETTINGS: dict[str, Any] = {
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": 5,
    "timeout_keep_alive": 75,  # longer than clients keep an idle connection: see `client.KEEP_SECONDS`
}
NOT_INSTALLED = "verl serve needs starlette, uvicorn, pydantic and prometheus-client: pip install 'reverl[serve]'"


def serve(config: ServeConfig) -> None:
    """Load the model and answer until the process is told to stop.

    Raises:
        ConfigError: the address is taken, the model cannot be served, or a package is not installed.
    """
    try:
        import uvicorn

        from verl.core.rollout_engine.service.app import make_app
    except ImportError as error:
        raise ConfigError(f"{NOT_INSTALLED} ({error})") from None
    listening = bind(config.host, config.port)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    service = make_service(config, token)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    facts = service.facts
    print(f"{facts.model} ({facts.engine}, {facts.dtype}) at http://{shown}:{port}", flush=True)
    if not os.environ.get(TOKEN_VARIABLE):
        print(f"token of the control routes (set {TOKEN_VARIABLE} to choose it): {token}", flush=True)
    if not host.startswith("127.") and host != "::1":
        print_notice(f"host={config.host}: whoever reaches this address can generate; the token guards control alone.")

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Give all clients what there is for them, then wait for their connections to close."""
            await service.end()
            await super().shutdown(sockets)
            if self.force_exit:
                # A second Ctrl-C: uvicorn would leave the application to be cancelled, with a traceback.
                await self.lifespan.shutdown()

    # uvicorn passes the signal on when it has shut down; the engine is closed after that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        Server(uvicorn.Config(make_app(service), **HTTP_SETTINGS)).run(sockets=[listening])
    finally:
        service.loop.engine.close()
        # A further Ctrl-C would end the interpreter in the midst of its own shutdown, with a traceback or another status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address, which is taken before anything slow. It does not listen yet.

    Raises:
        ConfigError: the address is taken, or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(f"host={host} port={port}: {error.strerror or error}. Choose another, or port=0.") from None
    return listening


def make_service(config: ServeConfig, token: str) -> Service:
    """The engine with the model's weights, and all that the routes need of it.

    Raises:
        ConfigError: the model cannot be loaded or served.
    """
    from verl.core.rollout_engine.service.context import Facts, Service
    from verl.core.rollout_engine.service.jobs import Weights
    from verl.core.rollout_engine.service.loop import EngineLoop
    from verl.core.rollout_engine.service.metrics import Metrics
    from verl.core.rollout_engine.service.weight_intake import WeightIntake

    transformers.utils.logging.disable_progress_bar()
    rollout = engine_config(config.rollout)
    check_engine(rollout)
    path, code = resolve_model_path(config.model, "model"), config.trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer or path, trust_remote_code=code, key="model")
    hf_config = load_config(path, trust_remote_code=code, key="model")
    longest = longest_sequence(config, hf_config)
    engine, dtype, generation_config = build_engine(config, rollout, path, hf_config, longest, tokenizer)
    loop = EngineLoop(
        engine,
        longest=longest,
        slots=rollout.max_num_seqs,
        max_waiting=config.max_waiting,
        weights=Weights(0, STARTING_WEIGHTS),
    )
    facts = Facts(
        model=config.served_name or Path(config.model).name,
        model_type=hf_config.model_type,
        engine=type(engine).__name__.removesuffix("Engine").lower(),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=hf_config.get_text_config().vocab_size,
        longest=longest,
        slots=rollout.max_num_seqs,
    )
    return Service(
        loop=loop,
        tokenizer=tokenizer,
        facts=facts,
        token=token,
        stop_token_ids=end_tokens(tokenizer, generation_config),
        body_bytes=int(config.max_body_megabytes * 2**20),
        metrics=Metrics(loop),
        intake=WeightIntake(loop),
    )


def longest_sequence(config: ServeConfig, hf_config: Any) -> int:
    """Bound of prompt plus response, in tokens. ConfigError if the model cannot attend to so many."""
    most, asked = getattr(hf_config.get_text_config(), "max_position_embeddings", None), config.rollout.max_model_len
    if asked is not None and most is not None and asked > most:
        raise ConfigError(f"rollout.max_model_len={asked}: the model attends to at most {most} tokens.")
    return asked or min(most or DEFAULT_LONGEST, DEFAULT_LONGEST)


def build_engine(
    config: ServeConfig, rollout: RolloutConfig, path: str, hf_config: Any, longest: int, tokenizer: Any
) -> tuple[RolloutEngine, torch.dtype, Any]:
    """The engine with the weights of the model's folder, its dtype, and the model's generation config."""
    device = choose_device(config.device, "device")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = DTYPES[rollout.dtype] if rollout.dtype else default
    engine, notice = make_rollout_engine(
        rollout,
        model_path=path,
        hf_config=hf_config,
        device=device,
        trainer_weights=None,
        trainer_dtype=dtype,
        max_prompt_length=longest,
        max_response_length=0,
        pad_token_id=tokenizer.pad_token_id,
    )
    if notice:
        print_notice(notice)
    if rollout.name == "vllm":  # it has read the folder itself
        return engine, dtype, _generation_config(path)
    model = load_policy(path, hf_config, dtype, trust_remote_code=config.trust_remote_code, key="model")
    engine.load_weights(model.requires_grad_(False).named_parameters(), version=0)
    return engine, getattr(engine, "dtype", dtype), model.generation_config


def _generation_config(path: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
