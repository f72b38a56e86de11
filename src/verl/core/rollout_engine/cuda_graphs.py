"""`GraphRunner`: decode steps as CUDA graphs, one for each bucket of rows, so that the GPU sets the pace and Python does not."""

from __future__ import annotations

import time

import torch

from verl.core.rollout_engine.config import ModelSpec
from verl.core.rollout_engine.runner import Runner
from verl.core.rollout_engine.sampling import SamplingRule
from verl.core.rollout_engine.slots import SlotState
from verl.core.rollout_engine.triton_backend import TritonBackend
from verl.core.rollout_engine.weights import ModelWeights


class GraphRunner(Runner):
    """A `Runner` that captures a step the first time a bucket is needed and replays it from then on.

    Graphs hold the addresses of weights and slot state, which therefore stay where they are; they find the cache and the
    sampling rule through the backend's device tables. They are captured anew only after the slots had to grow.
    max_slots: the most rows that any call may use.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_slots: int):
        super().__init__(spec, device, dtype, TritonBackend)
        self._max_slots = max_slots
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._owner: tuple[ModelWeights, SlotState] | None = None

    def prepare(self, weights: ModelWeights, slots: int, length: int, capacity: int, rule: SamplingRule) -> None:
        """As `Runner.prepare`; graphs of other weights or slots are dropped."""
        super().prepare(weights, slots, length, capacity, rule)
        if self._owner is None or self._owner[0] is not weights or self._owner[1] is not self.state:
            self._graphs.clear()
            self._owner = (weights, self.state)

    def state_slots(self, slots: int) -> int:
        """All that any call may use: the state is small, and a new one would cost the graphs."""
        return max(slots, self._max_slots)

    @torch.inference_mode()
    def decode(self, n: int, steps: int, context: int) -> None:
        """Replay `steps` steps over the bucket that holds slots 0..n-1; the rows beyond them are done and draw nothing."""
        rows = min(self.cache.slots, bucket(n))
        key = (rows, self.backend.rule.truncates)
        if key not in self._graphs:
            began = time.perf_counter()
            self._graphs[key] = self._capture(rows, context)
            self.capture_seconds += time.perf_counter() - began
        for _ in range(steps):
            self._graphs[key].replay()

    def _capture(self, rows: int, context: int) -> torch.cuda.CUDAGraph:
        # A step before the capture compiles kernels and fills cuBLAS's workspaces. Rows that are done draw nothing in it,
        # and their keys and values come out as the real step will write them.
        done = self.state.done.clone()
        self.state.done.fill_(True)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._step(rows, context)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.state.done.copy_(done)
        graph = torch.cuda.CUDAGraph()
        # Other threads (rewards, loggers) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(rows, context)
        return graph


def bucket(rows: int) -> int:
    """The number of rows that a graph for `rows` computes: powers of two to 16, then at most an eighth more than asked.

    >>> [bucket(n) for n in (1, 3, 16, 17, 33, 100, 600, 1025)]
    [1, 4, 16, 20, 36, 104, 640, 1152]
    """
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = max(4, 1 << ((rows - 1).bit_length() - 4))
    return -(-rows // step) * step
