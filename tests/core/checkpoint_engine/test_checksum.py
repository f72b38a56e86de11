import torch

from verl.core.checkpoint_engine.checksum import Sums, checksum, differing


def test_by_hand():
    # Bit patterns 1 and 2 at places 1 and 2: the plain sum is 3, the placed one 1 x 1 + 2 x 2 = 5.
    assert checksum(torch.tensor([1, 2], dtype=torch.int32)) == (3 * 0x9E3779B97F4A7C15 + 5) % 2**64


def test_any_bit_and_any_place_counts():
    tensor = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    sums = {checksum(tensor)}
    for i in range(0, 2100, 13):
        changed = tensor.clone()
        bits = changed.view(-1).view(torch.int32)
        bits[i] ^= 1 << (i % 31)
        sums.add(checksum(changed))
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert len(sums | {checksum(swapped), checksum(tensor.bfloat16())}) == 1 + len(range(0, 2100, 13)) + 2
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)  # values, not memory


def test_sums_are_of_what_the_receiver_keeps():
    sums = Sums(torch.bfloat16)
    tensors = {"a": torch.tensor([1.001, 2.0]), "n": torch.tensor([3])}
    assert dict(sums.watch(tensors.items())).keys() == tensors.keys()
    held = {"a": checksum(tensors["a"].bfloat16()), "n": checksum(tensors["n"])}
    assert differing(sums.by_name, held) == []
    assert differing(sums.by_name, {"a": held["a"], "x": 1}) == ["n", "x"]
