"""`NativeEngine`: the project's own generation engine, for one device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutStats
from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.kv_cache import cpu_budget, cuda_budget, slots_that_fit
from verl.core.rollout_engine.requests import assemble, by_rule, check_finite, check_fits, check_requests
from verl.core.rollout_engine.runner import Runner
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.scheduler import Schedule
from verl.core.rollout_engine.torch_backend import TorchBackend
from verl.core.rollout_engine.weights import WeightBuffers, bind_weights
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Decode steps between looks at the device. A look costs a GPU a wait and a CPU nothing.
CHECK_EVERY = {"cuda": 16, "cpu": 1}
# Memory that prompts and logits may need beside weights and cache: float32 logits twice, and wide activations.
LOGIT_COPIES = 3
ACTIVATION_WIDTHS = 8


class NativeEngine:
    """Generates with static slots, a decode loop without host syncs, and prompts computed once for their n samples.

    Args:
        hf_config: transformers config of a supported family (`config.supported` says why one is not).
        device: "cpu" or a CUDA device.
        dtype: of weights and activations; None takes the given weights' on a CPU (without weights float32), bfloat16 on a
            GPU. A CPU without bfloat16 matrix instructions computes in float32 instead, which is several times faster.
        config: actor_rollout_ref.rollout.
        weights: checkpoint name -> tensor, the trainer's parameters. If they have the engine's device and dtype on a CPU,
            the engine reads them in place, and an optimizer step is seen at once; else they are copied into buffers of the
            engine's own. None: the first `load_weights` brings them.
        own_copy: copy them in any case: what trains meanwhile does not change the policy in the middle of a sample.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        config: RolloutConfig | None = None,
        weights: Mapping[str, Tensor] | None = None,
        own_copy: bool = False,
    ):
        self.spec = ModelSpec.from_hf(hf_config)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.config = config or RolloutConfig()
        self.dtype = compute_dtype(self.device, dtype, weights)
        self.version = 0
        self.stats = RolloutStats()
        self._buffers: WeightBuffers | None = None
        self._weights = None
        self._bound: dict[str, Tensor] = {}
        self._aborted: set[int] = set()
        self._streaming = False
        self._runner = make_runner(self.spec, self.device, self.dtype, self.config)
        self._copied = own_copy and weights is not None and self._can_bind(weights.values())
        self.in_place = weights is not None and not own_copy and self._can_bind(weights.values())
        if weights is not None:
            self.load_weights(weights.items(), version=0)

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in order."""
        return assemble(requests, self.stream(requests))

    def stream(self, requests: list[Request], feed: Feed | None = None) -> Iterator[tuple[int, int, Completion]]:
        """(request index, sample index, completion) as samples finish. feed: requests that come later join the batch.

        Without a feed, requests with unlike temperature, top_k, top_p or stop tokens are generated one such group after
        another.
        """
        if self._streaming:
            raise RuntimeError("NativeEngine has one set of slots: finish or close the stream in progress first")
        self._check(requests)
        if feed is not None:
            check_fits(requests, feed)
            self.check_length(feed.longest)
        self._aborted = set()
        self.stats = RolloutStats()
        return self._stream(requests, feed)

    def abort(self, requests: Iterable[int]) -> None:
        """Stop these requests (by index) of the stream in progress; it then yields their samples with finish_reason
        "abort" and the tokens drawn so far. A sample continues where it stopped if its request comes again with those
        tokens appended to the prompt and the same seed and stream."""
        self._aborted.update(requests)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over weights named as in the Hugging Face checkpoint.

        In place nothing moves: tensors that took the place of earlier ones are bound, and none at all means that the known
        ones changed. Otherwise every weight has to come once, and is copied into the engine's buffers.
        """
        if self.in_place:
            tensors = dict(weights)
            if tensors:
                if not self._can_bind(tensors.values()):
                    raise ValueError(f"in-place weights must stay {self.dtype} on {self.device}")
                self._weights, self._bound = bind_weights(self.spec, tensors), tensors
        else:
            if self._buffers is None:
                # A copy of what could be read in place gives the same bits as that.
                self._buffers = WeightBuffers(self.spec, self.device, self.dtype, fuse=not self._copied)
            self._buffers.load(weights)
            self._weights = self._buffers.model
        self.version = version

    def held_weights(self) -> dict[str, Tensor]:
        """The weights that it generates with, by checkpoint name."""
        return dict(self._bound) if self._buffers is None else self._buffers.named()

    def sleep(self) -> None:
        """Free the KV cache. Weights and captured CUDA graphs stay; the graphs find the next cache through a table."""
        self._runner.release()
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to do: the next generate call makes the cache that it needs."""

    def close(self) -> None:
        self.sleep()
        self._buffers = self._weights = None
        self._bound = {}

    def _can_bind(self, tensors: Iterable[Tensor]) -> bool:
        same = all(t.device == self.device and t.dtype == self.dtype for t in tensors)
        return same and self.device.type == "cpu" and self._buffers is None

    def _check(self, requests: list[Request]) -> None:
        if self._weights is None:
            raise RuntimeError("NativeEngine has no weights yet: call load_weights first")
        check_requests(requests)
        self.check_length(max((len(r.prompt_ids) + r.sampling.max_tokens for r in requests), default=0))

    def check_length(self, longest: int) -> None:
        """ConfigError if the model cannot attend to `longest` tokens of prompt and response."""
        limits = {"max_position_embeddings": self.spec.max_positions, "sliding_window": self.spec.sliding_window}
        for name, limit in limits.items():
            if limit is not None and longest > limit:
                raise ConfigError(
                    f"Prompt plus response may reach {longest} tokens, and the model's {name} is {limit}. Lower "
                    "data.max_prompt_length or data.max_response_length"
                    + (", or set actor_rollout_ref.rollout.name=hf." if name == "sliding_window" else ".")
                )

    def _stream(self, requests: list[Request], feed: Feed | None) -> Iterator[tuple[int, int, Completion]]:
        self._streaming = True
        began, waited, captured = time.perf_counter(), 0.0, self._runner.capture_seconds
        try:
            groups = by_rule(requests)
            if feed is not None:
                groups = {SamplingRule.of(feed.sampling): dict(enumerate(requests))}
            for rule, group in groups.items():
                for item in self._schedule(group, rule, feed).run():
                    check_finite(item[2])
                    paused = time.perf_counter()
                    yield item
                    waited += time.perf_counter() - paused
        finally:
            self._streaming = False
        elapsed = time.perf_counter() - began - waited
        self.stats.decode_seconds = elapsed - self.stats.prefill_seconds
        self.stats.extra["graph_capture_seconds"] = self._runner.capture_seconds - captured

    def _schedule(self, group: dict[int, Request], rule: SamplingRule, feed: Feed | None) -> Schedule:
        if feed is None:
            length = max(len(r.prompt_ids) + r.sampling.max_tokens for r in group.values())
            capacity = max(r.sampling.max_tokens for r in group.values())
            samples = sum(r.sampling.n for r in group.values())
        else:
            length, capacity, samples = feed.longest, feed.sampling.max_tokens, feed.samples
        slots = self._slots(min(samples, self.config.max_num_seqs), length)
        self._runner.prepare(self._weights, slots, length, capacity, rule)
        return Schedule(
            self._runner,
            group,
            rule,
            slots=slots,
            check_every=CHECK_EVERY[self.device.type],
            token_budget=self.config.max_num_batched_tokens,
            version=self.version,
            stats=self.stats,
            aborted=self._aborted,
            feed=feed,
        )

    def _slots(self, wanted: int, length: int) -> int:
        if self._runner.holds(wanted, length):
            return wanted
        self._runner.release()
        if self.device.type == "cpu":
            budget, words = cpu_budget()
        else:
            rows = max(wanted * LOGIT_COPIES * self.spec.vocab_size * 4, self._prompt_activation_bytes())
            weight_bytes = self._buffers.nbytes if self._buffers else 0
            budget, words = cuda_budget(self.config.gpu_memory_utilization, self.device, weight_bytes, rows)
        return slots_that_fit(self.spec, wanted, length, self.dtype, budget, words)

    def _prompt_activation_bytes(self) -> int:
        widest = max(2 * self.spec.intermediate_size, ACTIVATION_WIDTHS * self.spec.hidden_size)
        return self.config.max_num_batched_tokens * widest * self.dtype.itemsize


def compute_dtype(
    device: torch.device, dtype: torch.dtype | None, weights: Mapping[str, Tensor] | None = None
) -> torch.dtype:
    """The dtype in which the engine computes when `dtype` is asked for (None: not said)."""
    if device.type == "cuda":
        return dtype or torch.bfloat16
    if dtype is None:
        dtype = next(iter(weights.values())).dtype if weights else torch.float32
    if dtype in (torch.bfloat16, torch.float16) and not cpu_has_fast_bf16():
        return torch.float32
    return dtype


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16, AMX, or Arm's equivalent)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def make_runner(spec: ModelSpec, device: torch.device, dtype: torch.dtype, config: RolloutConfig) -> Runner:
    """Triton kernels in CUDA graphs on a GPU (enforce_eager: without graphs), plain torch elsewhere."""
    if device.type != "cuda" or find_spec("triton") is None:
        return Runner(spec, device, dtype, TorchBackend)
    if config.enforce_eager:
        from verl.core.rollout_engine.triton_backend import TritonBackend

        return Runner(spec, device, dtype, TritonBackend)
    from verl.core.rollout_engine.cuda_graphs import GraphRunner

    return GraphRunner(spec, device, dtype, max_slots=config.max_num_seqs)
