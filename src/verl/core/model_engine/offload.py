"""Weights and optimizer moments that wait in host memory while the device needs the room."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from verl.config.schema import FSDPConfig
from verl.core.checkpoint_engine.broadcast import ALIGNMENT
from verl.core.model_engine.parallel import reshard

# Of each of the two moments in one chunk. Two chunks are on the device at once.
CHUNK_BYTES = 1 << 30


class HostMemory:
    """One piece of this machine's memory, zeros at first, page-locked where copies to and from a GPU need it.

    `bytes` is all of it, uint8. It has exactly the size asked for (torch's own page-locked memory comes in powers of two),
    in huge pages where the system has them, which take less time to lock; and a forked child has no part in it, since a
    fork would have to copy locked pages. It is unlocked when this object goes; views of it stay good.
    """

    def __init__(self, size: int, device: torch.device):
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    pages.madvise(getattr(mmap, advice))
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:size]
        if device.type == "cuda" and size:
            _lock(self.bytes)
            weakref.finalize(self, _unlock, self.bytes).atexit = False


def _lock(memory: Tensor) -> None:
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except torch.cuda.CudaError as error:
        error.add_note(f"This machine's memory, not the GPU's: {memory.nbytes / 1e9:.1f} GB for fsdp_config.*_offload.")
        raise


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _places(tensors: list[Tensor]) -> tuple[list[int], int]:
    """First byte of each tensor where they are laid end to end, and the bytes that all take."""
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


def _at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The tensor with the dtype and shape of `like` that begins at byte `start` of `memory`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: the very memory, so to be called where no gradient is recorded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- the optimizer's moments -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slice:
    """Elements first to last of a parameter. start: byte of their moments in the chunk."""

    parameter: nn.Parameter
    first: int
    last: int
    start: int


@dataclass
class _Chunk:
    """Bytes start to stop of either moment."""

    start: int
    stop: int
    slices: list[_Slice] = field(default_factory=list)


class StateOffload:
    """Steps of an AdamW whose moments stay in host memory and pass through the device a chunk at a time.

    While one chunk is updated and goes back, the next comes. Each of the two places on the device has a stream of its own,
    on which all that happens in it is in order. The numbers are those of `optimizer.step()`, bit for bit, since AdamW
    treats each element by itself.

    Args:
        chunk_bytes: of one moment in a chunk; four times that is what a step takes on the device. A multiple of ALIGNMENT.
    """

    def __init__(self, optimizer: torch.optim.AdamW, device: torch.device, chunk_bytes: int = CHUNK_BYTES):
        self._optimizer, self._device, self._chunk_bytes = optimizer, device, chunk_bytes
        (self._group,) = optimizer.param_groups
        self._memory: HostMemory | None = None
        self._moments: tuple[Tensor, Tensor]
        self._chunks: list[_Chunk] = []

    @torch.no_grad()
    def make_states(self) -> None:
        """Give every parameter its state, the first time: moments of zero on the host, the step counter on the device."""
        if self._memory is not None:
            return
        parameters = self._group["params"]
        places, size = _places([_local(p) for p in parameters])
        self._memory = HostMemory(2 * size, self._device)
        self._moments = self._memory.bytes[:size], self._memory.bytes[size:]
        self._chunks = [_Chunk(at, min(at + self._chunk_bytes, size)) for at in range(0, size, self._chunk_bytes)]
        for parameter, place in zip(parameters, places, strict=True):
            self._divide(parameter, place)
            state = self._optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
            for name, memory in zip(("exp_avg", "exp_avg_sq"), self._moments, strict=True):
                state[name] = torch.empty_like(parameter, device="cpu")
                _local(state[name]).data = _at(memory, place, _local(parameter))

    def _divide(self, parameter: nn.Parameter, place: int) -> None:
        """Note in which chunks the parameter's moments lie, which begin at byte `place`."""
        local = _local(parameter)
        for chunk in self._chunks[place // self._chunk_bytes : -(-(place + local.nbytes) // self._chunk_bytes)]:
            begin, end = max(place, chunk.start), min(place + local.nbytes, chunk.stop)
            if begin < end:
                first, last = ((at - place) // local.element_size() for at in (begin, end))
                chunk.slices.append(_Slice(parameter, first, last, begin - chunk.start))

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. The host's moments are good when this returns."""
        self.make_states()
        on_gpu = self._device.type == "cuda"
        size = min(self._chunk_bytes, len(self._moments[0]))
        rooms = [torch.empty(2, size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        streams = [torch.cuda.Stream(self._device) if on_gpu else None for _ in rooms]
        for stream in streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))
        for number, chunk in enumerate(self._chunks):
            with torch.cuda.stream(streams[number % 2]):  # nothing on a CPU, where the stream is None
                self._pass(chunk, rooms[number % 2][:, : chunk.stop - chunk.start])
        if on_gpu:
            torch.cuda.synchronize(self._device)
        for parameter in self._group["params"]:
            if parameter.grad is not None:
                self._optimizer.state[parameter]["step"] += 1

    def _pass(self, chunk: _Chunk, room: Tensor) -> None:
        """Bring a chunk's moments into `room` [2, bytes], update its parameters, and take the moments back."""
        homes = [memory[chunk.start : chunk.stop] for memory in self._moments]
        for there, home in zip(room, homes, strict=True):
            there.copy_(home, non_blocking=True)
        slices = [s for s in chunk.slices if s.parameter.grad is not None]
        parameters = [_local(s.parameter).view(-1)[s.first : s.last] for s in slices]
        adamw(
            parameters,
            [_local(s.parameter.grad).reshape(-1)[s.first : s.last] for s in slices],
            *([_at(there, s.start, p) for s, p in zip(slices, parameters, strict=True)] for there in room),
            max_exp_avg_sqs=[],
            state_steps=[self._optimizer.state[s.parameter]["step"].clone() for s in slices],  # the kernel counts up
            fused=True,
            amsgrad=False,
            beta1=self._group["betas"][0],
            beta2=self._group["betas"][1],
            lr=self._group["lr"],
            weight_decay=self._group["weight_decay"],
            eps=self._group["eps"],
            maximize=False,
        )
        for there, home in zip(room, homes, strict=True):
            home.copy_(there, non_blocking=True)


def make_state_offload(
    optimizer: torch.optim.AdamW | None, fsdp: FSDPConfig, device: torch.device
) -> StateOffload | None:
    """What steps in the optimizer's place where its moments stay on the host; None: nothing, or FSDP's own offload."""
    moves = fsdp.optimizer_offload and device.type == "cuda" and not fsdp.offload_policy
    return StateOffload(optimizer, device) if moves and optimizer is not None else None


# ---- weights -----------------------------------------------------------------------------------------------------------


class TrainedWeights(contextlib.AbstractContextManager):
    """Weights that the device changes: moved there and back."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._model, self._device = model, device
        self.__exit__()

    def __enter__(self) -> None:
        self._model.to(self._device)

    def __exit__(self, *exception: object) -> None:
        reshard(self._model)
        self._model.to("cpu")


class FrozenWeights(contextlib.AbstractContextManager):
    """Weights that stay the same: a copy of them stays in host memory, and what the device has of them is dropped.

    The model's parameters stay on the device, with no memory while they are away: only within the context can they be read.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, device: torch.device):
        reshard(model)
        storages = {s.data_ptr(): s for s in (_local(p).untyped_storage() for p in model.parameters())}
        self._model, self._device = model, device
        self._there = [torch.empty(0, dtype=torch.uint8, device=device).set_(s) for s in storages.values()]
        places, size = _places(self._there)
        self._memory = HostMemory(size, device)
        self._homes = [_at(self._memory.bytes, at, t) for at, t in zip(places, self._there, strict=True)]
        for home, there in zip(self._homes, self._there, strict=True):
            home.copy_(there, non_blocking=True)
        self.__exit__()

    def __enter__(self) -> None:
        for home, there in zip(self._homes, self._there, strict=True):
            there.untyped_storage().resize_(len(home))
            there.copy_(home, non_blocking=True)

    def __exit__(self, *exception: object) -> None:
        reshard(self._model)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a gather on another stream may still read them
        for there in self._there:
            there.untyped_storage().resize_(0)


def resident_weights(
    model: nn.Module, fsdp: FSDPConfig, device: torch.device, *, frozen: bool
) -> contextlib.AbstractContextManager:
    """The context in which `model` computes: with param_offload its weights are on the host outside of it."""
    if not fsdp.param_offload or device.type != "cuda":
        return contextlib.nullcontext()
    return FrozenWeights(model, device) if frozen else TrainedWeights(model, device)
