"""A text as a source, plain, compressed or through a pipe: the same rows, places, positions and refusals."""

import gzip
import io
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.position import FilePosition
from lazyshard_producer.sources.lines import JsonLinesFile, LineSplitter
from lazyshard_producer.sources.sequential import CompressedJsonLines, StandardInput
from lazyshard_producer.sources.source import Line, RowOrigin
from tests.producer.sources.reading import BOM, TEXT, Kind, lines, open_kind, position_after, refusal, take
from tests.stream.streams import raised

Pack = Callable[[bytes], bytes]
KINDS: Final[dict[str, tuple[Kind, Pack]]] = {
    "plain": (JsonLinesFile, lambda text: text),
    "gzip": (CompressedJsonLines, gzip.compress),
    "zstd": (CompressedJsonLines, zstandard.ZstdCompressor(write_checksum=True).compress),
    "pipe": (StandardInput, lambda text: text),
}


class TextSource:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "a"
        self.opens, self.pack = KINDS[kind]
        if kind == "pipe":
            os.mkfifo(self.path)

    @contextmanager
    def opened(self, *parts: bytes, position: dict[str, Any] | None = None, limit: int = 100_000) -> Iterator[Any]:
        """Opens the text of these parts, each of which is compressed by itself."""
        data = b"".join(map(self.pack, parts))
        if self.kind != "pipe":
            self.path.write_bytes(data)
        with closing(open_kind(self.opens, self.path, position, limit)) as source:
            if self.kind == "pipe":
                self.path.write_bytes(data)
            yield source

    def position(self, text: bytes, count: int) -> dict[str, Any]:
        with self.opened(text) as source:
            entry: dict[str, Any] = source.entry(position_after(source, take(source, count)))
            return entry


@pytest.fixture(params=KINDS)
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> TextSource:
    return TextSource(request.param, tmp_path)


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


def plain_lines(text: bytes) -> list[bytes]:
    return [line for line, _, _ in reference(text, limit=1 << 20) if line is not None]


@pytest.mark.parametrize("text", [b"", b"\n", BOM, b"1\n2\n", b"1\r\n\r\n2", b"1\r2\n", b"{}\n" + bytes(5000), TEXT])
def test_lines(text: bytes, origin: TextSource) -> None:
    with origin.opened(text) as source:
        expected = plain_lines(text)
        assert lines(source) == expected
        entry, blank = source.entry(source.reached), source.blank
        assert (entry["offset"], entry["line"], entry["blank"]) == (len(text), len(expected) + blank, blank)
        assert blank == text.count(b"\n") - sum(line.endswith(b"\n") for line in expected)
        whole = None if origin.kind == "pipe" else origin.path.stat().st_size
        assert source.progress == (len(origin.pack(text)), whole)
        assert source.read() is None


def test_going_on_after_any_row_gives_the_rest(origin: TextSource) -> None:
    parts, expected = (TEXT[:100], TEXT[100:]), plain_lines(TEXT)
    for count in range(len(expected) + 1):
        with origin.opened(*parts) as source:
            taken = take(source, count)
            position = source.entry(position_after(source, taken))
            assert [line for line, _, _ in taken] == expected[:count]
        with origin.opened(*parts, position=position) as source:
            # How large a compressed file is it knows again when it has read it to its end.
            if origin.kind in ("gzip", "zstd"):
                assert (position.pop("packed", None) is not None) == (count == len(expected))
            assert source.entry(source.start) == position
            rest = take(source)
            assert [line for line, _, _ in rest] == expected[count:]
            places = [rows.place(index) for _, rows, index in rest]
            assert [place.line for place in places] == [*range(2 + count, 11), 13][: len(rest)]
            assert places[-1:] == [RowOrigin(str(origin.path), 13, len(TEXT) - 1)][: len(rest)]
            assert (source.entry(source.reached)["line"], source.blank) == (13, 3)


@pytest.mark.parametrize(("text", "says"), [(b"1\n23\n3\n", "XXH3"), (b"1\n22", "the 5 bytes"), (b"", "the 5 bytes")])
def test_another_text_than_the_published_one_is_refused(text: bytes, says: str, origin: TextSource) -> None:
    position = origin.position(b"1\n22\n3\n", 2)
    with pytest.raises(SourceRefused, match=says) as error, origin.opened(text, position=position) as source:
        lines(source)
    assert error.value.file == str(origin.path)
    # What is behind it may be anything.
    with origin.opened(b"1\n22\n7\n8", position=position) as source:
        assert lines(source) == [b"7\n", b"8"]


def test_a_last_line_without_newline_gets_it_later_and_nothing_else(origin: TextSource) -> None:
    position = origin.position(b"1\n2", 2)
    assert position["open_end"]
    for newline in (b"\n", b"\r\n"):
        with origin.opened(b"1\n2", newline[:1], newline[1:] + b"3\n", position=position) as source:
            assert lines(source) == [b"3\n"]
            reached = {"offset": len(newline) + 5, "line": 3, "blank": 0, "open_end": False}
            assert source.entry(source.reached).items() >= reached.items()
    with pytest.raises(SourceRefused) as error, origin.opened(b"1\n2", b"3\n", position=position) as source:
        lines(source)
    assert (error.value.file, error.value.expected) == (str(origin.path), "a line end")


def test_what_cannot_be_opened_or_gone_on_with_is_refused(origin: TextSource, tmp_path: Path) -> None:
    position = origin.position(b"1\n", 0)
    changes: list[dict[str, Any]] = [{"kind": "parquet"}, {"offset": -1}, {"line": True}]
    changes += [{field: None} for field in position]
    for wrong in changes:
        error = refusal(open_kind, origin.opens, origin.path, position | wrong)
        assert "no position to continue from" in str(error)
    for path in (tmp_path, tmp_path / "none"):
        assert refusal(open_kind, origin.opens, path).file == str(path)


both = pytest.mark.parametrize("pack", [KINDS[kind][1] for kind in ("gzip", "zstd")], ids=["gz", "zst"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


def open_at(path: Path, limit: int = 100_000) -> "closing[CompressedJsonLines]":
    return closing(open_kind(CompressedJsonLines, path, limit=limit))


def read_all(path: Path) -> list[Line]:
    with open_at(path, limit=1 << 20) as source:
        return lines(source)


def read_until_refused(path: Path) -> tuple[list[Line], SourceRefused | None]:
    """The rows that a file gives, and why it gives no more, None at its end."""
    found: list[Line] = []
    try:
        with open_at(path) as source:
            while (rows := source.read()) is not None:
                found += rows.lines
    except SourceRefused as error:
        return found, error
    return found, None


@both
def test_all_members_are_read_and_lines_go_on_across_them(pack: Pack, path: Path) -> None:
    path.write_bytes(b"".join(pack(TEXT[start : start + 7]) for start in range(0, len(TEXT), 7)))
    assert read_all(path) == plain_lines(TEXT)
    # Members that are smaller than a read by far, and NUL bytes behind some of gzip's.
    padding = bytes(10_000) if pack is gzip.compress else b""
    path.write_bytes(b"".join(pack(b"%d\n" % number) + padding * (number % 1000 == 0) for number in range(3000)))
    assert read_all(path) == [b"%d\n" % number for number in range(3000)]


def test_frames_that_are_skipped_and_frames_of_every_kind(path: Path) -> None:
    noise = bytes(range(256)).replace(b"\n", b"-") * 600 + b"\n"
    packed = io.BytesIO()
    for level, checksum, size in ((1, True, True), (19, False, False), (3, True, False)):
        compressor = zstandard.ZstdCompressor(level, write_checksum=checksum, write_content_size=size)
        packed.write(b"\x53\x2a\x4d\x18\x03\0\0\0abc")
        packed.write(compressor.compress(noise + b"x" * 300_000 + b"\n"))
    path.write_bytes(packed.getvalue())
    assert read_all(path) == [noise, b"x" * 300_000 + b"\n"] * 3


@both
def test_a_file_cut_anywhere_is_refused_after_its_whole_rows(pack: Pack, path: Path) -> None:
    first, second = pack(b"1\n22\n"), pack(b"333\n4444\n")
    packed = first + second
    for size in range(1, len(packed)):
        path.write_bytes(packed[:size])
        found, error = read_until_refused(path)
        assert (error is None) == (size == len(first))
        assert found == [b"1\n", b"22\n", b"333\n", b"4444\n"][: len(found)]
        assert len(found) >= 2 * (size >= len(first))


@both
def test_a_damaged_byte_is_never_taken_for_text_in_order(pack: Pack, path: Path) -> None:
    text = b"1\n22\n333\n4444\n55555\n666666\n" * 3
    packed = pack(text)
    refused = 0
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 0x24
        path.write_bytes(damaged)
        found, error = read_until_refused(path)
        refused += error is not None
        # The time and the system in a gzip header are nobody's concern, for instance.
        assert error is not None or found == plain_lines(text)
    assert refused > len(packed) // 2


def test_zstd_without_its_package_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path.write_bytes(KINDS["zstd"][1](b"1\n"))
    assert raised(ExtraMissing, open_at, path).package == "zstandard"


@both
def test_a_large_file_is_decompressed_in_a_thread_that_ends(pack: Pack, path: Path) -> None:
    dice = random.Random(0)
    noise = [b"%x\n" % dice.getrandbits(800) for _ in range(45_000)]
    path.write_bytes(gzip.compress(b"".join(noise), 1) if pack is gzip.compress else pack(b"".join(noise)))
    threads = threading.active_count()
    with open_at(path) as source:
        assert lines(source, 1000) == noise[:1000]
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    with open_at(path) as source:
        assert lines(source) == noise
        assert source.read() is None
    damaged = bytearray(path.read_bytes())
    damaged[-2] ^= 1
    path.write_bytes(damaged)
    with open_at(path) as source:
        for _ in range(2):
            assert "an intact" in str(refusal(lines, source).expected)


Row = tuple[bytes | None, RowOrigin, FilePosition]
"""A line, or None for one too long; its place; the position after it."""


def split(blocks: list[bytes], limit: int, start: FilePosition | None = None) -> tuple[list[Row], FilePosition]:
    splitter = LineSplitter("a.jsonl", limit, start)
    found = [*map(splitter.feed, blocks), splitter.finish()]
    assert splitter.pending == 0
    rows = [
        (line if isinstance(line, bytes) else None, piece.place(index), piece.position(index))
        for piece in found
        for index, line in enumerate(piece.lines)
    ]
    return rows, splitter.position


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({end % (len(text) + 1) for end in cuts})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"x", b" ", BOM, b"\0", b"12345", b"1234567890"]), max_size=40),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(0, 40),
)
@example([BOM, b"1234567890", b"x", b"x", b"\r\n", b"x"], list(range(20)), 0)  # as long as a row may be
@example([b"1234567890", b"x", b"x", b"x", b"\r", b"\n", b"x", b"\n"], list(range(20)), 0)  # a byte longer
def test_rows_do_not_depend_on_cuts_of_blocks_nor_on_restarts(parts: list[bytes], cuts: list[int], taken: int) -> None:
    text = b"".join(parts)
    rows, mark = split(cut(text, cuts), limit=12)
    assert [(line, place.line, place.byte) for line, place, _ in rows] == reference(text, limit=12)
    assert mark.offset == len(text)
    assert mark.line == text.count(b"\n") + (text not in (b"", BOM) and not text.endswith(b"\n"))
    assert mark.blank == mark.line - len(rows)
    taken = min(taken, len(rows))
    start = rows[taken - 1][2] if taken else FilePosition(0, 0, 0)
    rest, end = split([text[start.offset :]], limit=12, start=start)
    assert [row[:2] for row in rest] == [row[:2] for row in rows[taken:]]
    if rest:
        assert end == mark


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
