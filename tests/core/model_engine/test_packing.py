import torch

from verl.core.model_engine.packing import PackedInputs, split_by_count, split_by_tokens
from verl.data.batch import Ragged, SampleBatch


def test_packed_inputs_of_two_samples():
    batch = SampleBatch(
        {"prompt_ids": Ragged.from_rows([[7, 8], [5]]), "response_ids": Ragged.from_rows([[9, 2], [4, 6, 1]])}
    )
    packed = PackedInputs.make(batch, "cpu")
    assert packed.input_ids.tolist() == [7, 8, 9, 5, 4, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert packed.layout.lengths.tolist() == [3, 3]
    assert packed.layout.cu_seqlens.tolist() == [0, 3, 6]
    assert packed.layout.max_length == 3
    assert packed.target_positions.tolist() == [1, 2, 3, 4, 5]
    assert packed.labels.tolist() == [9, 2, 4, 6, 1]


def test_an_empty_response_has_no_targets():
    batch = SampleBatch({"prompt_ids": Ragged.from_rows([[7], [5, 6]]), "response_ids": Ragged.from_rows([[], [4]])})
    packed = PackedInputs.make(batch, "cpu")
    assert packed.layout.lengths.tolist() == [1, 2]
    assert packed.target_positions.tolist() == [2]
    assert packed.labels.tolist() == [4]


def test_split_by_tokens_is_even_and_within_the_budget():
    counts = torch.tensor([10, 90, 20, 80, 50, 50])
    groups = split_by_tokens(counts, max_tokens=100)
    assert sorted(torch.cat(groups).tolist()) == [0, 1, 2, 3, 4, 5]
    assert [int(counts[g].sum()) for g in groups] == [100, 100, 100]


def test_split_by_tokens_gives_a_long_sample_its_own_group():
    groups = split_by_tokens(torch.tensor([500, 10, 10]), max_tokens=100)
    assert sorted(g.tolist() for g in groups) == [[0], [1, 2]]


def test_split_by_tokens_makes_as_many_groups_as_asked():
    assert len(split_by_tokens(torch.tensor([1, 1, 1, 1]), max_tokens=100, min_groups=3)) == 3
    assert len(split_by_tokens(torch.tensor([1, 1]), max_tokens=100, min_groups=3)) == 2


def test_split_by_count():
    assert [g.tolist() for g in split_by_count(5, 2)] == [[0, 1], [2, 3], [4]]
