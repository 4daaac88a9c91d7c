"""Finds the rows of a stream from a place in a source file or a text, and the source line of a row.

A seal records how far each source was read when its chunk was published. So a place is in the first chunk whose seal is
past it, found by bisection, and the row by its digest. If rows are mixed or shuffled, several chunks may qualify.
In a stream with several writers each writer has its own positions, and the same holds for the chunks with its rows.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.errors import LazyShardError, StateMismatch
from lazyshard.format.records import chunk_name
from lazyshard.format.seal import Seal
from lazyshard.format.writers import Sequenced, WriterRows
from lazyshard.inspection.tracing import Report
from lazyshard.part import MAX_SAMPLES, UInt64Array
from lazyshard.store.files import open_given_file, read_seal, stream_path
from lazyshard.stream.listing import read_manifest
from lazyshard.stream.stream import Stream

# Kinds of sources whose positions are bytes and lines of a text
_OF_LINES: Final = frozenset({"jsonl", "stdin", "jsonl.gz", "jsonl.zst"})
_BY_TEXT: Final = "`--text` searches the published rows"
_NO_LINE: Final = "no line there equals the row"


class SourcePlace(NamedTuple):
    """A place in a source: a byte of the uncompressed file, or a line, from 1."""

    path: str
    byte: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {f'byte {self.byte}' if self.line is None else f'line {self.line}'}"


class PlaceRows(NamedTuple):
    """The rows made from a place: those equal to its row in the half-open range of chunks; or `why` there is none."""

    chunks: tuple[int, int]
    samples: tuple[int, ...] = ()
    why: str | None = None


class _SourcePosition(NamedTuple):
    """How far a seal says a source was read, in bytes and lines, and whether a row or block is partly published."""

    offset: int = 0
    line: int = 0
    open_unit: bool = False


class _Deleted(Exception):
    """The chunk that has a position is deleted."""


def sequenced(seal: Seal, samples_per_chunk: int) -> Sequenced:
    """Returns the position in a seal; that of the only producer of a stream as of one writer, whose name is ""."""
    if (found := Sequenced.read_source(seal.source)) is not None:
        return found
    first = seal.chunk * samples_per_chunk
    rows = WriterRows("", first, seal.samples, seal.source)
    return Sequenced({"": (first + seal.samples, seal.chunk)}, (rows,))


class _Positions:
    """The position after each chunk of a writer; see `sequenced` for the only producer of a stream.

    The position after a chunk is that after the writer's last piece up to there.
    """

    def __init__(self, directory: Path, chunks: range, samples_per_chunk: int, writer: str) -> None:
        self.chunks, self._directory, self._size, self.writer = chunks, directory, samples_per_chunk, writer

    def after(self, chunk: int) -> Any:
        """Returns the position after a chunk, None if there is none. Raises _Deleted."""
        return None if (found := self._last_rows(chunk)) is None else found[1].source

    def before(self, chunk: int) -> Any:
        """Returns the position before the rows of a chunk, likewise."""
        found = own = self._last_rows(chunk)
        # A remainder may be spread over chunks, which all have the position after it.
        while found is not None and own is not None and found[1].first // self._size == own[1].first // self._size:
            found = self._last_rows(found[0] - 1) if found[1].first else None
        return None if found is None else found[1].source

    def last(self, chunk: int) -> int:
        """Returns the last chunk of the piece that is in a chunk: a remainder may be spread over several."""
        found = self._last_rows(chunk)
        whole = found is None or found[1].count == self._size
        return chunk if whole or (newest := self._last_rows(self.chunks[-1])) is None else max(chunk, newest[0])

    def digests(self, chunk: int) -> tuple[int, UInt64Array]:
        """Returns the first row of this writer in a chunk, and the digests of its rows there."""
        seal, first = read_seal(self._directory, chunk), 0
        for one in sequenced(seal, self._size).rows:
            if one.writer == self.writer:
                return first, seal.digests[first : first + one.count]
            first += one.count
        return 0, seal.digests[:0]

    def _last_rows(self, chunk: int) -> tuple[int, WriterRows] | None:
        """Returns the last chunk up to one that has rows of the writer, and these rows. Raises _Deleted."""
        if 0 <= chunk < self.chunks.start:
            raise _Deleted
        position = Sequenced({}) if chunk < 0 else sequenced(read_seal(self._directory, chunk), self._size)
        if (taken := position.taken.get(self.writer)) is None:
            return None
        if taken[1] < chunk:
            return self._last_rows(taken[1])
        return next(((chunk, one) for one in position.rows if one.writer == self.writer), None)


def find_source(directory: Path, chunks: range, samples_per_chunk: int, place: SourcePlace) -> PlaceRows:
    """Finds the rows of a place in a source. Raises StateMismatch: the seals do not reach it yet; ChunkCorrupt."""
    if not chunks:
        raise _unknown(f"{directory}: there is no chunk")
    newest = sequenced(read_seal(directory, chunks[-1]), samples_per_chunk)
    every = [_Positions(directory, chunks, samples_per_chunk, writer) for writer in sorted(newest.taken)]
    entries = [_entries(_known_after(one, chunks[-1])) for one in every]
    name = _name(directory, dict(chain.from_iterable(one.items() for one in entries)), place)
    found, refused = list[PlaceRows](), list[StateMismatch]()
    for positions, own in zip(every, entries, strict=True):
        if name in own:
            # Several writers may read the same source.
            try:
                found.append(_find(positions, name, samples_per_chunk, place))
            except StateMismatch as error:
                refused.append(error)
    if not found:
        raise refused[0]
    return max(found, key=lambda one: len(one.samples))


def _known_after(positions: _Positions, chunk: int) -> Any:
    """Returns the position after a chunk, None also if it is deleted."""
    with contextlib.suppress(_Deleted):
        return positions.after(chunk)
    return None


def _find(positions: _Positions, name: str, samples_per_chunk: int, place: SourcePlace) -> PlaceRows:
    chunks = positions.chunks
    newest = _known_after(positions, chunks[-1])
    # Which number of a position is compared, and what it must exceed.
    which, wanted = (0, place.byte or 0) if place.line is None else (1, place.line - 1)

    def mark(chunk: int) -> _SourcePosition:
        return _position_in(newest if chunk == chunks[-1] else _known_after(positions, chunk), name)

    def reached(chunk: int) -> int:
        return mark(chunk)[which]

    # The first chunk whose seal is past the place.
    at = chunks.start + bisect_right(chunks, wanted, key=reached)
    if at == chunks.stop and not mark(chunks[-1]).open_unit:
        raise _unknown(f"{place}: only {reached(chunks[-1])} {('bytes', 'lines')[which]} of it are published so far")
    first, last, begin = 0, positions.last(min(at, chunks[-1])), _SourcePosition()
    if at > chunks.start:
        first, begin = at, mark(at - 1)
        if begin.open_unit:
            # Rows made of a row or block that is partly published may have begun in any chunk since.
            first = chunks.start + bisect_left(chunks, reached(at - 1), key=reached)
    within, read = (first, last + 1), _lines(Path(place.path if os.path.exists(place.path) else name), begin)
    try:
        line = next((text for *reached_there, text in read if wanted < reached_there[which]), b"")
    except OSError as error:
        return PlaceRows(within, why=f"{_why(error)}; {_BY_TEXT}")
    if not line:
        return PlaceRows(within, why=f"the file is shorter now; {_BY_TEXT}")
    if not line.strip():
        raise _unknown(f"{place}: that line is blank, so no row is made of it")
    digests, found = _digests(line), list[int]()
    for chunk in range(max(first, chunks.start), last + 1):
        row, own = positions.digests(chunk)
        found += (chunk * samples_per_chunk + row + np.flatnonzero(np.isin(own, digests))).tolist()
    gone = f"the chunks below {chunks.start} are deleted, " if first < chunks.start else ""
    causes = "it was refused as a bad row, rows are not published as the lines are, or the file has changed since"
    why = f"no row there equals that line: {gone}{causes}"
    return PlaceRows(within, tuple(found), None if found else why)


def _name(directory: Path, entries: Mapping[str, dict[str, Any]], place: SourcePlace) -> str:
    """Returns the name of a source in the seals."""
    kinds = {path: entry.get("kind") for path, entry in entries.items()}
    if not kinds:
        raise _unknown(f"{directory}: its seals hold no positions in sources: another program has written the stream")
    same = [place.path] if place.path in kinds else []
    for alike in (os.path.realpath, os.path.basename):
        same = same or [path for path in kinds if alike(path) == alike(place.path)]
    if len(same) != 1:
        some = ", ".join(list(kinds)[:5]) + (", ..." if len(kinds) > 5 else "")
        raise _unknown(f"{place.path}: none of the stream's sources, which are: {some}")
    if kinds[same[0]] not in _OF_LINES | {None}:
        raise _unknown(f"{same[0]}: a source of kind {kinds[same[0]]}, which has no bytes and lines to search by")
    return same[0]


def _position_in(source: Any, name: str) -> _SourcePosition:
    """Returns how far a source of lines was read by a position; 0 if it was not begun, or not given yet."""
    open_unit, entry = bool(_counted(source, "skip")), _entries(source).get(name)
    if entry is None or entry.get("kind") is None:
        return _SourcePosition(open_unit=open_unit)
    offset: Any = entry.get("offset")
    line: Any = entry.get("line")
    if not all(type(one) is int and 0 <= one <= MAX_SAMPLES for one in (offset, line)):
        raise _unknown(f"{name}: a seal does not say how far it was read")
    return _SourcePosition(offset, line, open_unit)


def _why(error: OSError) -> str:
    return str(error.strerror) if error.errno == 0 else f"the file cannot be read: {error.strerror or error}"


def _lines(path: Path, begin: _SourcePosition, end: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Yields the lines of a source from a position to a byte: the end of the line, its number from 1, and its text."""
    # The name comes from a seal: it may be any file, so none of its content is shown.
    opened = open_given_file(path)
    with os.fdopen(os.dup(opened.fd), "rb") as file:
        if file.read(2) in (b"\x1f\x8b", b"\x28\xb5"):
            raise OSError(0, "the file is compressed")
        at, number, _ = begin
        file.seek(at)
        # A producer accepts no longer lines as rows.
        while (end is None or at < end) and (line := file.readline(256 << 20)):
            number, at = number + 1, at + len(line)
            yield at, number, line


def _digests(line: bytes) -> list[int]:
    """Returns the possible digests of the row made of a line: as it is, or without surrounding white space."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    return [xxhash.xxh3_64_intdigest(form + b"\n") for form in {line.rstrip(b"\r\n"), line.strip()}]


def _unknown(what: str) -> StateMismatch:
    return StateMismatch(f"{what}; look for the row with --text, or give it by --sample or --chunk")


class Origin(NamedTuple):
    """A possible origin of a row: a source, under its name in the stream."""

    path: str
    lines: tuple[int, ...] = ()  # from 1: the lines that equal the row, several if lines are alike; empty if none does
    among: tuple[int, int] | None = None  # the half-open range of lines that its chunk was made of, if it has lines
    why: str | None = None  # why the line is unknown; None if it is known

    def __str__(self) -> str:
        """Formats the origin.

        >>> str(Origin("b.jsonl", (41,), (41, 49))), str(Origin("b.jsonl", (), (41, 49), "the file has changed"))
        ('b.jsonl:41', 'b.jsonl, lines 41 to 48 (the file has changed)')
        """
        if self.lines:
            return " or ".join(f"{self.path}:{line}" for line in self.lines)
        if self.among is None:
            return f"{self.path} ({self.why})"
        first, last = self.among[0], self.among[1] - 1
        return f"{self.path}, {f'line {first}' if first == last else f'lines {first} to {last}'} ({self.why})"


# The origin of a row of a source that equals no line, and the numbers of the lines by digest
_Lines = tuple[Origin, dict[int, list[int]]]


class Origins:
    """Finds the origins of rows of a native stream; `chunks` are the existing ones."""

    def __init__(self, directory: Path, chunks: range, samples_per_chunk: int) -> None:
        self._directory, self._chunks, self._size = directory, chunks, samples_per_chunk
        # Consecutive calls mostly concern one chunk and writer.
        self._read = lru_cache(maxsize=1)(partial(read_seal, directory))
        self._candidates = lru_cache(maxsize=1)(self._find_candidates)

    def writer(self, chunk: int, row: int) -> tuple[str, int] | None:
        """Returns the writer of a row, "" for the only producer, and the row's number of all that it has written.

        None if the chunk is deleted.
        """
        for one in sequenced(self._read(chunk), self._size).rows if chunk in self._chunks else ():
            if row < one.count:
                return one.writer, one.first + row
            row -= one.count
        return None

    def of(self, chunk: int, row: int) -> tuple[Origin, ...]:
        """Returns the origins of a row: one source with its line, or all candidates; empty if unknown."""
        if chunk not in self._chunks:
            return ()
        name, _ = self.writer(chunk, row) or ("", 0)
        digest, read = int(self._read(chunk).digests[row]), self._candidates(chunk, name)
        found = (one._replace(lines=tuple(lines[digest]), why=None) for one, lines in read if digest in lines)
        return tuple(found) or tuple(one for one, _ in read)

    def _find_candidates(self, chunk: int, writer: str) -> list[_Lines]:
        with contextlib.suppress(_Deleted):
            return list(self._look(_Positions(self._directory, self._chunks, self._size, writer), chunk))
        return []

    def _look(self, positions: _Positions, chunk: int) -> Iterator[_Lines]:
        if not (_entries(positions.after(chunk)) or positions.writer):
            raise StateMismatch(f"{self._directory}: seal {chunk} names no source; leave out --origins")
        begin, end = positions.before(chunk), self._end(positions, chunk)
        known = _entries(begin)
        for name, entry in _entries(end).items():
            kind = entry.get("kind")
            if entry == known.get(name) or kind is None:
                continue
            if kind in _OF_LINES:
                yield _look_into(name, _position_in(begin, name), _position_in(end, name))
            elif kind == "stream":
                yield from _look_into_stream(name, _counted(known.get(name), "sample"), _counted(entry, "sample"))
            else:
                yield Origin(name, why=f"a source of kind {kind} has no lines"), {}

    def _end(self, positions: _Positions, chunk: int) -> Any:
        """Returns the position past all rows of a chunk, and past its block if it ends in one; None if none is."""
        if not _counted(source := positions.after(chunk), "skip"):
            return source

        def rows(chunk: int) -> int:
            return _counted(positions.after(chunk), "rows")

        later = range(chunk, self._chunks.stop)
        at = chunk + bisect_right(later, _counted(source, "rows"), key=rows)
        return positions.after(at) if at in later else None


def _counted(entry: Any, name: str) -> int:
    """Returns a count from a seal, 0 if it has none."""
    value = entry.get(name) if isinstance(entry, dict) else None
    return value if isinstance(value, int) else 0


def _entries(source: Any) -> dict[str, dict[str, Any]]:
    """Returns the entries of a position for each source, by name."""
    entries = source.get("sources") if isinstance(source, dict) else None
    if not isinstance(entries, list):
        return {}
    return {str(entry["path"]): entry for entry in entries if isinstance(entry, dict) and "path" in entry}


def _look_into(name: str, begin: _SourcePosition, end: _SourcePosition) -> _Lines:
    """Reads the part of a source from one position to another."""
    origin = Origin(name, (), (begin.line + 1, max(begin.line + 1, end.line) + 1), _NO_LINE)
    try:
        read = _lines(Path(name), begin, end.offset)
        return origin, _by_digest((digest, number) for _, number, line in read for digest in _digests(line))
    except OSError as error:
        return origin._replace(why=_why(error)), {}


def _by_digest(rows: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for digest, number in rows:
        found.setdefault(digest, []).append(number)
    return found


def _look_into_stream(name: str, begin: int, stop: int) -> Iterator[_Lines]:
    """Yields the same for each chunk with samples of [begin, stop): its seal holds the rows' digests."""
    directory = stream_path(name)
    try:
        manifest = read_manifest(directory, None)
        if manifest is None:
            yield Origin(name, why="a directory that another program fills has no digests"), {}
            return
        size = manifest.samples_per_chunk
        for chunk in range(begin // size, -(-stop // size)):
            first, last = max(begin - chunk * size, 0), min(stop - chunk * size, size)
            digests, lines = read_seal(directory, chunk).digests[first:last].tolist(), (first + 1, last + 1)
            numbered = _by_digest(zip(digests, range(*lines), strict=False))
            yield Origin(str(directory / chunk_name(chunk)), (), lines, _NO_LINE), numbered
    except (LazyShardError, OSError) as error:
        yield Origin(name, why=f"the stream cannot be read: {error}"), {}


def find_text(stream: Stream, chunks: range, text: str, report: Report = lambda *_: None) -> Iterator[int]:
    r"""Yields the samples whose rows contain a text, in order; `chunks` are the existing ones.

    Searches for the text itself and for its form in a JSON string: in UTF-8, and in ASCII with escapes. A text that is
    escaped in another way, for instance "\/" for "/", or that crosses the end of a string, is not found. Raises
    ChunkCorrupt, RowInvalid, FileNotFoundError, OSError: a chunk cannot be read; the chunks before it are searched.
    """
    wanted = {text.encode("utf-8", "surrogateescape")}
    # JSON has no lone surrogates.
    with contextlib.suppress(UnicodeEncodeError):
        wanted |= {json.dumps(text, ensure_ascii=only)[1:-1].encode() for only in (False, True)}
    for number, chunk in enumerate(chunks):
        report("searching", number, len(chunks))
        opened = stream.open_chunk(chunk)
        row, rows = 0, len(opened)
        while row < rows:
            lines = opened.lines(row, rows, 1, 4 << 20)
            for at, line in enumerate(lines, row):
                if any(spelling in line for spelling in wanted):
                    yield chunk * stream.samples_per_chunk + at
            row += len(lines)
    report("searching", len(chunks), len(chunks))
