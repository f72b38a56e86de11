"""`python3 -m verl.trainer.main_serve model=PATH`, or `verl serve model=PATH`: a rollout engine behind HTTP."""

from __future__ import annotations

import sys

from verl.config.command import handle_flags, run_main
from verl.config.compose import compose
from verl.config.schema import ServeConfig
from verl.errors import ConfigError

USAGE = """usage: verl serve model=PATH [key=value ...]

Answers OpenAI's clients (/v1/chat/completions, /v1/completions), trainers (/generate, /update_weights), and Prometheus
(/metrics). The environment variable VERL_SERVE_TOKEN is the token of the routes that change the server.
"""


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    config: ServeConfig = compose(handle_flags(argv, ServeConfig, USAGE), ServeConfig)
    if config.model is None:
        raise ConfigError("model: give the model that is to be served, as in verl serve model=PATH.")
    from verl.core.rollout_engine.service.server import serve

    serve(config)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
