"""Models and tokenizers from a Hugging Face directory, the Hugging Face hub, or ModelScope."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
import torch.distributed as dist
from torch import nn

from verl.config.compose import print_notice
from verl.core.model_engine import attention
from verl.errors import ConfigError

HUB_SECONDS = 5
"""For a connection to the hub."""
NOTICE_SECONDS = 15
"""After so long the user is told what is waited for."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_model_path(path: str, key: str = "actor_rollout_ref.model.path") -> str:
    """A local directory, or a hub id as it is; with VERL_USE_MODELSCOPE=True an id is fetched from ModelScope.

    Where the hub has no address or does not answer there, the id becomes the folder of an earlier download.

    Raises:
        ConfigError: `path` looks like a directory and is none, or holds no config.json; modelscope is not
            installed; or the hub cannot be reached and the model was not downloaded before.
    """
    expanded = Path(path).expanduser()
    if expanded.is_dir():
        if not (expanded / "config.json").is_file():
            raise ConfigError(f"{key}={path}: this directory has no config.json, so it is not a Hugging Face model.")
        return str(expanded)
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"{key}={path}: no such directory. Give a Hugging Face model directory or a model id such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    if os.environ.get("VERL_USE_MODELSCOPE", "").lower() in ("true", "1"):
        try:
            from modelscope import snapshot_download
        except ImportError:
            raise ConfigError(
                "VERL_USE_MODELSCOPE is set and modelscope is not installed: pip install 'reverl[modelscope]'"
            ) from None
        return snapshot_download(path)
    unreachable = _why_unreachable()
    return path if unreachable is None else _from_cache(path, key, unreachable)


def _why_unreachable() -> str | None:
    """Why the hub cannot be asked, or None; found out first, for each of many requests would be retried for seconds.

    Behind a proxy the hub is the proxy's matter, and HF_HUB_OFFLINE keeps the libraries from asking at all.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or {"https", "all"} & getproxies().keys():
        return None
    address = urlsplit(constants.ENDPOINT)
    return _knock(address.hostname, address.port or (80 if address.scheme == "http" else 443))


@cache
def _knock(host: str, port: int) -> str | None:
    """Why no connection comes about, or None."""
    try:
        socket.create_connection((host, port), timeout=HUB_SECONDS).close()
    except socket.gaierror:
        return f"no address for {host}"
    except OSError:
        return f"{host} does not answer within {HUB_SECONDS} s"
    return None


def _from_cache(path: str, key: str, unreachable: str) -> str:
    """The folder of a model that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"{key}={path}: not a folder here, and the hub cannot be reached ({unreachable}). Give a folder, or check the "
            "network."
        ) from None


@contextmanager
def _quiet_hub(what: str, path: str) -> Iterator[None]:
    """Without the hub client's lines about each of its retries, but with one notice when it takes long.

    Each request has the client's own limit of time and of retries; what fails in the end is raised.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    host = urlsplit(constants.ENDPOINT).hostname
    text = f"still fetching the {what} of {path} from {host} after {NOTICE_SECONDS} s (HF_HUB_OFFLINE=1 takes an earlier download)"
    timer = threading.Timer(NOTICE_SECONDS, print_notice, [text])
    timer.daemon = True
    if not Path(path).is_dir() and not constants.HF_HUB_OFFLINE:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        hub_logging.set_verbosity(before)


def from_hub(what: str, path: str, key: str, load):
    """Run `load()`, turning a hub's failure into words."""
    try:
        with _quiet_hub(what, path):
            return load()
    except OSError as e:
        reason = str(e).strip().splitlines()[0]
        raise ConfigError(f"{key}={path}: cannot load the {what}: {reason}") from e
    except ValueError as e:
        raise ConfigError(f"{key}={path}: cannot load the {what}: {e}") from e


@contextmanager
def _fits_checkpoint(override: dict[str, Any] | None, path: str, key: str) -> Iterator[None]:
    """ConfigError that names override_config for whatever building or filling an overridden model raises within."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
        if not override or isinstance(e, torch.OutOfMemoryError):
            raise
        section = f"{key.rsplit('.', 1)[0]}.override_config"
        keys = " ".join(f"{section}.{name}={value}" for name, value in override.items())
        raise ConfigError(
            f"{keys}: does not fit the checkpoint {path} ({type(e).__name__}: {str(e).strip()}). Leave out what changes the "
            "shapes of its weights or the number of its layers."
        ) from e


def load_tokenizer(path: str, *, trust_remote_code: bool = False, key: str = "actor_rollout_ref.model.path"):
    """The tokenizer, with a pad token (the end token where the checkpoint names none)."""
    from transformers import AutoTokenizer

    tokenizer = from_hub(
        "tokenizer", path, key, lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}={path}: the tokenizer has no end token (eos_token), so no response could ever end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(
    path: str,
    *,
    trust_remote_code: bool = False,
    override: dict[str, Any] | None = None,
    key: str = "actor_rollout_ref.model.path",
):
    """config.json with `override` put over it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    config = from_hub(
        "config", path, key, lambda: AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    )
    for name, value in (override or {}).items():
        if not hasattr(config, name):
            raise ConfigError(
                f"{key.rsplit('.', 1)[0]}.override_config.{name}: {config.model_type} models have no such setting."
            )
        try:
            setattr(config, name, value)
        except (TypeError, ValueError, StrictDataclassError) as e:
            reason = str(e).strip().splitlines()[-1].strip()
            raise ConfigError(f"{key.rsplit('.', 1)[0]}.override_config.{name}={value}: {reason}") from e
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)  # log-probs must not depend on a random mask
    return config


def _blank(auto_class, config, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """A model on the CPU in `dtype`, with memory for its weights that nothing has touched yet."""
    stored = config.dtype
    with torch.device("meta"):
        options = {"attn_implementation": attention.NAME, "trust_remote_code": trust_remote_code}
        model = auto_class.from_config(config, **options).to(dtype)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.config.dtype = stored
    return model


def _reads_weights() -> bool:
    """Whether this process reads checkpoints; in a group the first one does, and gives the others their shards."""
    return not dist.is_initialized() or dist.get_rank() == 0


def load_policy(
    path: str,
    config,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    key: str = "actor_rollout_ref.model.path",
    override: dict[str, Any] | None = None,
) -> nn.Module:
    """A causal language model in `dtype` with packed attention, on the CPU; its config keeps the checkpoint's dtype.

    In a process group only the first rank's has the weights: `spread_weights` brings the others theirs. override: what was
    put over `config`, for the message if the checkpoint does not fit it.
    """
    from transformers import AutoModelForCausalLM

    if not _reads_weights():
        return _blank(AutoModelForCausalLM, config, dtype, trust_remote_code)
    stored = config.dtype
    with _fits_checkpoint(override, path, key):
        model = from_hub(
            "model",
            path,
            key,
            lambda: AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                trust_remote_code=trust_remote_code,
            ),
        )
    model.config.dtype = stored  # what a merge writes, whatever the precision of training
    return model


def load_value_model(
    path: str,
    config,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    override: dict[str, Any] | None = None,
) -> nn.Module:
    """A one-label token-classification model with packed attention; a head that the checkpoint lacks starts at zero.

    override: as in `load_policy`.
    """
    from transformers import AutoModelForTokenClassification
    from transformers.utils import logging as transformers_logging

    config.num_labels = 1
    config.classifier_dropout = 0.0
    config.hidden_dropout = 0.0

    def load():
        return AutoModelForTokenClassification.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )

    if not _reads_weights():
        return _blank(AutoModelForTokenClassification, config, dtype, trust_remote_code)
    stored = config.dtype
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # that the head is new is what is wanted, not a warning
    with _fits_checkpoint(override, path, "critic.model.path"):
        model, info = from_hub("value model", path, "critic.model.path", load)
    transformers_logging.set_verbosity(before)
    model.config.dtype = stored
    if not hasattr(model, "score"):
        raise ConfigError(
            f"critic.model.path={path}: {config.model_type} has no token-classification head named `score`; use a Qwen2, Qwen3, Llama or Mistral model."
        )
    if any(name.startswith("score.") for name in info["missing_keys"]):
        nn.init.zeros_(model.score.weight)
        if model.score.bias is not None:
            nn.init.zeros_(model.score.bias)
    return model


def end_tokens(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """The tokenizer's end token, and those of the model's generation config (a chat model's end of turn)."""
    more = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *([more] if isinstance(more, int) else more or [])}
    return tuple(sorted(i for i in ids if i is not None))
