"""Help and documentation of all options, made from the schema."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from verl.config.keys import Key, options, schema_keys
from verl.config.old_keys import PER_DEVICE, RENAMED, RETIRED, Retired
from verl.config.schema import PPOConfig
from verl.config.suggest import did_you_mean, nearest_words

USAGE = """usage: python3 -m verl.trainer.main_ppo [key=value ...]   (or: verl train key=value ...)
       verl plan key=value ...   print the batch plan of such a run, without training
       --help [WORD]  all options, or those with WORD in their name or help
       --cfg job      print the resolved config and stop
       --version      print the version
"""


def default_text(value: Any) -> str:
    """A default as one would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(default_text(item) for item in value)}]"
    return str(value)


def full_help(key: Key) -> str:
    """Help text with choices and limits."""
    limits = [f"one of: {key.choice_words}"] if key.choices else []
    limits += [key.limit_words] if key.limit_words else []
    return f"{key.help} ({'; '.join(limits)})" if limits else key.help


def _by_section(keys: list[Key]) -> Iterator[tuple[str, list[Key]]]:
    sections: dict[str, list[Key]] = {}
    for key in keys:
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    yield from sections.items()


def help_text(word: str = "", schema: type = PPOConfig, *, width: int | None = None) -> str:
    """Options with their defaults and help, by section.

    Args:
        word: show only options with this word, in any case, in their name; if there are none, in their help.
        width: columns of the screen; None asks the terminal.
    """
    width = width or max(60, min(shutil.get_terminal_size().columns, 120))
    every = list(options(schema).values())
    chosen = [key for key in every if word.lower() in key.name.lower()]
    chosen = chosen or [key for key in every if word.lower() in key.help.lower()]
    if not chosen:
        words = sorted({part for key in every for part in key.name.split(".")})
        mend = did_you_mean(nearest_words(word, words)) or (
            f" The sections are {', '.join(dict.fromkeys(key.name.split('.')[0] for key in every))}; "
            "one of them as the word shows all its options."
        )
        return f"No option has '{word}' in its name or help.{mend}\n"
    lines = []
    for section, keys in _by_section(chosen):
        lines += ["", f"{section}: {schema_keys(schema)[section].help}"] if section else [""]
        for key in keys:
            lines.append(f"  {key.name}={default_text(key.default)}")
            lines += textwrap.wrap(full_help(key), width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines).lstrip("\n") + "\n"


_INTRODUCTION = """# Options

<!-- Made by `python -m verl.config.help --markdown > docs/config.md`; a test holds it to the schema. -->

Options are given as `key=value` words after `python3 -m verl.trainer.main_ppo` (or `verl train`), in the grammar of
Hydra:

| word | meaning |
|---|---|
| `trainer.total_epochs=3` | a value |
| `"data.train_files=[a.parquet,b.parquet]"` | a list; the quotes keep the shell away from the brackets |
| `"trainer.project_name='a, b'"` | a text with commas or brackets |
| `trainer.total_training_steps=null` | no value |
| `'data.max_prompt_length=${data.max_response_length}'` | the value of another option |
| `"critic.optim={lr:1e-5,weight_decay:0}"` | several options of a section |
| `+data.apply_chat_template_kwargs.enable_thinking=False` | an entry of a free-form option (the `+` may be left out) |

A later word wins over an earlier one. `--help WORD` shows the options with a word in their name, `--cfg job` prints the
resolved config, and `verl plan key=value ...` prints the batch plan without training. An unknown key, a wrong value or
an impossible combination stops the command before anything is loaded.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, each of which gives `rollout.n` samples. Micro-batch
sizes count samples on one device; they change memory and speed, not the result.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def markdown(schema: type = PPOConfig) -> str:
    """The page docs/config.md."""
    lines = [_INTRODUCTION]
    for section, keys in _by_section(list(options(schema).values())):
        lines += [
            f"## {section}",
            "",
            f"{schema_keys(schema)[section].help[:1].upper()}{schema_keys(schema)[section].help[1:]}.",
        ]
        lines += ["", "| option | default | |", "|---|---|---|"]
        lines += [f"| `{key.field}` | `{_cell(default_text(key.default))}` | {_cell(full_help(key))} |" for key in keys]
        lines.append("")
    lines += [
        "## Keys of older scripts",
        "",
        "These are accepted under their old names, with a notice.",
        "",
        "| old | now |",
        "|---|---|",
        *(
            f"| `{old}` | `{new}`{' (samples of all devices: divided by their number)' if old in PER_DEVICE else ''} |"
            for old, new in RENAMED.items()
        ),
        "",
        "These are accepted and not read. Some take only the values that this version agrees with.",
        "",
        "| key | values | why nothing reads it, or what to do for another value |",
        "|---|---|---|",
        *(f"| `{entry.pattern}` | {_allowed(entry.allowed)} | {_cell(_why(entry))} |" for entry in RETIRED),
    ]
    return "\n".join(lines) + "\n"


def _why(entry: Retired) -> str:
    return entry.reason if entry.allowed is None else entry.instead


def _allowed(allowed: tuple | None) -> str:
    if allowed is None:
        return "any"
    words = [f"`{value}`" if isinstance(value, (str, int, float)) else "the number of devices" for value in allowed]
    return ", ".join([*words, "`null`"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--markdown"]:
        sys.stdout.write(markdown())
    else:
        sys.stdout.write(help_text(" ".join(sys.argv[1:])))
