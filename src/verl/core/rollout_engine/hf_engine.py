"""`HFEngine`: any causal language model of transformers, through its own padded `generate`. Slow, and works everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutStats
from verl.core.rollout_engine.requests import assemble, by_rule, check_finite, check_fits, check_requests, take_from
from verl.core.rollout_engine.sampling import SamplingRule, sample, stream_key
from verl.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HFEngine:
    """Generation with the model itself, which may be the trainer's.

    Args:
        model: a transformers model; its dropout is off while it generates.
        config: actor_rollout_ref.rollout; max_num_seqs is the batch size.
        pad_token_id: what shorter prompts are padded with; it is masked.
    """

    def __init__(self, model: PreTrainedModel, *, config: RolloutConfig | None = None, pad_token_id: int = 0):
        self.model = model
        self.config = config or RolloutConfig()
        self.pad_token_id = pad_token_id
        self.version = 0
        self.stats = RolloutStats()
        self._aborted: set[int] = set()

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in order."""
        return assemble(requests, self.stream(requests))

    def stream(self, requests: list[Request], feed: Feed | None = None) -> Iterator[tuple[int, int, Completion]]:
        """(request index, sample index, completion), batch after batch. feed: is asked between batches."""
        check_requests(requests)
        if feed is not None:
            check_fits(requests, feed)
        self._aborted = set()
        self.stats = RolloutStats()
        return self._stream(requests, feed)

    def abort(self, requests: Iterable[int]) -> None:
        """Stop these requests (by index) of the stream in progress; their samples come with what they have so far."""
        self._aborted.update(requests)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the model. Tensors that are the model's own, or none at all, change nothing but the version."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        seen = set()
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                shape = list(own[name].shape) if name in own else "no such weight"
                raise CheckpointError(f"weight {name} {list(tensor.shape)} does not fit the rollout model: {shape}")
            seen.add(own[name].data_ptr())
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        missing = [name for name, p in own.items() if p.data_ptr() not in seen]
        if seen and missing:
            raise CheckpointError(f"{len(missing)} weights did not come: {', '.join(missing[:5])}")
        self.version = version

    def held_weights(self) -> dict[str, Tensor]:
        """The weights that it generates with, by checkpoint name."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def sleep(self) -> None:
        """Nothing is kept between calls."""

    def wake(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        """Nothing to stop: the model is the caller's."""

    def _stream(self, requests: list[Request], feed: Feed | None) -> Iterator[tuple[int, int, Completion]]:
        for rule, group in by_rule(requests).items():
            yield from self._generate_all(group, rule)
        taken = len(requests)
        while feed is not None and (more := take_from(feed, True)) is not None:
            yield from self._generate_all(dict(enumerate(more, start=taken)), SamplingRule.of(feed.sampling))
            taken += len(more)

    def _generate_all(self, group: dict[int, Request], rule: SamplingRule) -> Iterator[tuple[int, int, Completion]]:
        samples = [(r, i) for r, request in group.items() for i in range(request.sampling.n)]
        # Neighbours of like length need little padding.
        samples.sort(key=lambda s: (group[s[0]].sampling.max_tokens, len(group[s[0]].prompt_ids)))
        for first in range(0, len(samples), self.config.max_num_seqs):
            batch = samples[first : first + self.config.max_num_seqs]
            for request, index in [s for s in batch if s[0] in self._aborted]:
                yield request, index, Completion([], [], "abort", self.version)
            if batch := [s for s in batch if s[0] not in self._aborted]:
                yield from self._generate_batch(group, batch, rule)

    def _generate_batch(
        self, group: dict[int, Request], batch: list[tuple[int, int]], rule: SamplingRule
    ) -> Iterator[tuple[int, int, Completion]]:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        began = time.perf_counter()
        prompts = [group[r].prompt_ids for r, _ in batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        drawing = _Drawing(group, batch, rule, self._aborted, self.model.device)
        with _neutral(self.model, max(group[r].sampling.max_tokens for r, _ in batch)), torch.no_grad():
            self.model.generate(
                ids,
                attention_mask=mask,
                logits_processor=LogitsProcessorList([drawing.draw]),
                stopping_criteria=StoppingCriteriaList([drawing.finished]),
            )
        self.stats.decode_seconds += time.perf_counter() - began
        self.stats.decode_steps += len(drawing.tokens)
        self.stats.prompt_tokens += sum(map(len, prompts))
        for (request, index), completion in zip(batch, drawing.completions(self.version)):
            check_finite(completion)
            self.stats.response_tokens += len(completion.token_ids)
            yield request, index, completion


class _Drawing:
    """Draws each step's tokens as the native engine does, and makes `generate` take them."""

    def __init__(
        self,
        group: dict[int, Request],
        batch: list[tuple[int, int]],
        rule: SamplingRule,
        aborted: set[int],
        device: torch.device,
    ):
        requests = [group[r] for r, _ in batch]
        self._batch, self._rule, self._aborted = batch, rule, aborted
        keys = [stream_key(q.sampling.seed, q.stream, q.first + i) for q, (_, i) in zip(requests, batch)]
        self._keys = torch.tensor(keys, device=device)
        self._last = torch.tensor([len(q.prompt_ids) - 1 for q in requests], device=device)
        self._limits = torch.tensor([q.sampling.max_tokens for q in requests], device=device)
        self._stop = torch.tensor(rule.stop_token_ids, dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(batch), dtype=torch.int64, device=device)
        self._done = torch.zeros(len(batch), dtype=torch.bool, device=device)
        self.tokens: list[Tensor] = []
        self.log_probs: list[Tensor] = []

    def draw(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [n, vocab] -> scores whose maximum is the drawn token, which greedy search then takes."""
        positions = self._last + len(self.tokens)
        tokens, log_probs = sample(scores.float().clone(), self._keys, positions, self._rule)
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def finished(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Which rows need no further token: bool [n]."""
        self._counts += ~self._done
        self._done |= torch.isin(self.tokens[-1], self._stop) | (self._counts >= self._limits)
        if self._aborted:
            self._done |= torch.tensor([r in self._aborted for r, _ in self._batch], device=self._done.device)
        return self._done

    def completions(self, version: int) -> Iterator[Completion]:
        tokens, log_probs = torch.stack(self.tokens, 1).tolist(), torch.stack(self.log_probs, 1).tolist()
        for row, count in enumerate(self._counts.tolist()):
            ids = tokens[row][:count]
            if ids[-1] in self._rule.stop_token_ids:
                reason = "stop"
            else:
                reason = "length" if count == int(self._limits[row]) else "abort"
            yield Completion(ids, log_probs[row][:count], reason, version)


@contextmanager
def _neutral(model: PreTrainedModel, max_new_tokens: int) -> Iterator[None]:
    """The model in evaluation mode, without the penalties and limits that its own generation config may ask for."""
    from transformers import GenerationConfig

    saved, training = model.generation_config, model.training
    # A pad token only silences a warning: rows are cut by their own counts.
    model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    model.eval()
    try:
        yield
    finally:
        model.generation_config = saved
        model.train(training)
