"""Weights through a shared bucket: what arrives is what was sent, whatever the bucket's size."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from verl.core.rollout_engine.weight_buckets import BucketReader, BucketWriter


def _weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "scalar": (), "big": (40, 30), "c": (2, 2, 2)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["counts"] = torch.tensor([1, 2, 3])
    weights["turned"] = torch.arange(6.0).reshape(2, 3).T
    return weights


def _leftovers():
    return {p.name for p in Path("/dev/shm").glob("verl-weights-*")}


@pytest.mark.parametrize("bucket_bytes", [64, 1024, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_cast_and_in_order(bucket_bytes, dtype):
    weights, before = _weights(), _leftovers()
    reader, arrived, deliveries = BucketReader(), {}, 0

    def deliver(bucket):
        nonlocal deliveries
        deliveries += 1
        arrived.update((name, tensor.clone()) for name, tensor in reader.tensors(bucket))

    writer = BucketWriter(torch.device("cpu"), bucket_bytes, dtype)
    sent = writer.send(weights.items(), deliver)
    reader.close()
    writer.close()

    assert list(arrived) == list(weights)
    for name, tensor in weights.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert arrived[name].dtype == expected.dtype
        torch.testing.assert_close(arrived[name], expected, rtol=0, atol=0)
    # 15 + 7 + 1 + 1200 + 8 + 6 floating numbers and 3 of 8 bytes.
    assert sent == 1237 * dtype.itemsize + 24
    assert writer.largest == max(bucket_bytes, 1200 * dtype.itemsize)
    assert (deliveries == 1) == (bucket_bytes == 1 << 20)
    assert _leftovers() == before


def _read_in_child(bucket, answers):
    reader = BucketReader()
    answers.put({name: tensor.tolist() for name, tensor in reader.tensors(bucket)})


def test_another_process_reads_them():
    context = multiprocessing.get_context("spawn")
    answers, got = context.Queue(), {}

    def deliver(bucket):
        child = context.Process(target=_read_in_child, args=(bucket, answers))
        child.start()
        got.update(answers.get(timeout=60))
        child.join()

    writer = BucketWriter(torch.device("cpu"), 1 << 16, torch.float32)
    writer.send([("w", torch.tensor([[1.5, -2.0]])), ("n", torch.tensor(7))], deliver)
    writer.close()
    assert got == {"w": [[1.5, -2.0]], "n": 7}
