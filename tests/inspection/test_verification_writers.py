"""What a verification finds in a stream of several writers: pieces that wait, and positions in the seals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lazyshard.format.records import seal_name
from lazyshard.inspection.verification import verify
from tests.stream.damage import Damage, cut, delete, each, edit, flip
from tests.stream.shared import sequence, write_pieces

A, B = ".writers/a/", ".writers/b/"


def shared(tmp_path: Path) -> Path:
    """Chunks 0 and 1 are the rows [0, 4) of b and of a; a has two more pieces, b has one, neither has ended."""
    stream = tmp_path / "stream"
    for name in "ab":
        write_pieces(stream, name, 4, 2, end=False)
    sequence(stream)
    write_pieces(stream, "a", 12, first=4, end=False)
    write_pieces(stream, "b", 8, first=4, end=False)
    return stream


def found(stream: Path, **settings: Any) -> list[tuple[str, str, str]]:
    return [(one.severity, one.kind, one.file) for one in verify(stream, **settings).findings]


def moved(chunk: int, **values: object) -> Damage:
    """Another position in the seal of a chunk."""

    def change(stream: Path) -> None:
        source = json.loads((stream / seal_name(chunk)).read_bytes())["source"]
        edit(seal_name(chunk), source=source | values)(stream)

    return change


def test_pieces_that_wait(tmp_path: Path) -> None:
    stream = shared(tmp_path)
    verified = verify(stream)
    assert (verified.findings, verified.chunks, verified.samples, verified.pieces) == ((), 2, 8, 3)
    write_pieces(stream, "a", 15, first=12)
    write_pieces(stream, "b", 9, first=8)
    assert verify(stream).pieces == 5
    sequence(stream)
    verified = verify(stream)
    assert (verified.findings, verified.chunks, verified.samples, verified.pieces, verified.ended) == (
        (),
        6,
        24,
        0,
        True,
    )


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flip(f"{A}chunk_00001.jsonl", 3), ("damage", "digest", f"{A}chunk_00001.jsonl")),
        (cut(f"{B}chunk_00001.jsonl", 5), ("damage", "size", f"{B}chunk_00001.jsonl")),
        (delete(f"{A}chunk_00001.jsonl.completed"), ("damage", "seal-missing", f"{A}chunk_00001.jsonl.completed")),
        (edit(f"{B}stream.json", stream_id="0" * 32), ("damage", "other-stream", f"{B}stream.json")),
        (edit(f"{B}stream.json", format=3), ("damage", "version", f"{B}stream.json")),
        (lambda stream: shutil.rmtree(stream / A), None),
        (lambda stream: (stream / ".writers/c").mkdir(), None),
    ],
)  # fmt: skip
def test_damaged_pieces(damage: Damage, expected: tuple[str, str, str] | None, tmp_path: Path) -> None:
    damage(stream := shared(tmp_path))
    assert [one for one in found(stream) if one[0] == "damage"][:1] == ([] if expected is None else [expected])
    assert "chunk_00001.jsonl" not in str(expected) or verify(stream).findings[0].chunk is None


@pytest.mark.parametrize(
    ("damage", "chunk"),
    [
        (moved(1, rows=[["a", 0, 3, None]]), 1),  # The chunk has more rows
        (moved(1, rows=[["a", 4, 4, None]], writers={"b": [4, 0], "a": [8, 1]}), 1),  # Rows [0, 4) were lost
        (moved(1, rows=[["b", 0, 4, None]], writers={"b": [4, 1]}), 1),  # Rows of b are there twice
        (moved(1, writers={"a": [4, 1], "b": [4, 1]}), 1),  # b has no row in chunk 1
        (moved(1, writers={"a": [4, 1]}), 1),  # b was forgotten
        (moved(0, rows=[["b", 4, 4, None]], writers={"b": [8, 0]}), 0),
    ],
)
def test_positions_that_do_not_follow_each_other(damage: Damage, chunk: int, tmp_path: Path) -> None:
    damage(stream := shared(tmp_path))
    (first, *_) = [one for one in verify(stream, quick=True).findings if one.kind == "position"]
    assert (first.severity, first.file, first.chunk) == ("damage", seal_name(chunk), chunk)


def test_nothing_is_known_after_a_damaged_seal(tmp_path: Path) -> None:
    each(cut(seal_name(0), 0), moved(1, writers={"a": [400, 0], "b": [4, 1]}))(stream := shared(tmp_path))
    assert found(stream, quick=True) == [
        ("damage", "position", ".writers/a"),  # It has fewer rows than are in the stream
        ("damage", "invalid", seal_name(0)),
    ]
