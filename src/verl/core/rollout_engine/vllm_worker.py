"""What this project adds to a vLLM worker: taking over weights. vLLM mixes the class into its own worker class.

vLLM is imported inside the methods: the module is imported by name in a worker, and importing it elsewhere costs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from verl.core.rollout_engine.weight_buckets import BucketReader

# Between two looks at whether the trainer's process is still there.
OWNER_SECONDS = 1.0


class VLLMWorkerExtension:
    """Weight updates in three calls: `verl_begin_weights`, any number of loads, `verl_finish_weights`.

    Two ways in. *Direct*, for bfloat16 or float16 models on CUDA that vLLM runs as they are in the checkpoint: each
    tensor is copied into the parameter it belongs to. *Layer by layer*, for weights that vLLM stores in another form (CPU
    matmuls keep a packed copy, experts are permuted): vLLM collects a layer's tensors, packs them, and writes the result
    over the old one. Neither holds a second copy of the model.
    """

    # Given by vLLM's worker, into which this class is mixed.
    model_runner: Any
    vllm_config: Any
    device: torch.device

    def verl_begin_weights(self) -> None:
        """Start an update."""
        model = self.model_runner.get_model()
        self._verl_expected = {name for name, _ in model.named_parameters()}
        self._verl_loaded: set[str] = set()
        self._verl_reader: BucketReader | None = None
        if not self._verl_direct():
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            with self._verl_context():
                initialize_layerwise_reload(model)

    def verl_load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take in (Hugging Face name, tensor) pairs; tensors of any float dtype on any device."""
        with self._verl_context():
            self._verl_loaded |= self.model_runner.get_model().load_weights(weights) or set()

    def verl_load_bucket(self, bucket: bytes) -> None:
        """Take in one bucket that the trainer's process shares: see `weight_buckets`."""
        if self._verl_reader is None:
            self._verl_reader = BucketReader()
        tensors = self._verl_reader.tensors(bucket)
        # Layer-by-layer loading keeps tensors until their layer is whole; by then the bucket holds the next ones.
        with ThroughOwnMemory():
            self.verl_load_weights(tensors if self._verl_direct() else ((name, t.clone()) for name, t in tensors))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def verl_finish_weights(self) -> list[str]:
        """End the update. Returns the names (vLLM's) of parameters that no weight arrived for."""
        model = self.model_runner.get_model()
        if not self._verl_direct():
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            with self._verl_context():
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                if self.device.type == "cpu":
                    _repack_tied_heads(model)
        if self._verl_reader is not None:
            self._verl_reader.close()
            self._verl_reader = None
        return sorted(self._verl_expected - self._verl_loaded)

    def verl_end_with(self, owner: int) -> None:
        """End vLLM's processes when the process `owner`, the trainer's, is gone.

        vLLM itself does not notice that one killed: its processes would go on, and hold the GPU's memory.
        """
        above = psutil.Process().parents()
        between = list(itertools.takewhile(lambda process: process.pid != owner, above))
        if len(between) < len(above):
            threading.Thread(target=_end_after, args=(above[len(between)], between), daemon=True).start()

    def verl_seed(self, seed: int) -> None:
        """Seed the random state that vLLM draws from for requests without a seed of their own."""
        torch.manual_seed(seed)

    def _verl_direct(self) -> bool:
        config = self.vllm_config.model_config
        return self.device.type == "cuda" and config.quantization is None and not config.is_moe

    @contextlib.contextmanager
    def _verl_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            yield


def _end_after(owner: psutil.Process, others: list[psutil.Process]) -> None:
    # Waiting for its end would not do: one that nobody collects stays, as a zombie.
    with contextlib.suppress(psutil.NoSuchProcess):
        while owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
            time.sleep(OWNER_SECONDS)
    for process in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


class ThroughOwnMemory(TorchDispatchMode):
    """Copies from another GPU come by way of ordinary memory of the GPU that they go to; of a slice, the slice alone.

    An engine that can sleep has its weights in mapped memory, which no GPU but their own may write. torch lets the source's
    GPU do a copy between two, which CUDA then refuses ("invalid argument").
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args = (args[0], brought_over(*args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))


def brought_over(target: Tensor, source: Tensor) -> Tensor:
    """The source, or where it lies on another GPU a copy of it on the target's."""
    two_gpus = target.is_cuda and source.is_cuda and target.device != source.device
    return source.to(target.device) if two_gpus else source


def _repack_tied_heads(model: nn.Module) -> None:
    """Pack an output layer again that shares the embedding's weight.

    vLLM's layer-by-layer reload loads a shared parameter once, into the embedding; the output layer on a CPU multiplies
    with a packed copy of its own, which would keep the old weights.
    """
    seen: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.numel() == 0:
            continue
        if weight.data_ptr() in seen and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        seen[weight.data_ptr()] = module
