"""What a trainer sends to a server and gets back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from verl.core.checkpoint_engine.gather import Traffic
from verl.core.rollout_engine.api import Completion, Request


def generate_body(request: Request, name: str, label: str | None) -> dict[str, Any]:
    """Of POST /generate. label: of the weights that the samples have to be drawn with."""
    sampling = request.sampling
    return {
        "prompt_ids": request.prompt_ids,
        "max_tokens": sampling.max_tokens,
        "n": sampling.n,
        "first": request.first,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "random_stream": request.stream,
        "name": name,
        "weights": label,
        "stream": "samples",
    }


def completion_of(line: dict[str, Any]) -> Completion:
    """A finished sample, from a line of the answer."""
    return Completion(line["token_ids"], line["log_probs"], line["finish_reason"], line["version"])


def weight_parts(
    weights: Iterable[tuple[str, Tensor]], part_bytes: int, dtype: torch.dtype | None, traffic: Traffic | None = None
) -> Iterator[bytes]:
    """safetensors of at most `part_bytes` of weights each (a larger tensor alone), floating ones cast to `dtype`.

    traffic: takes note of the copies that are made of the tensors.
    """
    from safetensors.torch import save

    traffic = traffic or Traffic()
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        size = tensor.numel() * target.itemsize
        if part and held + size > part_bytes:
            yield save(part)
            part, held = {}, 0
        # A copy: views share memory, which safetensors refuses.
        part[name] = traffic.hold(torch.empty(tensor.shape, dtype=target).copy_(tensor.detach()))
        held += size
    if part:
        yield save(part)
