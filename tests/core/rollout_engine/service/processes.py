"""Servers in processes of their own, which can be killed. They are forked from one that has imported all: that takes seconds."""

import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

from verl.config.schema import ServeConfig, ServeRolloutConfig

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["verl.core.rollout_engine.service.server", "transformers.models.qwen2.modeling_qwen2"])


def start(model: Path, port: int, token: str) -> BaseProcess:
    """`verl serve model=... port=...`."""
    process = _context.Process(target=_serve, args=(str(model), port, token), daemon=True)
    process.start()
    return process


def _serve(model: str, port: int, token: str) -> None:
    from verl.core.rollout_engine.service.server import serve

    os.environ["VERL_SERVE_TOKEN"] = token
    serve(ServeConfig(model=model, port=port, rollout=ServeRolloutConfig(max_num_seqs=16)))
