"""The samples that vLLM is generating in one stream, and what they have drawn so far."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Container, Iterator
from typing import Any

from verl.core.rollout_engine.api import Completion, Feed, Request, SamplingParams
from verl.core.rollout_engine.requests import take_from

# Steps between looks at what watched samples have drawn.
SHOW_EVERY = 4


class Running:
    """samples: (request, sample) by vLLM's name; taken: requests so far; feed: where further ones come from, until it ends."""

    def __init__(self, engine: Any, feed: Feed | None):
        self._engine, self.feed = engine, feed
        self._watched, self._show = (feed.watched, feed.show) if feed is not None else (set(), None)
        self.samples: dict[str, tuple[int, int]] = {}
        self.taken = 0
        self._shown: dict[str, int] = {}
        self._steps = 0

    def more(self) -> list[Request]:
        """What the feed gives now; nothing after its end."""
        if self.feed is None:
            return []
        requests = take_from(self.feed, not self.samples)
        if requests is None:
            self.feed = None
        return requests or []

    def end(self, aborted: Container[int], version: int) -> Iterator[tuple[int, int, Completion]]:
        """Take the samples of aborted requests out, with what they have."""
        for name in [name for name, (request, _) in self.samples.items() if request in aborted]:
            tokens, log_probs = self._drawn(name, 0)
            self._engine.abort_request([name])
            yield (*self.samples.pop(name), Completion(tokens, log_probs, "abort", version))

    def show(self) -> None:
        """Tell of what watched samples have drawn since the last time."""
        self._steps += 1
        if not self._watched or self._show is None or self._steps % SHOW_EVERY:
            return
        for name, (request, sample) in self.samples.items():
            if request in self._watched:
                tokens, log_probs = self._drawn(name, self._shown.get(name, 0))
                if tokens:
                    self._shown[name] = self._shown.get(name, 0) + len(tokens)
                    self._show(request, sample, tokens, log_probs)

    def close(self) -> None:
        """Nothing is left in the engine."""
        if self.samples:
            self._engine.abort_request(list(self.samples))

    def _drawn(self, name: str, first: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs from number `first` on; what vLLM keeps for the final output, which is all that it gives out."""
        processor = self._engine.output_processor
        inside = getattr(processor, "external_req_ids", {}).get(name) or [name]
        state = processor.request_states.get(inside[0])
        if state is None:
            return [], []
        return list(state.detokenizer.output_token_ids[first:]), list(
            state.logprobs_processor.logprobs.logprobs[first:]
        )


def vllm_sampling(sampling: SamplingParams, seed: int | None) -> Any:
    """As vLLM takes it. seed: of this sample's own stream; None: it has none."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=seed,
        # vLLM knows no end token here: the stop tokens are the request's alone.
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def mixed(*numbers: int) -> int:
    """A seed in [0, 2**63) that any change of any number changes."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
