"""Values by hand for the format that every stage shares."""

import pytest
import torch

from verl.data.batch import Ragged, SampleBatch, ranges


@pytest.fixture
def ragged():
    return Ragged.from_rows([[1, 2], [], [3], [4, 5, 6]])


@pytest.fixture
def batch(ragged):
    return SampleBatch({"ids": ragged, "score": torch.tensor([0.0, 1.0, 2.0, 3.0]), "uid": ["a", "b", "c", "d"]})


def rows(ragged):
    return [r.tolist() for r in ragged.rows()]


def test_ranges():
    assert ranges(torch.tensor([5, 0, 9]), torch.tensor([2, 3, 0])).tolist() == [5, 6, 0, 1, 2]


def test_select_repeats_and_reorders(ragged):
    assert rows(ragged.select(torch.tensor([3, 0, 1, 3]))) == [[4, 5, 6], [1, 2], [], [4, 5, 6]]


def test_sums_count_empty_rows(ragged):
    assert ragged.sums().tolist() == [3, 0, 3, 15]
    wide = ragged.with_values(torch.arange(12).view(6, 2))
    assert wide.sums().tolist() == [[2, 4], [0, 0], [4, 5], [24, 27]]


def test_cat_and_values_of_other_types(ragged):
    assert rows(Ragged.cat([ragged, Ragged.from_rows([[7]])])) == [[1, 2], [], [3], [4, 5, 6], [7]]
    assert Ragged.from_rows([[True], [False, True]], dtype=torch.bool).values.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="3 values for lengths that sum to 2"):
        Ragged(torch.zeros(3), torch.tensor([2]))


def test_batch_selects_every_kind_of_column(batch):
    picked = batch.select([2, 0])
    assert (rows(picked["ids"]), picked["score"].tolist(), picked["uid"]) == ([[3], [1, 2]], [2.0, 0.0], ["c", "a"])


def test_split_and_cat_are_inverse(batch):
    parts = batch.split(3)
    assert [len(p) for p in parts] == [3, 1]
    whole = SampleBatch.cat(parts)
    assert (rows(whole["ids"]), whole["score"].tolist(), whole["uid"]) == (
        rows(batch["ids"]),
        batch["score"].tolist(),
        batch["uid"],
    )


def test_mistakes_are_named(batch):
    with pytest.raises(ValueError, match="columns of different sizes"):
        batch.with_columns(extra=[1])
    with pytest.raises(KeyError, match=r"no column 'advantages'; it has \['ids', 'score', 'uid'\]"):
        batch["advantages"]
    with pytest.raises(ValueError, match=r"columns differ: \['score'\]"):
        SampleBatch.cat([batch, batch.without("score")])
