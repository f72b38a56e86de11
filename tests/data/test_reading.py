import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.reading import count_rows, list_files, read_rows
from verl.errors import DataError

from .conftest import row

COLUMNS = ["prompt", "data_source"]


@pytest.fixture
def two(write):
    return [write([row("w1")], "a.parquet"), write([row("w2")], "b.jsonl")]


@pytest.mark.parametrize("form", [list, ",".join, lambda p: f"[{p[0]}, {p[1]}]", lambda p: f"['{p[0]}','{p[1]}']"])
def test_files_as_list_or_text(two, form):
    assert list_files(form(two), "data.train_files") == [Path(path) for path in two]


def test_one_file_and_home(two, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(two[0]).parent))
    assert list_files(two[0], "k") == [Path(two[0])]
    assert list_files("~/a.parquet", "k") == [Path(two[0])]


def test_a_comma_in_a_name(write):
    path = write([row("w1")], "a,b.jsonl")
    assert list_files(path, "k") == [Path(path)]


@pytest.mark.parametrize("nothing", [None, "", [], "[]"])
def test_no_file(nothing):
    with pytest.raises(DataError, match=r"data.val_files names no file"):
        list_files(nothing, "data.val_files")


def test_missing_file_names_the_nearest(two):
    folder = Path(two[0]).parent
    with pytest.raises(
        DataError, match=rf"data.train_files: .*bb.jsonl does not exist. The nearest .* {folder}/b.jsonl"
    ):
        list_files(str(folder / "bb.jsonl"), "data.train_files")
    with pytest.raises(DataError, match=r"data.train_files: https://a.b/c.parquet is an address"):
        list_files("https://a.b/c.parquet", "data.train_files")
    with pytest.raises(DataError, match=r"zzz.parquet does not exist. Its folder holds a.parquet, b.jsonl\."):
        list_files(str(folder / "zzz.parquet"), "k")
    with pytest.raises(DataError, match=rf"folder does not exist either; the nearest that does is {folder}\."):
        list_files(str(folder / "no" / "where" / "b.jsonl"), "k")


def test_a_folder_and_a_wrong_type(two):
    folder = Path(two[0]).parent
    with pytest.raises(DataError, match=r"is a folder. It holds a.parquet, b.jsonl"):
        list_files(str(folder), "k")
    (folder / "c.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"c.csv is of type '.csv'. Convert it to .parquet or .jsonl"):
        list_files(str(folder / "c.csv"), "k")


def test_rows_know_their_place(two):
    (parquet,) = read_rows(Path(two[0]), COLUMNS)
    (line,) = read_rows(Path(two[1]), COLUMNS)
    assert parquet.where == f"{two[0]}, row 0"
    assert line.where == f"{two[1]}, line 1"
    assert parquet.fields == {"prompt": [{"role": "user", "content": "w1"}], "data_source": "openai/gsm8k"}


def test_jsonl_with_blank_lines_and_line_separators_inside_texts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n\n{"prompt": "three"}\n', encoding="utf-8")
    rows = read_rows(path, COLUMNS)
    assert [(r.where[-6:], r.fields["prompt"]) for r in rows] == [("line 1", "one\u2028two"), ("line 3", "three")]


def test_a_list_of_objects(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    assert [r.fields["prompt"] for r in read_rows(path, COLUMNS)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "a"}\n"b"\n', "line 2: holds a str"),
        ('[{"prompt": "a"}, 3]', "entry 1: holds a int"),
        ('[{"prompt"', "not JSON"),
        ("\n\n", "has no rows"),
    ],
)
def test_bad_jsonl(tmp_path, text, said):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_rows(path, COLUMNS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_without_rows_is_named_by_whoever_counts_them(tmp_path, name):
    path = tmp_path / name
    path.write_text("") if name == "a.jsonl" else pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match=rf"{name} has no rows\. Write it again with at least one prompt"):
        count_rows(path)


def test_bad_parquet(tmp_path, write):
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"broken.parquet cannot be read as parquet"):
        read_rows(broken, COLUMNS)


@pytest.mark.parametrize("name", ["q.parquet", "q.jsonl"])
def test_a_column_that_no_row_has_is_one_line_with_those_there_are(write, name):
    path = Path(write([{"prompt": "a", "source": "x", "extra": 1}] * 6, name))
    with pytest.raises(DataError) as error:
        read_rows(path, ["question"], {"data.prompt_key": "question"})
    has = f"{path} has no such column. It has prompt, source, extra."
    assert str(error.value) == f"data.prompt_key=question: {has} Did you mean prompt?"
    with pytest.raises(DataError) as error:
        read_rows(path, ["prompt"], {"data.prompt_key": "prompt", "data.reward_fn_key": "sources"})
    assert str(error.value) == f"data.reward_fn_key=sources: {has} Did you mean source?"
    with pytest.raises(DataError, match=r"Name the right one with data\.reward_fn_key"):
        read_rows(path, ["prompt"], {"data.reward_fn_key": "data_source_name"})


def test_a_folder_without_data_is_named_in_full(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError) as error:
        list_files("none.parquet", "data.train_files")
    assert str(error.value).endswith(f"There is no parquet or jsonl file in {tmp_path / 'here'}.")


@pytest.mark.parametrize("text", ['{"prompt": "a"}\n\n{"prompt": "b"}', '\n[{"prompt": "a"},\n{"prompt": "b"}]\n'])
def test_rows_are_counted_as_they_are_read(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert count_rows(path) == len(read_rows(path, ["prompt"])) == 2


def test_rows_of_a_parquet_file_are_counted(write):
    assert count_rows(Path(write([{"prompt": "a"}] * 3))) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r'{"prompt": "a \ud83d b"}', r"a text holds \\ud83d, half of a surrogate pair"),
        ('{"prompt": ' + "9" * 5000 + "}", "a number that cannot be read"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "too deep"),
    ],
    ids=["surrogate", "digits", "nesting"],
)
def test_json_that_cannot_be_held_is_named_with_its_row(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine \\ud83d\\ude00"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{words}"):
        read_rows(path, ["prompt"])
    path.write_text(f'[{{"prompt": "x"}}, {line}]')
    with pytest.raises(DataError, match=words):
        read_rows(path, ["prompt"])


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    assert [row.fields for row in read_rows(path, ["prompt"])] == [{"prompt": "x"}]
