"""Several gloo ranks against one: the same log-probs, losses, gradients, weights and checkpoints."""

import pytest
import torch
import torch.distributed as dist
from tests.core.controller import ranks
from tests.core.spawn import on_ranks

from verl.core.controller.dispatch import in_order
from verl.core.model_engine.parallel import ensure_process_group
from verl.data.batch import SampleBatch

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{number of ranks: what each rank computed}; groups run in this order, each resuming from those before."""
    folder = tmp_path_factory.mktemp("ranks")
    ensure_process_group(torch.device("cpu"), 60)
    assert dist.get_world_size() == 1
    (folder / "1").mkdir()
    two = on_ranks(2, folder / "2", ranks.work)
    return {2: two, 1: [ranks.work(folder / "1")], 4: on_ranks(4, folder / "4", ranks.work)}


def same_weights(
    one, other, atol=3e-5
):  # a third of a percent of the learning rate: Adam divides small gradients by small ones
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=atol, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def same_update(one, other):
    metrics, weights = one
    other_metrics, other_weights = other
    for first, second in zip(metrics, other_metrics, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert second[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name
    same_weights(weights, other_weights)


@pytest.mark.parametrize("world", [2, 4])
def test_log_probs(results, world):
    _, want, want_entropy = results[1][0]["log_probs"]
    groups, values, entropies = zip(*(r["log_probs"] for r in results[world]))
    parts = [SampleBatch({"p": p, "e": e}) for p, e in zip(values, entropies)]
    whole = in_order(parts, groups)
    torch.testing.assert_close(whole["p"].values, want.values, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole["e"].values, want_entropy.values, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("limit", ["tokens", "samples", "whole", "reduced each time"])
@pytest.mark.parametrize("world", [2, 4])
def test_updates(results, world, limit):
    for rank in results[world]:
        same_update(results[1][0]["updates"]["whole"], rank["updates"][limit])
    assert results[1][0]["updates"]["whole"][0][0]["grad_norm"] > 0.1  # or equal numbers would say little


@pytest.mark.parametrize("limit", ["hybrid", "copies"])
def test_hybrid_sharding(results, limit):
    metrics, weights = results[1][0]["updates"]["whole"]
    for rank in results[4]:
        same_update((metrics, weights), rank["updates"][limit])
        assert rank["updates"][limit][0][1]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=2e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_value_model(results, world):
    metrics, weights, want = results[1][0]["critic"]
    for rank in results[world]:
        same_update(([metrics], weights), ([rank["critic"][0]], rank["critic"][1]))
    got = sorted(v for rank in results[world] for v in rank["critic"][2].values.tolist())
    assert got == pytest.approx(sorted(want.values.tolist()), abs=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_adapters(results, world):
    metrics, weights, _, want, _ = results[1][0]["adapters"]
    base = results[1][0]["exported"][2]
    assert any(not torch.equal(weights[name], base[name]) for name in base)
    for rank in results[world]:
        same_update((metrics, weights), rank["adapters"][:2])
    groups, values = zip(*(rank["adapters"][2:4] for rank in results[world]))
    whole = in_order([SampleBatch({"p": p}) for p in values], groups)
    torch.testing.assert_close(whole["p"].values, want.values, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_merged_weights_for_one_rank_alone(results, world):
    first, *others = [rank["adapters"] for rank in results[world]]
    assert len(first[4]) == len(first[1]) > 10
    assert all(torch.equal(first[4][name], tensor) for name, tensor in first[1].items())
    assert [rank[4] for rank in others] == [{}] * (world - 1)


@pytest.mark.parametrize("heads", ranks.HEADS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_the_tokens_of_a_micro_batch(results, world, heads):
    """On 4 ranks two groups of two. With 1 key head two ranks each have a copy of it."""
    one, of_ranks = results[1][0]["sequences"][heads], [rank["sequences"][heads] for rank in results[world]]
    assert len(of_ranks) == world
    same_sequences(one, of_ranks)


def test_four_ranks_that_share_two_key_heads(results):
    of_ranks = [rank["sequences of all"] for rank in results[4]]
    assert len(of_ranks) == 4
    same_sequences(results[1][0]["sequences"][4, 2], of_ranks)


def same_sequences(one, of_ranks):
    for rank in of_ranks:
        for limit in ("tokens", "samples"):
            same_update(one["tokens"], rank[limit])
            for got, want in zip(rank[f"inferred: {limit}"], one["inferred: samples"]):
                expected = want.select(rank["group"]).values
                torch.testing.assert_close(got.values, expected, atol=1e-6, rtol=1e-5)
        metrics, weights, values = one["critic"]
        same_update(([metrics], weights), ([rank["critic"][0]], rank["critic"][1]))
        torch.testing.assert_close(rank["critic"][2].values, values.select(rank["group"]).values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("world", [2, 4])
def test_one_sample_a_rank_is_an_update_on_all(results, world):
    norms = {rank["few samples"][0][0]["grad_norm"] for rank in results[world]}
    assert len(norms) == 1
    assert norms.pop() > 0


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_weights(results, world):
    for rank in results[world]:
        plain, half, whole, (got, peak_extra) = rank["exported"]
        assert plain.keys() == half.keys() == results[1][0]["exported"][0].keys()
        for name, tensor in plain.items():
            assert torch.equal(tensor, whole[name]), name
            assert torch.equal(half[name], whole[name].bfloat16()), name
        received = sum(t.nbytes for t in whole.values()) * (world - 1) / world
        assert received <= got < 1.1 * received  # what rows that cannot be shared evenly add
        # Two buckets with what was sent for each, and one that gloo's thread may still have; the tensor at hand and the one
        # before it, which the caller still has.
        assert 0 < peak_extra <= 3 * 8192 * (1 + 1 / world) + 2 * max(t.nbytes for t in whole.values())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_for_servers_leave_the_first_rank_in_parts_and_no_rank_has_all_of_them(results, world):
    first, *others = [rank["parts"] for rank in results[world]]
    assert all(parts == [] for parts, _ in others)
    whole = results[world][0]["exported"][2]
    parts, report = first
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert all(torch.equal(t, whole[name].bfloat16()) for part in parts for name, t in part.items())
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 2048 for part in parts)
    total, largest = sum(2 * t.numel() for t in whole.values()), max(2 * t.numel() for t in whole.values())
    # Buckets as above; tensors at hand; a part's tensors and the next one's first, and the part's bytes.
    assert report.peak_extra_bytes <= 3 * 4096 + 5 * largest + 1024 < total
    assert total * (world - 1) / world <= report.received_bytes <= 1.1 * total * (world - 1) / world
    for _, of_other in others:
        assert of_other.received_bytes == 0
        assert of_other.peak_extra_bytes <= 3 * 4096 / world


@pytest.mark.parametrize("world", [2, 4])
def test_broadcast_weights(results, world):
    sender, *receivers = [rank["sent"] for rank in results[world]]
    for receiver in receivers:
        for (want, total, peak), (got, received, _) in zip(sender[:2], receiver[:2], strict=True):
            assert list(got) == ["a", "b", "c", "d"]
            assert all(torch.equal(got[n], want[n]) and got[n].dtype == torch.bfloat16 for n in want)
            assert total == sum(t.nbytes for t in want.values()) == 2 * (21 + 2000 + 5 + 2)
            assert total <= received <= total + 4 * 256  # tensors begin at multiples of 256 bytes
            assert peak <= 2 * 4096
    assert "differ in name, shape or dtype" in sender[2]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_checkpoints_load_on_any_number_of_ranks(results, world):
    for rank in results[world]:
        after = rank["resumed"]
        assert set(after) == {"unbroken"} | {str(n) for n in {2: [2], 1: [2, 1], 4: [2, 1, 4]}[world]}
        metrics, weights = results[1][0]["resumed"]["unbroken"]
        for metrics_after, weights_after in after.values():
            same_update(([metrics], weights), ([metrics_after], weights_after))
