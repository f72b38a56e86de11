"""What every command of the package shares: its flags, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from verl.errors import ConfigError, UserError

_FOREIGN = {
    "--multirun": "There is no sweep; run the command once for each value.",
    "-m": "There is no sweep; run the command once for each value.",
    "--config-path": "There are no config files; give every option as key=value.",
    "--config-dir": "There are no config files; give every option as key=value.",
    "--config-name": "There are no config files; give every option as key=value.",
    "-cp": "There are no config files; give every option as key=value.",
    "-cn": "There are no config files; give every option as key=value.",
}


def handle_flags(argv: list[str], schema: type | None = None, usage: str = "") -> list[str]:
    """The overrides among the words of a command line, after its flags are dealt with.

    schema, usage: of the command; None is that of the RL trainer.

    `--help [WORD]`, `--cfg job` and `--version` print and exit with status 0.

    Raises:
        SystemExit: after such a flag.
        ConfigError: for a flag that is not known.
    """
    flags = [word for word in argv if word.startswith("-")]
    if not flags:
        return list(argv)
    names = [flag.partition("=")[0] for flag in flags]
    if "--help" in names or "-h" in names:
        _print_help(argv, schema, usage)
    if "--version" in names:
        from verl import __version__

        print(f"verl {__version__}")
        raise SystemExit(0)
    for name, flag in zip(names, flags):
        if name not in ("--cfg", "-c", "--resolve"):
            raise ConfigError(f"{flag}: not a flag of this command. {_FOREIGN.get(name, 'See --help.')}")
    if names == ["--resolve"]:
        raise ConfigError("--resolve: goes with --cfg job, which resolves anyway.")
    return _print_config(argv, schema)


def _print_help(argv: list[str], schema: type | None, usage: str) -> None:
    from verl.config.help import USAGE, help_text
    from verl.config.schema import PPOConfig

    words = [word.partition("=")[2] if word.startswith("--help=") else word for word in argv]
    filters = [word for word in words if word and not word.startswith("-") and "=" not in word]
    if not filters:
        print(usage or USAGE)
    print(help_text(filters[0] if filters else "", schema or PPOConfig), end="")
    raise SystemExit(0)


def _print_config(argv: list[str], schema: type | None) -> list[str]:
    """Print the config that the other words make, and exit."""
    from verl.config.compose import compose, print_notice, to_yaml
    from verl.config.schema import PPOConfig, SFTConfig
    from verl.config.validate import validate
    from verl.config.validate_sft import validate_sft

    checks: dict[type, Callable[[Any], list[str]]] = {PPOConfig: validate, SFTConfig: validate_sft}
    rest: list[str] = []
    kind = ""
    words = iter(argv)
    for word in words:
        if word in ("--cfg", "-c"):
            kind = next(words, "")
        elif word.startswith(("--cfg=", "-c=")):
            kind = word.partition("=")[2]
        elif word != "--resolve":
            rest.append(word)
    if kind != "job":
        raise ConfigError(f"--cfg {kind}: takes job, as in --cfg job.")
    schema = schema or PPOConfig
    config: Any = compose(rest, schema)
    for notice in checks[schema](config) if schema in checks else []:
        print_notice(notice)
    print(to_yaml(config), end="")
    raise SystemExit(0)


def run_main(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Run a command and turn its end into an exit status.

    A `UserError` is shown as one message on stderr with its notes, without a traceback (status 2). Ctrl-C is 130, a reader that went
    away (as in `| head`) is 141.
    """
    try:
        status = main(argv)
        sys.stdout.flush()
        return status or 0
    except UserError as error:
        sys.stdout.flush()
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python would flush stdout again at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
