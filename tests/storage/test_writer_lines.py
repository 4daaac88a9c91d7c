"""Rows written many at a time."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import RowInvalid, WriterFailed
from lazyshard.format import check_lines
from tests.storage.streams import forked, names, produce, rows, seal


def lines(start: int, stop: int) -> list[bytes]:
    return [b'{"id":%d}\n' % number for number in range(start, stop)]


def write_all(writer: ChunkWriter, given: list[bytes], at_once: int) -> None:
    """Writes lines so many at a time, as far as there is room, with the number of lines so far as the position."""
    at = 0
    while at < len(given):
        part = given[at : at + min(at_once, writer.room)]
        at += len(part)
        writer.write_lines(part, source=at)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_lines_come_out_as_if_written_one_by_one(at_once: int, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "one", 3, clock=lambda: 5.0) as writer:
        for number, line in enumerate(lines(0, 8)):
            writer.write(line, source=number + 1)
    with ChunkWriter(tmp_path / "many", 3, clock=lambda: 5.0) as writer:
        write_all(writer, lines(0, 8), at_once)
        assert (writer.samples, writer.room, writer.published_chunks, writer.full_chunks) == (8, 1, 2, 2)
    assert names(tmp_path / "one") == names(tmp_path / "many")
    for name in names(tmp_path / "one"):
        if name.startswith("chunk_"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    assert list(StreamReader(tmp_path / "many")) == rows(0, 8)


@pytest.mark.parametrize("piece", [1, 20, 1 << 20])
def test_small_and_large_pieces_keep_their_order(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.storage.open_chunk.PIECE_BYTES", piece)
    monkeypatch.setattr("lazyshard.storage.open_chunk.BUFFER_BYTES", 30)
    with ChunkWriter(tmp_path, 50) as writer:
        for start, stop in ((0, 1), (1, 2), (2, 9), (9, 10), (10, 30)):
            writer.write_lines(lines(start, stop))
            writer.write({"id": 1000 + stop})
    found = [row["id"] for row in StreamReader(tmp_path)]
    assert found == [0, 1001, 1, 1002, *range(2, 9), 1009, 9, 1010, *range(10, 30), 1030]


def test_writing_back_begins_before_the_chunk_is_full_and_takes_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr("lazyshard.storage.open_chunk.PIECE_BYTES", 1)
    monkeypatch.setattr("lazyshard.storage.piece_file.BUFFER_BYTES", 25)
    monkeypatch.setattr(
        "lazyshard.storage.piece_file.start_writing_back", lambda fd, offset, size: begun.append((offset, size))
    )
    with ChunkWriter(tmp_path, 9) as writer:
        for number in range(8):
            writer.write_lines(lines(number, number + 1))
        assert begun == [(0, 27), (27, 27)]


def test_no_lines_do_nothing(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 3) as writer:
        assert writer.write_lines([]) == ()
    assert seal_count(tmp_path) == 0


def seal_count(directory: Path) -> int:
    return sum(name.endswith(".completed") for name in names(directory))


def test_rows_that_name_a_key_twice_are_told(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 9) as writer:
        assert writer.write_lines([b"{}\n", b'{"a":1,"a":2}\n', b'{"b":{"c":1,"c":2}}\n', b'{"a":":"}\n']) == (1, 2)


@pytest.mark.parametrize("checked", [False, True])
def test_refused_line_is_told_by_its_index_and_the_rows_before_it_are_written(checked: bool, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 4) as writer:
        writer.write({"id": 0}, source="before")
        given: Any = [b'{"id":1}\n', b'{"id":2}\r\n', b'{"id":nul}\n']
        with pytest.raises(RowInvalid, match="not a row: ") as caught:
            writer.write_lines(check_lines(given) if checked else given, source="after")
        assert (caught.value.index, caught.value.byte) == (2, 6)
        assert (writer.samples, writer.room, writer.published_chunks) == (3, 1, 0)
        writer.write_lines(lines(3, 4))
    assert list(StreamReader(tmp_path)) == rows(0, 4)
    assert seal(tmp_path, 0).source == "before"


@pytest.mark.parametrize("last", [b'{"id":2}\n', b"{"])
@pytest.mark.parametrize("checked", [False, True])
def test_more_lines_than_there_is_room_for_are_refused_whole(checked: bool, last: bytes, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        given: Any = [*lines(0, 2), last]
        with pytest.raises(ValueError, match="3 lines are more than the 2 that the open chunk has room for"):
            writer.write_lines(check_lines(given) if checked else given)
        assert (writer.samples, writer.room) == (0, 2)
        writer.write_lines(lines(0, 2))
        assert writer.room == 2
    assert list(StreamReader(tmp_path)) == rows(0, 2)


def test_chunk_with_lines_has_no_lengths_even_if_other_rows_have(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 2) as writer:
        writer.write({"id": 0}, tokens=7)
        writer.write_lines(lines(1, 2))
    assert seal(tmp_path, 0).tokens is None


def test_disk_that_fails_fails_the_writer_and_a_new_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChunkWriter(tmp_path, 2)
    writer.write_lines(lines(0, 2))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lazyshard.storage.piece_file.write_all", fail)
        with pytest.raises(WriterFailed, match=r"No space left on device\. 2 samples"):
            writer.write_lines(lines(2, 4))
    with pytest.raises(WriterFailed, match="No space left"):
        writer.write_lines(lines(2, 4))
    writer.close(end=False)
    produce(tmp_path, 5)
    assert list(StreamReader(tmp_path)) == rows(0, 5)


def test_closed_or_forked_writer_takes_no_lines(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 3)

    def child() -> None:
        with pytest.raises(RuntimeError, match="is a fork"):
            writer.write_lines(lines(0, 1))

    assert forked(child) == 0
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write_lines(lines(0, 1))
