"""From a place in a source file, or a text, to the rows of a stream, and from a row back to the line it was made of.

A seal keeps how far each source was read when its chunk was published. So a place lies in the first chunk whose seal is
past it, which a bisection finds; and the row itself is found by its digest where the file still holds it and rows are
published as they are. Where rows are mixed, shuffled or made of others, a few chunks may come into question. The other
way round, the seals of a chunk and of the one before it say which part of each source was read for it.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.errors import LazyShardError, StateMismatch
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.format.seal import Seal
from lazyshard.part import MAX_SAMPLES
from lazyshard.store.files import open_given_file, read_file
from lazyshard.store.urls import stream_path
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.stream import Stream

# Kinds of sources whose positions are bytes and lines of a text
_OF_LINES: Final = frozenset({"jsonl", "stdin", "jsonl.gz", "jsonl.zst"})
_MAX_LINE_BYTES: Final = 256 << 20  # More than a producer takes for a row
_SCAN_BYTES: Final = 1 << 20

_PACKED: Final = (b"\x1f\x8b", b"\x28\xb5")
_BUDGET_BYTES: Final = 4 << 20  # Bytes that are read at a time
_NO_LINE: Final = "no line there equals the row"


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in a source: a byte of the file, or of what it holds uncompressed; or a line, from 1."""

    path: str
    byte: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {f'byte {self.byte}' if self.line is None else f'line {self.line}'}"


@dataclass(frozen=True, slots=True)
class PlaceRows:
    """The rows that a place in a source has become.

    `chunks` is the half-open range of those that come into question, `samples` those of their rows that are equal to
    the row at the place; where it could not be found, `why`.
    """

    chunks: tuple[int, int]
    samples: tuple[int, ...] = ()
    why: str | None = None


class _SourcePosition(NamedTuple):
    """What a seal says of a source: bytes and lines read of it, and whether a row or block is published in part."""

    offset: int = 0
    line: int = 0
    open_unit: bool = False


def find_source(directory: Path, chunks: range, samples_per_chunk: int, place: SourcePlace) -> PlaceRows:
    """Finds the rows of a place in a source of a stream of ours, of which `chunks` are there. Reads about log2 seals.

    Raises StateMismatch: the seals do not tell of this source, or have not come so far; SealInvalid, OSError: a seal
    cannot be used.
    """
    if not chunks:
        raise _unknown(f"{directory}: no chunk is there")
    newest = _read_seal(directory, chunks[-1])
    name = _name(directory, newest, place)
    by_line = place.line is not None
    wanted = (place.byte or 0) if place.line is None else place.line - 1

    def mark(chunk: int) -> _SourcePosition:
        return _position_in(newest if chunk == chunks[-1] else _read_seal(directory, chunk), name)

    def reached(chunk: int) -> int:
        return mark(chunk).line if by_line else mark(chunk).offset

    # The first chunk whose seal is past the place.
    at = chunks.start + bisect_right(chunks, wanted, key=reached)
    if at == chunks.stop and not mark(chunks[-1]).open_unit:
        unit = "lines" if by_line else "bytes"
        raise _unknown(f"{place}: of this source {reached(chunks[-1])} {unit} are published so far")
    first, last, begin = 0, min(at, chunks[-1]), _SourcePosition()
    if at > chunks.start:
        first, begin = at, mark(at - 1)
        if begin.open_unit:
            # What is made of a row or a block of which a part is published may have begun in any chunk since.
            first = chunks.start + bisect_left(chunks, reached(at - 1), key=reached)
    within = first, last + 1
    try:
        digests = [xxhash.xxh3_64_intdigest(text) for text in _line(name, place, begin)]
    except StateMismatch:
        raise
    except OSError as error:
        return PlaceRows(within, why=f"the file cannot be read ({error.strerror or error})")
    except ValueError as error:
        return PlaceRows(within, why=f"{error}; `--text` searches the published rows")
    found: list[int] = []
    for chunk in range(max(first, chunks.start), last + 1):
        rows = np.flatnonzero(np.isin(_read_seal(directory, chunk).digests, digests))
        found += (chunk * samples_per_chunk + rows).tolist()
    if found:
        return PlaceRows(within, tuple(found))
    why = "no row there equals that line, so"
    if first < chunks.start:
        why = f"the chunks below {chunks.start} are deleted, and the row was most likely in one of them; if not,"
    return PlaceRows(within, why=f"{why} rows are not published as the lines are, or the file has changed since")


def _name(directory: Path, seal: Seal, place: SourcePlace) -> str:
    """Returns how the seals call a source."""
    kinds = {path: entry.get("kind") for path, entry in _entries(seal).items()}
    if not kinds:
        raise _unknown(f"{directory}: its seals hold no positions in sources: another program has written the stream")
    same = [place.path] if place.path in kinds else []
    for alike in (os.path.realpath, os.path.basename):
        same = same or [path for path in kinds if alike(path) == alike(place.path)]
    if len(same) != 1:
        some = ", ".join(list(kinds)[:5]) + (", ..." if len(kinds) > 5 else "")
        raise _unknown(f"{place.path}: none of the stream's sources, which are: {some}")
    [name] = same
    if kinds[name] not in _OF_LINES | {None}:
        raise _unknown(f"{name}: a source of kind {kinds[name]}, which has no bytes and lines to be found by")
    return name


def _position_in(seal: Seal, name: str) -> _SourcePosition:
    """Returns how far a seal says that a source of lines was read; 0 where it was not begun, or not given yet."""
    open_unit = isinstance(seal.source, dict) and bool(seal.source.get("skip"))
    entry = _entries(seal).get(name)
    if entry is None or entry.get("kind") is None:
        return _SourcePosition(open_unit=open_unit)
    numbers: list[Any] = [entry.get("offset"), entry.get("line")]
    if any(type(one) is not int or not 0 <= one <= MAX_SAMPLES for one in numbers):
        raise _unknown(f"{name}: the seal of chunk {seal.chunk} does not say how far it was read")
    return _SourcePosition(numbers[0], numbers[1], open_unit)


def _line(name: str, place: SourcePlace, begin: _SourcePosition) -> list[bytes]:
    """Returns the `_line_forms` of the line at a place.

    Raises OSError: the file cannot be read; ValueError: its lines are not to be had; the message says why;
    StateMismatch: the line is blank.
    """
    with _open_text(Path(place.path if os.path.exists(place.path) else name)) as file:
        if place.line is None:
            file.seek(_line_start(file, place.byte or 0))
        else:
            file.seek(begin.offset)
            for _ in range(place.line - 1 - begin.line):
                if not file.readline(_MAX_LINE_BYTES):
                    break
        line = file.readline(_MAX_LINE_BYTES)
    if not line:
        raise ValueError("the file is shorter now")
    if not line.strip():
        raise _unknown(f"{place}: that line is blank, so no row is made of it")
    return _line_forms(line)


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[BinaryIO]:
    # The name is what a seal says: it may be that of anything, and nothing is shown of what is in it.
    opened = open_given_file(path)
    with os.fdopen(os.dup(opened.fd), "rb") as file:
        if file.read(2) in _PACKED:
            raise ValueError("the file is compressed")
        yield file


def _line_forms(line: bytes) -> list[bytes]:
    """Returns what the row may be that is made of a line: as it is, or without white space around it."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    return [line.rstrip(b"\r\n") + b"\n", line.strip() + b"\n"]


def _line_start(file: BinaryIO, byte: int) -> int:
    stop = byte
    while stop:
        start = max(0, stop - _SCAN_BYTES)
        file.seek(start)
        at = file.read(stop - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        stop = start
    return 0


def _read_seal(directory: Path, chunk: int) -> Seal:
    path = directory / seal_name(chunk)
    return Seal.decode(read_file(path), chunk, str(path))


def _unknown(what: str) -> StateMismatch:
    return StateMismatch(f"{what}; look for the row with --text, or give it by --sample or --chunk")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row may have come from: a source, as its stream calls it."""

    path: str
    lines: tuple[int, ...] = ()  # from 1: those that the row equals, several where lines are alike; empty if none does
    among: tuple[int, int] | None = None  # the half-open range of lines that its chunk was made of, if it has lines
    why: str | None = None  # why its line is not told; None where it is

    def __str__(self) -> str:
        """Tells it in words.

        >>> str(Origin("b.jsonl", (41,), (41, 49))), str(Origin("b.jsonl", (), (41, 49), "the file has changed"))
        ('b.jsonl:41', 'b.jsonl, lines 41 to 48 (the file has changed)')
        """
        if self.lines:
            return " or ".join(f"{self.path}:{line}" for line in self.lines)
        if self.among is None:
            return f"{self.path} ({self.why})"
        first, last = self.among[0], self.among[1] - 1
        return f"{self.path}, {f'line {first}' if first == last else f'lines {first} to {last}'} ({self.why})"


# What is to be said of a row of a source that equals no line, and the numbers of the lines by digest
_Lines = tuple[Origin, dict[int, list[int]]]


class Origins:
    """Tells where rows of a stream of ours came from; `chunks` are those that are there."""

    def __init__(self, directory: Path, chunks: range) -> None:
        self._directory = directory
        self._chunks = chunks
        # Of the chunk that was asked for last: rows that are asked for one after another are mostly of one.
        self._chunk = -1
        self._seal: Seal | None = None
        self._read: list[_Lines] = []

    def of(self, chunk: int, row: int) -> tuple[Origin, ...]:
        """Returns where a row may have come from: one source where its line was found, or else all that may be.

        Empty where that is not known: the chunk is deleted, or the one before it, whose seal tells from where on its
        sources were read; or the chunk ends within a block of which the rest is not published yet. Raises
        StateMismatch: the seal does not tell of any source; SealInvalid, OSError: a seal cannot be used.
        """
        if chunk not in self._chunks or max(0, chunk - 1) not in self._chunks:
            return ()
        if self._seal is None or chunk != self._chunk:
            self._seal = _read_seal(self._directory, chunk)
            self._read = list(self._look(self._seal))
            self._chunk = chunk
        digest = int(self._seal.digests[row])
        found = [
            Origin(origin.path, tuple(lines[digest]), origin.among) for origin, lines in self._read if digest in lines
        ]
        return tuple(found) or tuple(origin for origin, _ in self._read)

    def _look(self, seal: Seal) -> Iterator[_Lines]:
        if not _entries(seal):
            what = f"the seal of chunk {seal.chunk} does not say which sources it was read from"
            raise StateMismatch(f"{self._directory}: {what}; leave out --origins")
        begin = _read_seal(self._directory, seal.chunk - 1) if seal.chunk else None
        end = self._end(seal)
        known = _entries(begin)
        for name, entry in _entries(end).items():
            kind = entry.get("kind")
            if end is None or entry == known.get(name) or kind is None:
                continue
            if kind in _OF_LINES:
                yield _look_into(name, _SourcePosition() if begin is None else _position_in(begin, name), end)
            elif kind == "stream":
                yield from _look_into_stream(name, _counted(known.get(name), "sample"), _counted(entry, "sample"))
            else:
                yield Origin(name, why=f"a source of kind {kind} has no lines"), {}

    def _end(self, seal: Seal) -> Seal | None:
        """Returns the seal that tells how far sources were read for a chunk, None if it is not there yet.

        It is the chunk's own, or where that ends within a block that is shuffled or packed, the next that is past the
        block: a seal tells of whole blocks.
        """
        if not _counted(seal.source, "skip"):
            return seal
        read = _counted(seal.source, "rows")
        at = self._chunks.start + bisect_right(
            self._chunks, read, key=lambda chunk: _counted(_read_seal(self._directory, chunk).source, "rows")
        )
        return _read_seal(self._directory, at) if at in self._chunks else None


def _counted(entry: Any, name: str) -> int:
    """Returns a count of what a seal says, 0 where it says none."""
    value = entry.get(name) if isinstance(entry, dict) else None
    return value if isinstance(value, int) else 0


def _entries(seal: Seal | None) -> dict[str, dict[str, Any]]:
    """Returns what a seal says of each source, by name."""
    source = None if seal is None else seal.source
    entries = source.get("sources") if isinstance(source, dict) else None
    if not isinstance(entries, list):
        return {}
    return {str(entry["path"]): entry for entry in entries if isinstance(entry, dict) and "path" in entry}


def _look_into(name: str, begin: _SourcePosition, seal: Seal) -> _Lines:
    """Reads the part of a source from a position on up to that of a seal."""
    end = _position_in(seal, name)
    among = (begin.line + 1, max(begin.line + 1, end.line) + 1)
    lines: dict[int, list[int]] = {}
    try:
        with _open_text(Path(name)) as file:
            file.seek(begin.offset)
            number = begin.line
            while file.tell() < end.offset and (line := file.readline(_MAX_LINE_BYTES)):
                number += 1
                for form in set(_line_forms(line)):
                    lines.setdefault(xxhash.xxh3_64_intdigest(form), []).append(number)
    except OSError as error:
        return Origin(name, (), among, f"the file cannot be read: {error.strerror or error}"), {}
    except ValueError as error:
        return Origin(name, (), among, str(error)), {}
    return Origin(name, (), among, _NO_LINE), lines


def _look_into_stream(name: str, begin: int, stop: int) -> Iterator[_Lines]:
    """Yields the same of each chunk with samples of [begin, stop): its seal tells the rows' digests."""
    directory = stream_path(name)
    try:
        manifest = read_manifest(directory, None)
        if manifest is None:
            yield Origin(name, why="a directory that another program fills has no digests"), {}
            return
        size = manifest.samples_per_chunk
        for chunk in range(begin // size, -(-stop // size)):
            first, last = max(begin - chunk * size, 0), min(stop - chunk * size, size)
            lines: dict[int, list[int]] = {}
            for row, digest in enumerate(_read_seal(directory, chunk).digests[first:last].tolist(), first + 1):
                lines.setdefault(digest, []).append(row)
            yield Origin(str(directory / chunk_name(chunk)), (), (first + 1, last + 1), _NO_LINE), lines
    except (LazyShardError, OSError) as error:
        yield Origin(name, why=f"the stream cannot be read: {error}"), {}


def find_text(
    stream: Stream, chunks: range, text: str, report: Callable[[str, int, int], None] = lambda phase, done, total: None
) -> Iterator[int]:
    r"""Yields the samples whose rows hold a text, in order; `chunks` are those that are there.

    It is looked for as it is and as JSON writes it within a string: in UTF-8, and in ASCII with escapes. Not found is a
    text that is escaped in another way, "\/" for "/" for instance, or that goes over the end of a string. Raises
    ChunkCorrupt, RowInvalid, FileNotFoundError, OSError: a chunk cannot be read; those before it are searched.
    """
    wanted = _spellings(text)
    for number, chunk in enumerate(chunks):
        report("searching", number, len(chunks))
        opened = stream.open_chunk(chunk)
        row, rows = 0, len(opened)
        while row < rows:
            lines = opened.lines(row, rows, 1, _BUDGET_BYTES)
            for at, line in enumerate(lines, row):
                if any(spelling in line for spelling in wanted):
                    yield chunk * stream.samples_per_chunk + at
            row += len(lines)
    report("searching", len(chunks), len(chunks))


def _spellings(text: str) -> list[bytes]:
    r"""Returns how a text may stand in a row.

    >>> _spellings('a"b'), len(_spellings("\u00e4")), len(_spellings("plain"))
    ([b'a"b', b'a\\"b'], 2, 1)
    """
    raw = text.encode("utf-8", "surrogateescape")
    try:
        escaped = [json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (False, True)]
    except UnicodeEncodeError:
        escaped = []
    return list(dict.fromkeys([raw, *escaped]))
