import torch

from verl.core.model_engine.packing import (
    PackedInputs,
    prompt_owners,
    split_by_count,
    split_by_tokens,
    split_sharing_prompts,
)
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


def test_split_by_count():
    assert [g.tolist() for g in split_by_count(5, 2)] == [[0, 1], [2, 3], [4]]


def group_batch():
    """Two samples of prompt [7, 8] around one of prompt [5]; the last response is empty."""
    return SampleBatch(
        {
            "prompt_ids": Ragged.from_rows([[7, 8], [5], [7, 8], [7, 8]]),
            "response_ids": Ragged.from_rows([[9, 2], [4, 6, 1], [3, 3, 3], []]),
        }
    )


def test_a_shared_prompt_is_packed_once():
    packed = PackedInputs.make(group_batch(), "cpu", share_prompts=True)
    assert packed.input_ids.tolist() == [7, 8, 9, 5, 4, 6, 3, 3]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 2, 3]
    assert packed.layout.lengths.tolist() == [3, 3, 4, 2]
    assert packed.layout.cu_seqlens.tolist() == [0, 3, 6, 10, 12]
    assert packed.layout.index.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 0, 1]
    assert packed.layout.source.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert packed.target_positions.tolist() == [1, 2, 3, 4, 5, 1, 6, 7]
    assert packed.labels.tolist() == [9, 2, 4, 6, 1, 3, 3, 3]


def test_prompts_are_shared_only_on_request_and_only_where_equal():
    assert PackedInputs.make(group_batch(), "cpu").layout.index is None
    different = SampleBatch({"prompt_ids": Ragged.from_rows([[7], [8]]), "response_ids": Ragged.from_rows([[1], [2]])})
    packed = PackedInputs.make(different, "cpu", share_prompts=True)
    assert packed.layout.index is None
    assert packed.input_ids.tolist() == [7, 8]


def test_prompt_owners_tell_lengths_apart():
    """[1] and [2, 1] end alike, and [0] is a prefix of [0, 0] in bytes too."""
    prompts = Ragged.from_rows([[1], [2, 1], [0], [0, 0], [1], [0, 0]])
    assert prompt_owners(prompts).tolist() == [0, 1, 2, 3, 0, 3]


def test_the_samples_of_a_prompt_stay_together_and_count_it_once():
    prompts = [[7] * 10, [8] * 10, [7] * 10, [8] * 10]
    batch = SampleBatch({"prompt_ids": Ragged.from_rows(prompts), "response_ids": Ragged.from_rows([[1] * 5] * 4)})
    assert [g.tolist() for g in split_sharing_prompts(batch, max_tokens=20)] == [[0, 2], [1, 3]]
    assert [g.tolist() for g in split_sharing_prompts(batch, max_tokens=40)] == [[0, 1, 2, 3]]
    divided = split_sharing_prompts(batch, max_tokens=19)
    assert sorted(g.tolist() for g in divided) == [[0], [1], [2], [3]]


def test_nothing_splits_into_nothing():
    nothing = SampleBatch({"prompt_ids": Ragged.from_rows([]), "response_ids": Ragged.from_rows([])})
    assert split_by_tokens(nothing.token_counts, 100) == split_sharing_prompts(nothing, 100) == []
