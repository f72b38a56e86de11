"""Static slots on the device: what is in generation, one decode step over the first n slots, and nothing of scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache
from verl.core.rollout_engine.model import forward, logits
from verl.core.rollout_engine.sampling import SamplingRule, sample
from verl.core.rollout_engine.torch_backend import TorchBackend
from verl.core.rollout_engine.weights import ModelWeights


@dataclass
class SlotState:
    """One row a slot, on the device.

    token, position: the last token of the sequence so far, whose keys are not computed yet, and its position. start:
    position of the prompt's last token. limit: position whose step draws the last token allowed. done: bool. key: random
    stream. out_tokens, out_log_probs: [slots, capacity + 1]; what is drawn from position p goes to column p - start, and
    the last column takes what finished slots draw.
    """

    token: Tensor
    position: Tensor
    start: Tensor
    limit: Tensor
    key: Tensor
    done: Tensor
    out_tokens: Tensor
    out_log_probs: Tensor

    @classmethod
    def allocate(cls, slots: int, capacity: int, device: torch.device) -> SlotState:
        numbers = [torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(5)]
        return cls(
            *numbers,
            done=torch.ones(slots, dtype=torch.bool, device=device),
            out_tokens=torch.zeros(slots, capacity + 1, dtype=torch.int64, device=device),
            out_log_probs=torch.zeros(slots, capacity + 1, dtype=torch.float32, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.out_tokens.shape[1] - 1

    def move(self, source: Tensor, target: Tensor) -> None:
        for column in vars(self).values():
            column[target] = column[source]

    def record(self, tokens: Tensor, log_probs: Tensor, stop: Tensor) -> None:
        """Take what the step drew for slots 0..n-1. tokens: int64 [n]; log_probs: float32 [n]; stop: int64 [any]."""
        n = len(tokens)
        position, done = self.position[:n], self.done[:n]
        column = (position - self.start[:n]).masked_fill_(done, self.capacity)[:, None]
        self.out_tokens[:n].scatter_(1, column, tokens[:, None])
        self.out_log_probs[:n].scatter_(1, column, log_probs[:, None])
        ended = position >= self.limit[:n]
        if len(stop):
            ended |= torch.isin(tokens, stop)
        self.token[:n] = torch.where(done, self.token[:n], tokens)
        position += (~done).long()
        done |= ended


@dataclass(frozen=True)
class Start:
    """A sample that takes a slot."""

    slot: int
    prompt_ids: list[int]
    max_tokens: int
    key: int


class Drawn:
    """What finished slots drew, on its way to the host."""

    def __init__(self, tokens: Tensor, log_probs: Tensor, counts: list[int]):
        self._counts = counts
        self._ready = None
        if tokens.is_cuda:
            self._tokens = tokens.to("cpu", non_blocking=True)
            self._log_probs = log_probs.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._tokens, self._log_probs = tokens, log_probs

    def rows(self) -> list[tuple[list[int], list[float]]]:
        if self._ready is not None:
            self._ready.synchronize()
        tokens, log_probs = self._tokens.numpy(), self._log_probs.numpy()
        return [(tokens[i, :c].tolist(), log_probs[i, :c].tolist()) for i, c in enumerate(self._counts)]


class Runner:
    """Runs prompts and decode steps of one model; every step is launched operation by operation.

    backend_class: the operations, `TorchBackend` or one with its interface.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, backend_class: type[TorchBackend]):
        self.spec, self.device, self.dtype = spec, device, dtype
        self._backend_class = backend_class
        self.backend: TorchBackend | None = None
        self.cache: KVCache | None = None
        self.state: SlotState | None = None
        self._rotary_length = 0

    @torch.inference_mode()
    def prepare(self, weights: ModelWeights, slots: int, length: int, capacity: int, rule: SamplingRule) -> None:
        """Make room for `slots` sequences of `length` tokens with `capacity` drawn ones; keeps what is large enough."""
        self.weights, self.rule = weights, rule
        self.stop = torch.tensor(rule.stop_token_ids, dtype=torch.int64, device=self.device)
        if self.backend is None or self._rotary_length < length:
            self._rotary_length = length
            self.backend = self._backend_class(self.spec, self.spec.rotary_table(length, self.device))
        if not self.holds(slots, length):
            self.release()
            self.cache = KVCache.allocate(self.spec, slots, length, self.device, self.dtype)
        if self.state is None or len(self.state.token) < slots or self.state.capacity < capacity:
            self.state = SlotState.allocate(slots, capacity, self.device)
        self.state.done.fill_(True)

    def holds(self, slots: int, length: int) -> bool:
        """Whether the cache at hand is large enough."""
        return self.cache is not None and self.cache.slots >= slots and self.cache.length >= length

    def release(self) -> None:
        """Free the cache; the next `prepare` makes a new one."""
        self.cache = None

    @torch.inference_mode()
    def prefill(self, starts: Sequence[Start]) -> None:
        """Compute keys and values of each prompt but its last token, which the first decode step takes."""
        starts = sorted(starts, key=lambda s: len(s.prompt_ids))
        prompts = [s.prompt_ids[:-1] for s in starts if len(s.prompt_ids) > 1]
        if not prompts:
            return
        lengths = [len(p) for p in prompts]
        slots = torch.tensor([s.slot for s in starts if len(s.prompt_ids) > 1])
        flat = torch.tensor([token for prompt in prompts for token in prompt])
        positions = torch.cat([torch.arange(length) for length in lengths])
        slots = slots.repeat_interleave(torch.tensor(lengths))
        flat, positions, slots = (x.to(self.device, non_blocking=True) for x in (flat, positions, slots))
        phase = self.backend.prefill(self.cache, slots, positions, lengths)
        forward(self.weights, self.backend, flat, phase, cache_only=True)

    @torch.inference_mode()
    def copy_prompts(self, sources: list[int], targets: list[int], length: int) -> None:
        """Give slots `targets` the first `length` keys and values of slots `sources`."""
        if targets and length:
            self.cache.copy_slots(self._index(sources), self._index(targets), length)

    @torch.inference_mode()
    def start(self, starts: Sequence[Start]) -> None:
        """Set the slots of new samples to draw their first token."""
        slots = self._index([s.slot for s in starts])
        last = [len(s.prompt_ids) - 1 for s in starts]
        rows = {
            "token": [s.prompt_ids[-1] for s in starts],
            "position": last,
            "start": last,
            "limit": [p + s.max_tokens - 1 for p, s in zip(last, starts)],
            "key": [s.key for s in starts],
        }
        for name, values in rows.items():
            getattr(self.state, name)[slots] = self._index(values)
        self.state.done[slots] = False

    @torch.inference_mode()
    def decode(self, n: int, steps: int, context: int) -> None:
        """Draw `steps` tokens in each of slots 0..n-1. context: more than any position reached; nothing waits for the device."""
        for _ in range(steps):
            self._step(n, context)

    @torch.inference_mode()
    def progress(self, n: int) -> tuple[list[bool], list[int]]:
        """(done, tokens drawn) of slots 0..n-1; waits for the device."""
        drawn = self.state.position[:n] - self.state.start[:n]
        done, counts = torch.stack((self.state.done[:n].long(), drawn)).tolist()
        return [bool(d) for d in done], counts

    @torch.inference_mode()
    def collect(self, slots: list[int], counts: list[int]) -> Drawn:
        """Begin to fetch the `counts` tokens that each of `slots` drew."""
        index, widest = self._index(slots), max(counts)
        return Drawn(self.state.out_tokens[index, :widest], self.state.out_log_probs[index, :widest], counts)

    @torch.inference_mode()
    def compact(self, sources: list[int], targets: list[int], n: int, context: int) -> None:
        """Move sequences from slots `sources` to `targets`; slots n and up are free then. context: as in `decode`."""
        if sources:
            source, target = self._index(sources), self._index(targets)
            self.cache.copy_slots(source, target, context)
            self.state.move(source, target)
        self.state.done[n:] = True

    def _step(self, n: int, context: int) -> None:
        state = self.state
        phase = self.backend.decode(self.cache, state.position[:n], context)
        hidden = forward(self.weights, self.backend, state.token[:n], phase)
        tokens, log_probs = sample(logits(self.weights, hidden), state.key[:n], state.position[:n], self.rule)
        state.record(tokens, log_probs, self.stop)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)
