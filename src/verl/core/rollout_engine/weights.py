"""The weights as the decoder reads them, either the trainer's own tensors or buffers of the engine's.

Both are addressed by the names of the Hugging Face checkpoint. In place (`bind_weights`) nothing is copied and an
optimizer step is seen at once. Own buffers (`WeightBuffers`) have another dtype or device than the trainer's tensors, and
keep q, k, v and gate, up fused, so that a layer is four matrix products instead of seven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.errors import CheckpointError


class Linear(NamedTuple):
    """weight: [out, in]; bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. qkv: one fused projection, or q, k and v apart; gate_up: likewise."""

    input_norm: Tensor
    qkv: tuple[Linear, ...]
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: tuple[Linear, ...]
    down: Linear


@dataclass(frozen=True)
class ModelWeights:
    """embed and head: [vocab, hidden], the same tensor when tied; norm: [hidden]."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape of every weight of the model (a tied lm_head is not among them)."""
    hidden, inter, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_out, kv_out = spec.num_heads * dim, spec.num_kv_heads * dim
    linears = {
        "self_attn.q_proj": (q_out, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_out, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_out, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_out, spec.o_bias),
        "mlp.gate_proj": (inter, hidden, spec.mlp_bias),
        "mlp.up_proj": (inter, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inter, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def bind_weights(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> ModelWeights:
    """The decoder's view of tensors that someone else owns. CheckpointError if a name or a shape is wrong."""
    shapes = expected_shapes(spec)
    problems = [_shape_problem(name, tensors[name], shapes[name]) for name in shapes if name in tensors]
    _raise_problems(shapes, set(tensors), [p for p in problems if p], [], spec)
    return _assemble(spec, {name: tensors[name].detach() for name in shapes})


class WeightBuffers:
    """Weights in memory of the engine's own; `model` reads them, `load` fills them.

    fuse: lay q, k, v and gate, up together; without it the decoder computes to the bit what it does with bound tensors.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, fuse: bool = True):
        self.spec = spec
        self._shapes = expected_shapes(spec)
        self._views: dict[str, Tensor] = {}
        fused: dict[str, Tensor] = {}
        for i in range(spec.num_layers if fuse else 0):
            for parts in (("self_attn", "q_proj", "k_proj", "v_proj"), ("mlp", "gate_proj", "up_proj")):
                for kind in ("weight", "bias"):
                    names = [f"model.layers.{i}.{parts[0]}.{part}.{kind}" for part in parts[1:]]
                    if names[0] in self._shapes:
                        fused[names[0]] = self._fuse(names, device, dtype)
        for name, shape in self._shapes.items():
            if name not in self._views:
                self._views[name] = torch.empty(shape, device=device, dtype=dtype)
        self.model = _assemble(spec, self._views, fused if fuse else None)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in, cast on the way, one tensor in flight. Each has to come exactly once."""
        seen: set[str] = set()
        problems: list[str] = []
        repeated: list[str] = []
        for name, tensor in weights:
            if name in seen:
                repeated.append(name)
            seen.add(name)
            if name in self._shapes:
                problem = _shape_problem(name, tensor, self._shapes[name])
                if problem:
                    problems.append(problem)
                else:
                    self._views[name].copy_(tensor.detach())
        _raise_problems(self._shapes, seen, problems, repeated, self.spec)

    def named(self) -> dict[str, Tensor]:
        """The buffers by checkpoint name."""
        return dict(self._views)

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self._views.values())

    def _fuse(self, names: list[str], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        rows = [self._shapes[name][0] for name in names]
        buffer = torch.empty((sum(rows), *self._shapes[names[0]][1:]), device=device, dtype=dtype)
        self._views.update(zip(names, buffer.split(rows)))
        return buffer


def _assemble(
    spec: ModelSpec, tensors: Mapping[str, Tensor], fused: Mapping[str, Tensor] | None = None
) -> ModelWeights:
    """fused: buffers by the name of their first part; they replace that part and the ones beside it."""

    def linear(name: str, source: Mapping[str, Tensor]) -> Linear:
        return Linear(source[name + ".weight"], source.get(name + ".bias"))

    def projections(prefix: str, *parts: str) -> tuple[Linear, ...]:
        if fused is not None:
            return (linear(prefix + parts[0], fused),)
        return tuple(linear(prefix + part, tensors) for part in parts)

    layers = []
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        layers.append(
            LayerWeights(
                input_norm=tensors[prefix + "input_layernorm.weight"],
                qkv=projections(prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
                q_norm=tensors.get(prefix + "self_attn.q_norm.weight"),
                k_norm=tensors.get(prefix + "self_attn.k_norm.weight"),
                o=linear(prefix + "self_attn.o_proj", tensors),
                post_norm=tensors[prefix + "post_attention_layernorm.weight"],
                gate_up=projections(prefix + "mlp.", "gate_proj", "up_proj"),
                down=linear(prefix + "mlp.down_proj", tensors),
            )
        )
    embed = tensors["model.embed_tokens.weight"]
    head = embed if spec.tied_embeddings else tensors["lm_head.weight"]
    return ModelWeights(embed, layers, tensors["model.norm.weight"], head)


def _shape_problem(name: str, tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(tensor.shape) == shape:
        return None
    return f"{name} has shape {list(tensor.shape)}, the model needs {list(shape)}"


def _raise_problems(
    shapes: Mapping[str, tuple[int, ...]], seen: set[str], problems: list[str], repeated: list[str], spec: ModelSpec
) -> None:
    missing = [name for name in shapes if name not in seen]
    # A tied model's checkpoint may still carry the head under its own name.
    allowed = {"lm_head.weight"} if spec.tied_embeddings else set()
    unexpected = sorted(seen - set(shapes) - allowed)
    for label, names in (("missing", missing), ("unexpected", unexpected), ("given twice", repeated)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problems.append(f"{label}: {', '.join(names[:5])}{more}")
    if problems:
        raise CheckpointError("The weights do not fit the rollout model. " + "; ".join(problems))
