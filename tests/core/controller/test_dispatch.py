import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.core.controller.dispatch import (
    balanced,
    in_order,
    pack,
    pack_completions,
    shares,
    unpack,
    unpack_completions,
)
from verl.core.rollout_engine.api import Completion
from verl.data.batch import Ragged, SampleBatch


def test_balanced_by_hand():
    # 9 to the first, 8 to the second, 7 to the second (8 < 9) which is then full, 1 to the first.
    groups = balanced(torch.tensor([7, 9, 1, 8]), 2)
    assert [g.tolist() for g in groups] == [[1, 2], [0, 3]]


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 8))
def test_balanced_shares_every_sample_once_and_evenly(costs, parts):
    groups = balanced(torch.tensor(costs, dtype=torch.int64), parts)
    assert len(groups) == parts
    assert sorted(i for g in groups for i in g.tolist()) == list(range(len(costs)))
    assert all(g.tolist() == sorted(g.tolist()) for g in groups)
    sizes = [len(g) for g in groups]
    assert max(sizes) - min(sizes) <= 1


def test_balanced_is_near_even_in_tokens():
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(50, 1000, (320,), generator=generator)
    sums = [int(costs[g].sum()) for g in balanced(costs, 8)]
    assert max(sums) / min(sums) < 1.02
    in_turn = [int(costs[r::8].sum()) for r in range(8)]
    assert max(in_turn) / min(in_turn) > 1.1


def prompts_and_responses(prompts, responses):
    rows = [Ragged.from_rows(column) for column in (prompts, [[1] * n for n in responses])]
    return SampleBatch(dict(zip(("prompt_ids", "response_ids"), rows)))


def test_samples_of_a_prompt_stay_on_one_rank():
    # By prompt: [5] has 3 + 9 tokens, [6] 2 + 2, [7] 8 + 2, [8] 4 + 4, prompts included.
    given = prompts_and_responses([[5], [6], [7], [8], [5], [6], [7], [8]], [2, 1, 7, 3, 8, 1, 1, 3])
    assert [g.tolist() for g in shares(given, 2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_samples_of_a_prompt_are_divided_where_ranks_would_get_unlike_numbers():
    three = prompts_and_responses([[5], [5], [6], [6], [7], [7]], [1] * 6)
    assert [len(g) for g in shares(three, 2)] == [3, 3]
    uneven = prompts_and_responses([[5], [5], [5], [6]], [1] * 4)
    assert [len(g) for g in shares(uneven, 2)] == [2, 2]
    assert [len(g) for g in shares(prompts_and_responses([[5]], [3]), 2)] == [1, 0]


def batch():
    return SampleBatch(
        {
            "ids": Ragged.from_rows([[1, 2], [], [3]]),
            "mask": Ragged(torch.tensor([True, False, True]), torch.tensor([2, 0, 1])),
            "score": torch.tensor([0.5, 1.0, 2.0]),
            "uid": ["a", "b", "c"],
        }
    )


def same(one: SampleBatch, other: SampleBatch) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        if isinstance(column, Ragged):
            assert column.lengths.tolist() == other[name].lengths.tolist()
            assert torch.equal(column.values, other[name].values)
        elif isinstance(column, list):
            assert column == other[name]
        else:
            assert torch.equal(column, other[name])


def test_in_order_undoes_the_split():
    groups = [torch.tensor([2]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 1])]
    whole = in_order([batch().select(g) for g in groups], groups)
    same(whole, batch())
    assert whole["uid"] == ["a", "b", "c"]


def test_a_batch_travels_unchanged_and_without_a_copy():
    packed = pack(batch())
    same(unpack(packed), batch())
    values = packed["ids"][1]
    assert unpack(packed)["ids"].values.data_ptr() == values.ctypes.data


def test_arrays_that_may_not_be_written_to_are_read_without_a_warning(recwarn):
    packed = {name: (kind, *map(_frozen, arrays)) for name, (kind, *arrays) in pack(batch()).items()}
    same(unpack(packed).select([0, 1, 2]), batch())
    assert not recwarn.list


def _frozen(value):
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    return value


def test_completions_travel_unchanged():
    given = [
        Completion([5, 6], [-0.5, -0.25], "stop", 3),
        Completion([], [], "abort", 3),
        Completion([7], [-1.5], "length", 2),
    ]
    assert unpack_completions(pack_completions(given)) == given
    assert unpack_completions(pack_completions([])) == []


def test_an_unknown_reason_does_not_pass():
    with pytest.raises(ValueError, match="not in tuple"):
        pack_completions([Completion([1], [0.0], "eos")])
