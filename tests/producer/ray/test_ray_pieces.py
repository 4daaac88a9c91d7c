"""The pieces that write tasks leave: written whole or not at all, and read by ranges of rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyshard.errors import ChunkCorrupt
from lazyshard.format.batch import check_lines
from lazyshard_producer import ray
from lazyshard_producer.ray import PieceReader, list_pieces, piece_path, write_piece

LINES = [b'{"id":%d}\n' % number for number in range(5)]


def write(folder: Path, task: int, *parts: list[bytes]) -> None:
    write_piece(folder, task, parts)


def test_any_range_of_rows(tmp_path: Path) -> None:
    write(tmp_path, 7, LINES[:2], [], LINES[2:])
    assert [path.name for path in tmp_path.iterdir()] == ["00000007.piece"]
    piece = PieceReader(piece_path(tmp_path, 7))
    assert len(piece) == 5
    for first in range(5):
        for last in range(first + 1, 6):
            found, expected = piece.read(first, last), check_lines(LINES[first:last])
            assert (found.data, found.ends.tolist()) == (expected.data, expected.ends.tolist())
            assert found.digests.tolist() == expected.digests.tolist()
    write(tmp_path, 0)
    piece = PieceReader(piece_path(tmp_path, 0))
    assert len(piece) == 0


def test_how_many_rows_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, LINES)
    piece = PieceReader(piece_path(tmp_path, 0))
    for first, most_rows, most_bytes, last in (
        (0, 9, 99, 5),
        (0, 2, 99, 2),
        (0, 9, 18, 2),
        (0, 9, 17, 1),
        (0, 9, 1, 1),
        (3, 9, 9, 4),
        (3, 9, 99, 5),
        (4, 1, 1, 5),
    ):
        monkeypatch.setattr(ray, "_SLICE_BYTES", most_bytes)
        assert piece.fit(first, most_rows) == last


def test_what_is_not_whole_is_not_seen(tmp_path: Path) -> None:
    def broken_off() -> Iterator[list[bytes]]:
        yield LINES
        assert list_pieces(tmp_path) == set()
        assert list(tmp_path.iterdir()) != []
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_piece(tmp_path, 1, broken_off())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 10, 23, 24, 100, -1])
def test_a_piece_that_was_cut(tmp_path: Path, kept: int) -> None:
    write(tmp_path, 1, LINES)
    path = piece_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ChunkCorrupt, match="00000001"):
        PieceReader(path)


def test_a_row_that_was_changed(tmp_path: Path) -> None:
    write(tmp_path, 1, LINES)
    path = piece_path(tmp_path, 1)
    path.write_bytes(path.read_bytes().replace(b'{"id":3}', b'{"id":9}'))
    piece = PieceReader(path)
    assert piece.read(0, 3).data == b"".join(LINES[:3])
    with pytest.raises(ChunkCorrupt, match="row 3"):
        piece.read(1, 5)
