"""Rows of samples: the same columns come back, packed or not, to the bit and the dtype."""

import pytest
import torch
from tests.core.transfer_queue.helpers import ids

from verl.core.transfer_queue.rows import Item, batch_of, check_value, pack, rows_of, sizes, unpack
from verl.data.batch import Ragged, SampleBatch


@pytest.fixture
def batch():
    return SampleBatch(
        {
            "uid": ["a", "a", "b"],
            "ids": Ragged.from_rows([[1, 2], [], [3]]),
            "mask": Ragged.from_rows([[True, False], [], [True]], torch.bool),
            "log_probs": Ragged(torch.tensor([-0.5, -1.5, -2.5], dtype=torch.bfloat16), torch.tensor([2, 0, 1])),
            "wide": Ragged(torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 1])),
            "score": torch.tensor([0.5, 1.0, -1.0]),
            "version": torch.tensor([3, 3, 4]),
            "truth": [42, 7, 42],
            "kept": [ids(1), ids(2, 3), ids(4)],
            "extra": [{"a": [1, None]}, None, "text"],
        }
    )


def same(one: SampleBatch, other: SampleBatch):
    assert list(one.columns) == list(other.columns)
    for name, column in one.columns.items():
        found = other[name]
        assert type(found) is type(column), name
        if isinstance(column, Ragged):
            assert found.lengths.tolist() == column.lengths.tolist()
            column, found = column.values, found.values
        if isinstance(column, torch.Tensor):
            assert (found.dtype, found.shape, found.tolist()) == (column.dtype, column.shape, column.tolist()), name
        elif name == "kept":
            assert [x.tolist() for x in found] == [x.tolist() for x in column]
        else:
            assert found == column


def test_a_batch_comes_back_from_its_rows(batch):
    found = batch_of(batch["uid"], rows_of(batch))
    assert (len(found), found["uid"]) == (len(batch), batch["uid"])
    same(batch, found)


def test_packing_is_exact_and_saves_without_code(batch, tmp_path):
    rows = rows_of(batch)
    del rows[1]["score"], rows[0]["ids"]
    rows[2]["truth"] = 1.5
    torch.save(pack(rows), tmp_path / "rows.pt")
    found = unpack(torch.load(tmp_path / "rows.pt", weights_only=True))
    assert [sorted(row) for row in found] == [sorted(row) for row in rows]
    assert found[0]["truth"] == Item(42)
    assert (found[2]["truth"], type(found[2]["truth"])) == (1.5, float)
    assert "score" not in found[1]
    assert (found[0]["log_probs"].dtype, found[0]["log_probs"].tolist()) == (torch.bfloat16, [-0.5, -1.5])
    assert found[0]["wide"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert found[2]["version"].item() == 4
    assert [row["extra"] for row in found] == [{"a": [1, None]}, None, "text"]


def test_numbers_of_one_kind_keep_it():
    rows = [{"flag": True, "count": 1, "mean": 1, "none": 1.0}, {"flag": False, "count": 2, "mean": 0.5, "none": None}]
    batch = batch_of(["a", "b"], rows)
    assert [batch[name].dtype for name in ("flag", "count", "mean")] == [torch.bool, torch.int64, torch.float32]
    assert batch["mean"].tolist() == [1.0, 0.5]
    assert batch["none"] == [1.0, None]


def test_only_what_every_row_has_becomes_a_column():
    assert list(batch_of(["a", "b"], [{"x": 1, "y": 2}, {"y": 3}]).columns) == ["uid", "y"]
    assert len(batch_of([], [])) == 0


def test_a_column_of_vectors_is_refused():
    with pytest.raises(ValueError, match=r"'x' has shape \[2, 3\]"):
        rows_of(SampleBatch({"x": torch.zeros(2, 3)}))


@pytest.mark.parametrize("value", [1, None, "a", b"a", 0.5, [1, ("a", {"b": ids(1)})], Item(3)])
def test_plain_values(value, tmp_path):
    check_value("x", value)
    torch.save(pack([{"x": value}]), tmp_path / "x.pt")
    (row,) = unpack(torch.load(tmp_path / "x.pt", weights_only=True))
    assert str(row["x"]) == str(value)


@pytest.mark.parametrize("value", [{1}, [ids(1).numpy()], {"a": ids(1).numpy()[0]}, Item(object()), {(1, object()): 2}])
def test_values_that_a_checkpoint_cannot_hold(value):
    with pytest.raises(TypeError, match=r"field 'x' holds a .*which a checkpoint cannot hold"):
        check_value("x", value)


def test_sizes_by_hand():
    fields = {
        "prompt_ids": ids(1, 2),
        "response_ids": ids(3),
        "mask": torch.ones(1, dtype=torch.bool),
        "text": "abc",
        "n": 1,
    }
    assert sizes(fields) == (3, 24 + 1 + 3 + 8)
