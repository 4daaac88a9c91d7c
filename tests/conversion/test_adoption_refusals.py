"""What adoption refuses, with nothing changed: rows, names, numbers, markers, seals and ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.conversion import adoption_rows
from lazyshard.conversion.adoption import adopt
from lazyshard.errors import (
    ChunkCorrupt,
    EndInvalid,
    FileRefused,
    RowInvalid,
    SealInvalid,
    StreamInvalid,
    VersionUnsupported,
)
from lazyshard.format.names import chunk_name, seal_name
from tests.conversion.adoptable import FULL, SHORT, bare, contents, marked, seal_of, write
from tests.stream.streams import names


def test_short_last_chunk_cannot_stay_open(tmp_path: Path) -> None:
    bare(tmp_path, *SHORT)
    with pytest.raises(StreamInvalid, match=r"chunk_00002.jsonl: holds 1 rows of 2, so no chunk can follow") as caught:
        adopt(tmp_path, end=False)
    assert caught.value.chunk == 2
    assert contents(tmp_path) == {chunk_name(i): chunk for i, chunk in enumerate(SHORT)}


@pytest.mark.parametrize(
    ("chunk", "line", "byte", "reason"),
    [
        (b'{"id":2}\n{"id":\n', 2, 16, "unexpected end of data; mend the line"),
        (b'{"id":2}\n[3]\n', 2, 9, "expected a JSON object, found an array"),
        (b'{"id":2}\n{"id":"\xff"}\n', 2, 16, "not UTF-8: byte 0xff"),
        (b'{"id":2}\n{"id":3', 2, 16, r".*the file ends in this line, is it still being written\? mend the line"),
        (b'{"id":2}\n{"id":99999999999999999999}\n', 2, 15, "the integer 99999999999999999999 does not fit"),
        (b'{"id":2}\n\n{"id":3}\n', 2, 9, "a blank line; `lazyshard-producer run --source "),
        (b'{"id":2}\n{"id":3}\n \t', 3, 18, "a blank line; `lazyshard-producer run --source "),
        (b'{"id":2}\r\n{"id":3}\r\n', 1, 8, "a carriage return before the newline; `lazyshard-producer run"),
        (b'{"id":2}\n\r\n', 2, 9, "a carriage return before the newline; `lazyshard-producer run"),
        (b'{"id":2}\r{"id":3}\n', 1, 9, "carriage returns as line ends"),
        (b'{"id":2}\n{"id":3}', 2, 17, "no newline after the last row; `lazyshard-producer run --source "),
        (b'\xef\xbb\xbf{"id":2}\n{"id":3}\n', 1, 0, "a byte order mark before the first row; `lazyshard-producer run"),
        (b'\xff\xfe{\0"\0\n\0', 1, 0, "UTF-16 text"),
        (b"\x1f\x8b\x08\x00\x01\n", 1, 1, "not UTF-8"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_bad_row_is_refused_with_its_place_and_nothing_changed(
    chunk: bytes, line: int, byte: int, reason: str, last: bool, tmp_path: Path
) -> None:
    marked(tmp_path, FULL[0], chunk, *(() if last else FULL[2:]))
    before = contents(tmp_path)
    with pytest.raises(RowInvalid, match=rf"chunk_00001.jsonl: line {line} \(byte {byte}\): {reason}") as caught:
        adopt(tmp_path)
    error = caught.value
    assert (error.file, error.line, error.byte) == (str(tmp_path / chunk_name(1)), line, byte)
    assert contents(tmp_path) == before


def test_way_out_names_the_directory_and_the_number(tmp_path: Path) -> None:
    stream = bare(tmp_path / "it's", FULL[0], b'{"id":2}')
    with pytest.raises(RowInvalid, match="no newline") as caught:
        adopt(stream)
    quoted = f"""'{tmp_path}/it'"'"'s'/chunk_*.jsonl"""
    assert f"`lazyshard-producer run --source {quoted} --out NEW --samples-per-chunk 2`" in str(caught.value)


def test_row_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption_rows, "MAX_ROW_BYTES", 12)
    bare(tmp_path, b'{"id":12345}\n' * 2)
    with pytest.raises(RowInvalid, match=r"longer than 12 bytes.*--max-row-bytes"):
        adopt(tmp_path)
    monkeypatch.setattr(adoption_rows, "MAX_ROW_BYTES", 13)
    assert adopt(tmp_path).samples == 2


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda directory: (directory / old).rename(directory / new)


def unlink(*gone: str) -> Callable[[Path], object]:
    def remove(directory: Path) -> None:
        for name in gone:
            (directory / name).unlink()

    return remove


def other_temporary(directory: Path) -> None:
    (directory / ".tmp").mkdir()
    (directory / ".tmp" / "chunk_00003.jsonl").touch()


REFUSED: Final[list[tuple[Callable[[Path], object], str]]] = [
    (
        rename("chunk_00001.jsonl", "chunk_1.jsonl"),
        r"chunk_1.jsonl: chunk numbers have five .*; rename it: `mv \S*/chunk_1.jsonl \S*/chunk_00001.jsonl`$",
    ),
    (rename("chunk_00001.jsonl", "chunk_000001.jsonl"), r"chunk_000001.jsonl: chunk numbers"),
    (
        lambda d: (
            rename("chunk_00001.jsonl", "chunk_1.jsonl")(d),
            rename("chunk_00002.jsonl.completed", "chunk_2.jsonl.completed")(d),
        ),
        "`, and the same for 1 more$",
    ),
    (write("chunk_1.jsonl", FULL[1]), "chunk_00001.jsonl and chunk_1.jsonl are both chunk 1"),
    (write("chunk_00001_old.jsonl", FULL[1]), "chunk_00001_old.jsonl: not the name of a chunk"),
    (write("chunk_a.jsonl", FULL[1]), "chunk_a.jsonl: not the name of a chunk"),
    (rename("chunk_00002.jsonl", "chunk_00002.jsonl.gz"), "chunk_00002.jsonl.gz: not the name of a chunk"),
    (unlink("chunk_00001.jsonl"), "chunk_00001.jsonl: missing although chunk_00002.jsonl is there; restore it"),
    (unlink("chunk_00000.jsonl"), "chunk_00000.jsonl: missing although chunk_00001.jsonl is there; number the chunks"),
    (unlink("chunk_00002.jsonl"), "chunk_00002.jsonl.completed: a marker without chunk_00002.jsonl"),
    (unlink("chunk_00002.jsonl.completed"), "chunk_00002.jsonl: has no .completed marker .* `touch .*00002.jsonl.com"),
    (unlink("chunk_00000.jsonl.completed"), "chunk_00000.jsonl: has no .completed marker although other chunks have"),
    (unlink(*(n(i) for i in range(3) for n in (chunk_name, seal_name))), "nothing to adopt"),
    (
        write("chunk_00001.jsonl", b'{"id":2}\n'),
        "00001.jsonl: expected exactly 2 rows, found 1; every .* `lazyshard-pro",
    ),
    (write("chunk_00001.jsonl", b"{}\n" * 3), "00001.jsonl: expected exactly 2 rows, found 3"),
    (write("chunk_00002.jsonl", b"{}\n" * 3), "00002.jsonl: expected at most 2 rows, found 3"),
    (write("chunk_00000.jsonl", b""), "chunk_00000.jsonl: holds no rows; `lazyshard-producer run"),
    (write("chunk_00001.jsonl", b""), "chunk_00001.jsonl: holds no rows; `lazyshard-producer run"),
    (write("chunk_00002.jsonl", b""), "chunk_00002.jsonl: holds no rows; remove it and its marker"),
    (write("head.json"), "there is head.json, but no stream.json"),
    (write("stream.end", b'{"format":1,"chunks":4,"samples":8}'), "says 4 chunks with 8 samples, there are 3 with 6"),
    (other_temporary, "chunk_00003.jsonl: made by another program, but a stream clears its .tmp"),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED)
def test_what_is_no_stream_is_refused_and_nothing_changed(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    marked(tmp_path, *FULL)
    damage(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(StreamInvalid, match=message):
        adopt(tmp_path)
    assert contents(tmp_path) == before


def test_number_of_rows_that_was_asked_for_counts(tmp_path: Path) -> None:
    bare(tmp_path, *FULL)
    with pytest.raises(StreamInvalid, match=r"chunk_00000.jsonl: expected exactly 3 rows, found 2"):
        adopt(tmp_path, 3)
    with pytest.raises(StreamInvalid, match=r"chunk_00000.jsonl: expected exactly 1 rows, found 2"):
        adopt(tmp_path, 1)
    with pytest.raises(ValueError, match="samples_per_chunk is an integer from 1"):
        adopt(tmp_path, 0)


def test_directory_that_has_ended_cannot_stay_open(tmp_path: Path) -> None:
    marked(tmp_path, *FULL)
    (tmp_path / "stream.end").touch()
    with pytest.raises(StreamInvalid, match="says that the stream has ended, so it cannot stay open"):
        adopt(tmp_path, end=False)
    assert adopt(tmp_path).ended


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_chunk_that_is_no_plain_file_is_refused(kind: str, tmp_path: Path) -> None:
    stream = bare(tmp_path / "stream", *FULL)
    path = stream / chunk_name(1)
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").write_bytes(FULL[1])
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileRefused, match="expected a plain file"):
        adopt(stream)
    assert len(names(stream)) == 3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": 3}, VersionUnsupported, "written in stream format 3"),
        ({"samples": 3}, SealInvalid, "expected 4 numbers of 8 bytes"),
        ({"chunk": 2}, SealInvalid, "expected 1, as in the file's name"),
        ({"xxh3": "AAAAAAAAAAAAAAAAAAAAAA=="}, ChunkCorrupt, "chunk_00001.jsonl: row 0: not as in the chunk's seal"),
    ],
)
def test_seal_that_says_otherwise_is_never_replaced(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    stream = marked(tmp_path / "stream", *FULL)
    seal_of(stream, 1, **changes)
    before = contents(stream)
    with pytest.raises(error, match=message):
        adopt(stream)
    assert contents(stream) == before


def test_row_that_was_added_or_cut_after_sealing_is_named(tmp_path: Path) -> None:
    stream = marked(tmp_path / "stream", b"{}\n" * 3, *FULL[1:])
    seal_of(stream, 1, offsets="AAAAAAAAAAAJAAAAAAAAAA==", xxh3="AAAAAAAAAAA=", samples=1, bytes=9)
    (stream / chunk_name(1)).write_bytes(b"{}\n" * 3)
    with pytest.raises(ChunkCorrupt, match=r"row 0: .* says 1 rows in 9 bytes; found 3 rows in 9 bytes"):
        adopt(stream)


def test_damaged_end_of_ours_is_refused(tmp_path: Path) -> None:
    marked(tmp_path, *FULL)
    (tmp_path / "stream.end").write_bytes(b'{"format":1,"chunks":3}')
    with pytest.raises(EndInvalid, match="samples"):
        adopt(tmp_path)
