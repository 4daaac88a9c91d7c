"""Lines out of blocks: the same rows and places wherever the blocks are cut. As a source: `test_text`."""

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard_producer.position import FilePosition
from lazyshard_producer.sources.lines import JsonLinesFile, LineSplitter
from lazyshard_producer.sources.source import RowOrigin, Rows
from tests.producer.sources.reading import BOM, open_kind, refusal

NAME = "a.jsonl"


class Row(NamedTuple):
    line: bytes | None  # None: too long
    place: RowOrigin
    position: FilePosition


def rows_of(found: Rows) -> list[Row]:
    return [
        Row(line if isinstance(line, bytes) else None, found.place(index), found.position(index))
        for index, line in enumerate(found.lines)
    ]


def split(blocks: list[bytes], limit: int = 100, start: FilePosition | None = None) -> tuple[list[Row], FilePosition]:
    splitter = LineSplitter(NAME, limit, start)
    rows = [row for block in blocks for row in rows_of(splitter.feed(block))]
    rows += rows_of(splitter.finish())
    assert splitter.pending == 0
    return rows, splitter.position


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({end % (len(text) + 1) for end in cuts})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_places_and_marks_count_blank_lines_and_bytes() -> None:
    rows, mark = split([b"5\n66\n\n", b"7\n\r\n8"], start=FilePosition(100, 10, 3))
    assert rows == [
        Row(b"5\n", RowOrigin(NAME, 11, 100), FilePosition(102, 11, 3)),
        # The last row of a block takes the blank lines after it along.
        Row(b"66\n", RowOrigin(NAME, 12, 102), FilePosition(106, 13, 4)),
        Row(b"7\n", RowOrigin(NAME, 14, 106), FilePosition(110, 15, 5)),
        Row(b"8", RowOrigin(NAME, 16, 110), FilePosition(111, 16, 5, True)),
    ]
    assert mark == rows[-1].position


def reference(text: bytes, limit: int) -> list[tuple[bytes | None, int, int]]:
    """(line, or None for one too long; its number from 1; its offset) of each row, in the plainest way."""
    found: list[tuple[bytes | None, int, int]] = []
    offset = 0
    for number, line in enumerate(text.split(b"\n"), 1):
        ended = line + b"\n" if offset + len(line) < len(text) else line
        row = ended.removeprefix(BOM) if offset == 0 else ended
        if row.strip(b"\r\n"):
            found.append((None if len(row.rstrip(b"\r\n")) > limit else row, number, offset))
        offset += len(ended)
    return found


@given(
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"x", b" ", BOM, b"\0", b"12345", b"1234567890"]), max_size=40),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(0, 40),
)
@example([BOM, b"1234567890", b"x", b"x", b"\r\n", b"x"], list(range(20)), 0)  # as long as a row may be
@example([b"1234567890", b"x", b"x", b"x", b"\r", b"\n", b"x", b"\n"], list(range(20)), 0)  # a byte longer
def test_rows_do_not_depend_on_where_blocks_are_cut_nor_on_where_it_is_gone_on(
    parts: list[bytes], cuts: list[int], taken: int
) -> None:
    text = b"".join(parts)
    rows, mark = split(cut(text, cuts), limit=12)
    assert [(row.line, row.place.line, row.place.byte) for row in rows] == reference(text, limit=12)
    assert mark.offset == len(text)
    assert mark.line == text.count(b"\n") + (text not in (b"", BOM) and not text.endswith(b"\n"))
    assert mark.blank == mark.line - len(rows)
    taken = min(taken, len(rows))
    start = rows[taken - 1].position if taken else FilePosition(0, 0, 0)
    rest, end = split([text[start.offset :]], limit=12, start=start)
    assert [(row.line, row.place) for row in rest] == [(row.line, row.place) for row in rows[taken:]]
    if rest:
        assert end == mark


@pytest.mark.parametrize(
    ("part", "hint"), [(b"\0", "NUL bytes"), (b"{}\r", "carriage returns"), (b"x", "--max-row-bytes")]
)
def test_a_line_of_any_length_takes_no_more_memory_than_the_longest_row(part: bytes, hint: str) -> None:
    splitter = LineSplitter(NAME, 10_000)
    block = part * 5000
    for _ in range(20):
        assert not splitter.feed(block).lines
        assert len(splitter._held) <= 10_005
    assert splitter.pending == 20 * len(block)
    rows = splitter.feed(b"\n{}\n")
    error, good = rows.lines
    assert isinstance(error, RowInvalid)
    assert "10000 bytes" in str(error) and hint in str(error)
    assert (error.byte, good) == (0, b"{}\n")
    assert rows.place(1) == RowOrigin(NAME, 2, 20 * len(block) + 1)


def test_truncated_or_replaced_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n")
    source = open_kind(JsonLinesFile, path)
    rows = source.read()
    assert rows is not None
    path.write_bytes(b"")
    assert "truncated" in str(refusal(source.entry, rows.position(0)))
    assert str(refusal(source.read).actual).startswith("0:")
    path.write_bytes(b"3\n4\n")
    assert "changed" in str(refusal(source.entry, rows.position(0)))
    source.close()
