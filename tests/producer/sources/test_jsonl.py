import itertools
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import RowInvalid
from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.lines import JsonLinesFile
from lazyshard_producer.sources.source import Context, Line, Rows

BOM = b"\xef\xbb\xbf"


def open_at(path: Path, position: dict[str, Any] | None = None, limit: int = 100) -> JsonLinesFile:
    return JsonLinesFile(SourceSettings(path=str(path)), position, Context(path.parent / "out", limit))


def read_pieces(source: JsonLinesFile) -> list[Rows]:
    return list(iter(source.read, None))


def read_all(source: JsonLinesFile) -> list[Line]:
    return list(itertools.chain.from_iterable(rows.lines for rows in read_pieces(source)))


@pytest.mark.parametrize(
    ("data", "lines", "blank"),
    [
        (b"", [], 0),
        (b"\n", [], 1),
        (BOM, [], 0),
        (BOM + b"\n{}", [b"{}"], 1),
        (b"1\n2\n", [b"1\n", b"2\n"], 0),
        (b"1\r\n\r\n2", [b"1\r\n", b"2"], 1),
        (b"\r\n\r\r\n \n", [b" \n"], 2),
        (b"\xe2\x80\xa8\n", [b"\xe2\x80\xa8\n"], 0),
        (b"1\x0b\x0c2\n", [b"1\x0b\x0c2\n"], 0),
    ],
)
def test_lines(tmp_path: Path, data: bytes, lines: list[bytes], blank: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    source = open_at(path)
    assert read_all(source) == lines
    position = source.entry(source.reached)
    assert source.progress == (len(data), len(data))
    source.close()
    assert (position["offset"], position["line"] - position["blank"], position["blank"]) == (
        len(data),
        len(lines),
        blank,
    )


@pytest.mark.parametrize("end", [b"\n", b""])
def test_going_on_after_any_row_gives_the_rest(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(BOM + b"\n".join(b"%d" % n * (n * 30) for n in range(1, 10)) + b"\n\r\n\nx" + end)
    source = open_at(path, limit=10**6)
    pieces = read_pieces(source)
    lines = [line for rows in pieces for line in rows.lines]
    marks = [rows.position(index) for rows in pieces for index in range(len(rows.lines))]
    for taken, mark in enumerate([source.start, *marks]):
        second = open_at(path, source.entry(mark), limit=10**6)
        assert read_all(second) == lines[taken:]
        assert second.entry(second.reached) == source.entry(source.reached)
        assert (second.reached.line, second.blank) == (12, 2)
        second.close()
    source.close()


def test_place_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(BOM + b"\n11\n22\n")
    source = open_at(path)
    (rows,) = read_pieces(source)
    assert [rows.place(0), rows.place(1)] == [(str(path), 2, 4), (str(path), 3, 7)]
    source.close()


@pytest.mark.parametrize(("line", "fits"), [(b"x" * 10, True), (b"x" * 10 + b"\r", True), (b"x" * 11, False)])
@pytest.mark.parametrize("end", [b"\n", b"", b"\nyyy\n"])
def test_longest_row(tmp_path: Path, line: bytes, fits: bool, end: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(line + end)
    source = open_at(path, limit=10)
    found, *rest = read_all(source)
    assert rest == ([b"yyy\n"] if len(end) > 1 else [])
    if fits:
        assert found == line + end[:1]
    else:
        assert isinstance(found, RowInvalid)
        assert found.reason == "longer than the 10 bytes of --max-row-bytes"
    source.close()


def test_a_last_line_without_newline_gets_it_later(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for newline in (b"\n", b"\r\n"):
        path.write_bytes(b"1\n2")
        source = open_at(path)
        assert read_all(source) == [b"1\n", b"2"]
        position = source.entry(source.reached)
        source.close()
        assert position["open_end"]
        path.write_bytes(b"1\n2" + newline + b"3\n")
        source = open_at(path, position)
        assert read_all(source) == [b"3\n"]
        assert source.reached[1:] == (3, 0, False)
        source.close()


def test_a_published_last_line_that_was_continued_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2")
    source = open_at(path)
    read_all(source)
    position = source.entry(source.reached)
    source.close()
    path.write_bytes(b"1\n23\n")
    with pytest.raises(SourceRefused, match=r"a:2: .*byte 3.*continued"):
        open_at(path, position)


def test_truncated_or_replaced_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n")
    source = open_at(path)
    rows = source.read()
    assert rows is not None
    path.write_bytes(b"")
    with pytest.raises(SourceRefused, match="truncated"):
        source.entry(rows.position(0))
    path.write_bytes(b"3\n4\n")
    with pytest.raises(SourceRefused, match="changed in its first 2 bytes"):
        source.entry(rows.position(0))
    source.close()


def test_end_of_a_file_that_was_truncated_while_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n")
    source = open_at(path)
    source.read()
    path.write_bytes(b"")
    with pytest.raises(SourceRefused, match="expected at least the 4 bytes that were read, found 0"):
        source.read()
    source.close()
