"""Streams whose rows are encoded: the manifest says with what, and rows made otherwise are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import StreamMismatch
from lazyshard.storage.rechunking import rechunk

FACTS: dict[str, Any] = {"kind": "function", "function": "m:f", "size": 256}


def write(directory: Path, rows: int, *, end: bool = False, **options: Any) -> None:
    writer = ChunkWriter(directory, 2, arrays=True, **options)
    for number in range(rows):
        writer.write({"input_ids": np.arange(number, dtype=np.int32)}, tokens=number)
    writer.close(end=end)


def test_reader_tells_what_rows_were_encoded_with(tmp_path: Path) -> None:
    write(tmp_path / "encoded", 2, encoding=FACTS)
    write(tmp_path / "raw", 2)
    assert StreamReader(tmp_path / "encoded").encoding == FACTS
    assert StreamReader(tmp_path / "raw").encoding is None


def test_going_on_with_another_encoding_is_refused_naming_what_differs(tmp_path: Path) -> None:
    write(tmp_path / "encoded", 2, encoding=FACTS)
    write(tmp_path / "raw", 2)
    before = sorted(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file())
    with pytest.raises(StreamMismatch, match=r"size is 256 there and 512 here. That never changes"):
        ChunkWriter(tmp_path / "encoded", arrays=True, encoding=FACTS | {"size": 512})
    with pytest.raises(StreamMismatch, match="its rows are encoded, and those that are to come are not"):
        ChunkWriter(tmp_path / "encoded", arrays=True)
    with pytest.raises(StreamMismatch, match="its rows are encoded, and those that are to come are not"):
        ChunkWriter(tmp_path / "encoded")
    with pytest.raises(StreamMismatch, match="its rows are not encoded, and those that are to come are"):
        ChunkWriter(tmp_path / "raw", arrays=True, encoding=FACTS)
    assert sorted(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()) == before
    ChunkWriter(tmp_path / "encoded", arrays=True, encoding=FACTS).close()


def test_encoding_that_is_none_or_comes_without_arrays_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an encoding is 1 to 1000 facts"):
        ChunkWriter(tmp_path / "a", 2, arrays=True, encoding={"a": []})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="give arrays=True with encoding"):
        ChunkWriter(tmp_path / "a", 2, encoding=FACTS)
    assert not (tmp_path / "a").exists()


def test_rechunked_stream_keeps_encoding_rows_and_arrays(tmp_path: Path) -> None:
    write(tmp_path / "old", 5, end=True, encoding=FACTS)
    rechunk(tmp_path / "old", tmp_path / "new", 3)
    reader = StreamReader(tmp_path / "new")
    assert reader.encoding == FACTS
    assert [len(reader.read(number)["input_ids"]) for number in range(5)] == [0, 1, 2, 3, 4]
