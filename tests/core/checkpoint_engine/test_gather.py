"""Whole weights on the ranks that take them, and what they cost each rank."""

import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.core.spawn import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.core.checkpoint_engine.gather import Traffic, gather_weights

pytestmark = pytest.mark.e2e

BUCKET = 8192
# Rows that ranks can share evenly and not, fewer rows than ranks, and a tensor that is larger than a bucket.
SHAPES = {"a": (24, 10), "b": (7, 3), "c": (2,), "d": (100, 40), "e": (24, 10), "f": (13,)}
TAKERS = {"last": (-1,), "every second": (0, 2), "all": None}
# Copies x shards of each number of ranks.
MESHES = {3: [(1, 3)], 4: [(2, 2), (4, 1)]}


class Memory(TorchDispatchMode):
    """Most bytes at once that the operations within it made, beside the memory of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        with torch.no_grad():
            self.known = weakref.WeakSet(t.to_local().untyped_storage() for t in known)
        self.live, self.peak = weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.live.add(storage)
        self.peak = max(self.peak, sum(s.nbytes() for s in self.live))
        return out


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def work(folder):
    """For each mesh, set of takers and dtype: weights, bytes received, the peak that is reported and that was seen."""
    out, world = {}, dist.get_world_size()
    for shape in MESHES[world]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp"))
        named = [(n, distribute_tensor(t, mesh, [Replicate(), Shard(0)])) for n, t in whole().items()]
        for name, dtype in itertools.product(TAKERS, (None, torch.bfloat16)):
            takers = None if TAKERS[name] is None else [rank % world for rank in TAKERS[name]]
            options = {"dtype": dtype, "bucket_bytes": BUCKET, "takers": takers}
            weights = {n: t.clone() for n, t in gather_weights(named, torch.device("cpu"), **options)}
            traffic = Traffic()
            with Memory([t for _, t in named]) as memory:
                for _ in gather_weights(named, torch.device("cpu"), **options, traffic=traffic):
                    pass
            out[shape, name, dtype] = weights, traffic.received, traffic.peak_extra, memory.peak
    return out


@pytest.fixture(scope="module", params=[3, 4])
def results(request, tmp_path_factory):
    return on_ranks(request.param, tmp_path_factory.mktemp("gather"), work)


def cases(results):
    """(mesh, takers' name, dtype, whether each rank takes, what each rank has)."""
    world = len(results)
    for shape, name, dtype in results[0]:
        takers = range(world) if TAKERS[name] is None else [rank % world for rank in TAKERS[name]]
        yield shape, name, dtype, [r in takers for r in range(world)], [rank[shape, name, dtype] for rank in results]


def test_takers_get_all_weights_bit_for_bit(results):
    for shape, name, dtype, takes, of_ranks in cases(results):
        for rank, (weights, *_) in enumerate(of_ranks):
            assert list(weights) == (list(SHAPES) if takes[rank] else []), (shape, name, rank)
            expected = whole() if dtype is None or shape == (4, 1) else {n: t.to(dtype) for n, t in whole().items()}
            assert all(torch.equal(weights[n], expected[n]) for n in weights), (shape, name, rank)


def test_a_taker_receives_each_weight_once_and_the_others_nothing(results):
    for shape, name, dtype, takes, of_ranks in cases(results):
        shards, item = shape[1], 4 if dtype is None else 2
        rows = {n: -(-size[0] // shards) * torch.Size(size[1:]).numel() for n, size in SHAPES.items()}
        least = (shards - 1) * sum(rows.values()) * item  # with what rows that cannot be shared evenly add
        assert [received for _, received, *_ in of_ranks] == [least * taken for taken in takes], (shape, name)


def test_the_peak_is_what_was_allocated(results):
    """A rank that only sends holds its shards of two buckets at most."""
    for shape, name, _, takes, of_ranks in cases(results):
        for rank, (*_, reported, seen) in enumerate(of_ranks):
            within = BUCKET if name == "all" else 0  # gloo's thread may give back an all-gather's memory in between
            assert abs(reported - seen) <= within, (shape, name, rank)
            if not takes[rank]:
                assert reported <= (100 * 40 * 4 + BUCKET) / shape[1] + 4 * 40, (shape, name, rank)


def test_a_group_without_a_taker_stays_out_of_it(results):
    """On 4 ranks that shard in two pairs, the first pair has no part in what the last rank takes."""
    shape = MESHES[len(results)][0]
    busy = [rank[shape, "last", None][2] > 0 for rank in results]
    assert busy == ([False, False, True, True] if len(results) == 4 else [True] * len(results))
