"""Checksums of files: every byte counts, in files of any size."""

import zlib

import pytest

from verl.core.checkpoint_engine import file_sums as module
from verl.core.checkpoint_engine.file_sums import differing_file, file_sums


def test_sums_are_crcs_of_the_chunks_crcs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"")
    parts = b"".join(zlib.crc32(part).to_bytes(4, "big") for part in (b"0123", b"4567", b"89"))
    empty = (0).to_bytes(4, "big")
    assert file_sums(tmp_path, ["a", "b"]) == {"a": f"{zlib.crc32(parts):08x}", "b": f"{zlib.crc32(empty):08x}"}


@pytest.mark.parametrize("place", [0, 5, 9])
def test_one_changed_bit_is_found(tmp_path, place):
    contents = bytearray(b"0123456789")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(contents)
    sums = file_sums(tmp_path, ["a", "b"])
    assert differing_file(tmp_path, sums) is None
    contents[place] ^= 1
    (tmp_path / "b").write_bytes(contents)
    assert differing_file(tmp_path, sums) == "b"
