"""Static slots on the device: prompts in, decode steps over the first n slots, tokens out, and nothing of scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import KVCache
from verl.core.rollout_engine.model import forward, logits
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.slots import Drawn, SlotState
from verl.core.rollout_engine.torch_backend import TorchBackend
from verl.core.rollout_engine.weights import ModelWeights


@dataclass(frozen=True)
class Start:
    """A sample that takes a slot."""

    slot: int
    prompt_ids: list[int]
    max_tokens: int
    key: int


class Runner:
    """Runs prompts and decode steps of one model; every step is launched operation by operation.

    backend_class: the operations, `TorchBackend` or one with its interface.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, backend_class: type[TorchBackend]):
        self.spec, self.device, self.dtype = spec, device, dtype
        self.backend = backend_class(spec, device)
        self.weights: ModelWeights | None = None
        self.cache: KVCache | None = None
        self.state: SlotState | None = None
        self.capture_seconds = 0.0  # of all graphs so far

    @torch.inference_mode()
    def prepare(self, weights: ModelWeights, slots: int, length: int, capacity: int, rule: SamplingRule) -> None:
        """Make room for `slots` sequences of `length` tokens with `capacity` drawn ones; keeps what is large enough."""
        self.weights = weights
        if not self.holds(slots, length):
            self.release()
            self.cache = KVCache.allocate(self.spec, slots, length, self.device, self.dtype)
        if self.state is None or len(self.state.token) < slots or self.state.capacity < capacity:
            self.state = SlotState.allocate(self.state_slots(slots), capacity, self.device)
        # Rows that are not in use may be computed along, at a position that the cache has.
        self.state.done.fill_(True)
        self.state.position.zero_()
        self.state.start.zero_()
        self.backend.attach(self.cache, self.state, rule)

    def state_slots(self, slots: int) -> int:
        """Rows of a new slot state."""
        return slots

    def holds(self, slots: int, length: int) -> bool:
        """Whether the cache at hand is large enough."""
        return self.cache is not None and self.cache.slots >= slots and self.cache.length >= length

    def release(self) -> None:
        """Free the cache; the next `prepare` makes a new one."""
        self.cache = None
        self.backend.detach()

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
        phase = self.backend.prefill(slots, positions, lengths)
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
    def peek(self, slots: list[int], spans: list[tuple[int, int]]) -> list[tuple[list[int], list[float]]]:
        """(tokens, log-probs) that each of `slots` drew, from the first of its span to before the last; waits for the device."""
        index, low, high = self._index(slots), min(a for a, _ in spans), max(b for _, b in spans)
        tokens = self.state.out_tokens[index, low:high].tolist()
        log_probs = self.state.out_log_probs[index, low:high].tolist()
        return [(t[a - low : b - low], p[a - low : b - low]) for t, p, (a, b) in zip(tokens, log_probs, spans)]

    @torch.inference_mode()
    def compact(self, sources: list[int], targets: list[int], n: int, context: int) -> None:
        """Move sequences from slots `sources` to `targets`; slots n and up are free then. context: as in `decode`."""
        if sources:
            source, target = self._index(sources), self._index(targets)
            self.cache.copy_slots(source, target, context)
            self.state.move(source, target)
        self.state.done[n:] = True

    def _step(self, n: int, context: int) -> None:
        hidden = forward(self.weights, self.backend, self.state.token[:n], self.backend.decode(n, context))
        self.backend.draw(logits(self.weights, hidden))

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)
