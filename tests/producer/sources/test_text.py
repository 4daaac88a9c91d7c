"""A text as a source, plain, compressed or through a pipe: the same rows, places and positions, and the same refusals.

What only one of them does: `test_lines`, `test_compressed`, `test_stdin`.
"""

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import zstandard

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.lines import JsonLinesFile
from lazyshard_producer.sources.sequential import CompressedJsonLines, StandardInput
from lazyshard_producer.sources.source import RowOrigin
from tests.producer.sources.reading import BOM, TEXT, Kind, lines, open_kind, plain_lines, position_after, refusal, take

KINDS: Final[dict[str, tuple[Kind, Callable[[bytes], bytes]]]] = {
    "plain": (JsonLinesFile, lambda text: text),
    "gzip": (CompressedJsonLines, gzip.compress),
    "zstd": (CompressedJsonLines, zstandard.ZstdCompressor(write_checksum=True).compress),
    "pipe": (StandardInput, lambda text: text),
}


class TextSource:
    """A text as a source of one kind."""

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
        """The position after so many rows of a text."""
        with self.opened(text) as source:
            entry: dict[str, Any] = source.entry(position_after(source, take(source, count)))
            return entry


@pytest.fixture(params=KINDS)
def given(request: pytest.FixtureRequest, tmp_path: Path) -> TextSource:
    return TextSource(request.param, tmp_path)


@pytest.mark.parametrize("text", [b"", b"\n", BOM, b"1\n2\n", b"1\r\n\r\n2", b"1\r2\n", b"{}\n" + bytes(5000), TEXT])
def test_lines(text: bytes, given: TextSource) -> None:
    with given.opened(text) as source:
        expected = plain_lines(text)
        assert lines(source) == expected
        entry, blank = source.entry(source.reached), source.blank
        assert (entry["offset"], entry["line"], entry["blank"]) == (len(text), len(expected) + blank, blank)
        assert blank == text.count(b"\n") - sum(line.endswith(b"\n") for line in expected)
        whole = None if given.kind == "pipe" else given.path.stat().st_size
        assert source.progress == (len(given.pack(text)), whole)
        assert source.read() is None


def test_going_on_after_any_row_gives_the_rest(given: TextSource) -> None:
    parts, expected = (TEXT[:100], TEXT[100:]), plain_lines(TEXT)
    for count in range(len(expected) + 1):
        with given.opened(*parts) as source:
            taken = take(source, count)
            position = source.entry(position_after(source, taken))
            assert [line for line, _, _ in taken] == expected[:count]
        with given.opened(*parts, position=position) as source:
            # How large a compressed file is it knows again when it has read it to its end.
            if given.kind in ("gzip", "zstd"):
                assert (position.pop("packed", None) is not None) == (count == len(expected))
            assert source.entry(source.start) == position
            rest = take(source)
            assert [line for line, _, _ in rest] == expected[count:]
            places = [rows.place(index) for _, rows, index in rest]
            assert [place.line for place in places] == [*range(2 + count, 11), 13][: len(rest)]
            assert places[-1:] == [RowOrigin(str(given.path), 13, len(TEXT) - 1)][: len(rest)]
            assert (source.entry(source.reached)["line"], source.blank) == (13, 3)


@pytest.mark.parametrize(("text", "says"), [(b"1\n23\n3\n", "XXH3"), (b"1\n22", "the 5 bytes"), (b"", "the 5 bytes")])
def test_another_text_than_the_published_one_is_refused(text: bytes, says: str, given: TextSource) -> None:
    position = given.position(b"1\n22\n3\n", 2)
    with pytest.raises(SourceRefused, match=says) as error, given.opened(text, position=position) as source:
        lines(source)
    assert error.value.file == str(given.path)
    # What is behind it may be anything.
    with given.opened(b"1\n22\n7\n8", position=position) as source:
        assert lines(source) == [b"7\n", b"8"]


def test_a_last_line_without_newline_gets_it_later_and_nothing_else(given: TextSource) -> None:
    position = given.position(b"1\n2", 2)
    assert position["open_end"]
    for newline in (b"\n", b"\r\n"):
        with given.opened(b"1\n2", newline[:1], newline[1:] + b"3\n", position=position) as source:
            assert lines(source) == [b"3\n"]
            reached = {"offset": len(newline) + 5, "line": 3, "blank": 0, "open_end": False}
            assert source.entry(source.reached).items() >= reached.items()
    with pytest.raises(SourceRefused) as error, given.opened(b"1\n2", b"3\n", position=position) as source:
        lines(source)
    assert (error.value.file, error.value.expected) == (str(given.path), "a line end")


def test_a_line_that_is_too_long_is_passed_over(given: TextSource) -> None:
    with given.opened(b"1\n" + b"x" * 900_000 + b"\n2\n", limit=1000) as source:
        first, error, last = lines(source)
    assert (first, last) == (b"1\n", b"2\n")
    assert isinstance(error, RowInvalid)


def test_what_cannot_be_opened_or_gone_on_with_is_refused(given: TextSource, tmp_path: Path) -> None:
    position = given.position(b"1\n", 0)
    changes: list[dict[str, Any]] = [{"kind": "parquet"}, {"offset": -1}, {"line": True}]
    changes += [{field: None} for field in position]
    for wrong in changes:
        error = refusal(open_kind, given.opens, given.path, position | wrong)
        assert "no position to go on from" in str(error)
    for path in (tmp_path, tmp_path / "none"):
        assert refusal(open_kind, given.opens, path).file == str(path)
