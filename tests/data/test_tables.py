import pytest

from verl.data.tables import check_output
from verl.errors import DataError


def test_the_folder_of_an_output_is_made(tmp_path):
    path = check_output(str(tmp_path / "a" / "b" / "out.parquet"), "data.output_path")
    assert path.parent.is_dir()
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "words"), [("file/out.parquet", "its folder cannot be made"), ("folder.parquet", "cannot be written")]
)
def test_an_output_that_cannot_be_written_is_said_before_anything_slow(tmp_path, name, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match=words) as error:
        check_output(str(tmp_path / name), "data.output_path")
    assert str(error.value).startswith(f"data.output_path={tmp_path / name}")
    assert "Name a" in str(error.value)
