"""From a place in a source file to the chunks that hold its row, by the source positions in the seals.

A seal keeps how far each source was read when its chunk was published. So a place lies in the first chunk whose seal is
past it, which a bisection finds; and the row itself is found by its digest where the file still holds it and rows are
published as they are. Where rows are mixed, shuffled or made of others, a few chunks may come into question.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import xxhash

from lazyshard.errors import StateMismatch
from lazyshard.format import Seal
from lazyshard.format.cursor import is_count
from lazyshard.format.fields import MAX_SAMPLES
from lazyshard.format.names import seal_name
from lazyshard.store.files import open_given_file, read_file

OF_LINES: Final = frozenset({"jsonl", "stdin", "jsonl.gz", "jsonl.zst"})
"""Kinds of sources whose positions are bytes and lines of a text."""

MAX_LINE_BYTES: Final = 256 << 20
"""More than a producer takes for a row."""

_SCAN_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in a source.

    Attributes:
        path: the file, as it was given.
        byte: in the file, or in what it holds uncompressed; None where the line is given.
        line: from 1; None where the byte is given.
    """

    path: str
    byte: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        """Returns it in words."""
        return f"{self.path}: {f'byte {self.byte}' if self.line is None else f'line {self.line}'}"


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows that a place in a source has become.

    Attributes:
        chunks: the half-open range of chunks that come into question.
        samples: those of its rows that are equal to the row at the place; empty where it could not be found.
        why: why it could not be found; None where it was.
    """

    chunks: tuple[int, int]
    samples: tuple[int, ...] = ()
    why: str | None = None


class Mark(NamedTuple):
    """What a seal says of a source: bytes and lines read of it, and whether a row or block is published in part."""

    offset: int
    line: int
    open_unit: bool


def find_source(directory: Path, chunks: range, samples_per_chunk: int, place: SourcePlace) -> SourceRows:
    """Finds the rows of a place in a source. Reads about log2(chunks) seals.

    Args:
        directory: the stream's directory, of a stream of ours.
        chunks: those that are there: from what is deleted to what is published.
        samples_per_chunk: of the stream.
        place: the place.

    Raises:
        StateMismatch: the seals do not tell of this source, or have not come so far.
        SealInvalid, OSError: a seal cannot be used.
    """
    if not chunks:
        raise _unknown(f"{directory}: no chunk is there")
    newest = read_seal(directory, chunks[-1])
    name = _name(directory, newest, place)
    wanted = place.byte if place.line is None else place.line - 1
    assert wanted is not None

    def mark(chunk: int) -> Mark:
        return source_mark(newest if chunk == chunks[-1] else read_seal(directory, chunk), name)

    def reached(chunk: int) -> int:
        return mark(chunk).offset if place.line is None else mark(chunk).line

    # The first chunk whose seal is past the place.
    at = chunks.start + bisect_right(chunks, wanted, key=reached)
    if at == chunks.stop and not mark(chunks[-1]).open_unit:
        unit = "bytes" if place.line is None else "lines"
        raise _unknown(f"{place}: of this source {reached(chunks[-1])} {unit} are published so far")
    last = min(at, chunks[-1])
    if at == chunks.start:
        first, begin = 0, Mark(0, 0, False)
    else:
        first, begin = at, mark(at - 1)
        if begin.open_unit:
            # What is made of a row or a block of which a part is published may have begun in any chunk since.
            first = chunks.start + bisect_left(chunks, reached(at - 1), key=reached)
    try:
        line = _line(name, place, begin)
    except StateMismatch:
        raise
    except OSError as error:
        return SourceRows((first, last + 1), why=f"the file cannot be read ({error.strerror or error})")
    except ValueError as error:
        return SourceRows((first, last + 1), why=str(error))
    found: list[int] = []
    for chunk in range(max(first, chunks.start), last + 1):
        digests = read_seal(directory, chunk).digests
        for row in np.flatnonzero(np.isin(digests, [xxhash.xxh3_64_intdigest(text) for text in line])).tolist():
            found.append(chunk * samples_per_chunk + row)
    if found:
        return SourceRows((first, last + 1), tuple(found))
    why = "rows are not published as the lines are, or the file has changed since"
    if first < chunks.start:
        gone = f"the chunks below {chunks.start} are deleted, and the row was most likely in one of them"
        why = f"{gone}; if not, {why}"
    else:
        why = f"no row there equals that line, so {why}"
    return SourceRows((first, last + 1), why=why)


def _name(directory: Path, seal: Seal, place: SourcePlace) -> str:
    """Returns how the seals call a source."""
    source = seal.source
    entries = source.get("sources") if isinstance(source, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _unknown(f"{directory}: its seals hold no positions in sources: another program has written the stream")
    kinds = {str(entry.get("path")): entry.get("kind") for entry in entries}
    if place.path in kinds:
        name = place.path
    else:
        same = [path for path in kinds if os.path.realpath(path) == os.path.realpath(place.path)]
        same = same or [path for path in kinds if os.path.basename(path) == os.path.basename(place.path)]
        if len(same) != 1:
            some = ", ".join(list(kinds)[:5]) + (", ..." if len(kinds) > 5 else "")
            raise _unknown(f"{place.path}: none of the stream's sources, which are: {some}")
        name = same[0]
    if kinds[name] not in OF_LINES | {None}:
        raise _unknown(f"{name}: a source of kind {kinds[name]}, which has no bytes and lines to be found by")
    return name


def source_mark(seal: Seal, name: str) -> Mark:
    """Returns how far a seal says that a source of lines was read; 0 where it was not begun."""
    source: Any = seal.source if isinstance(seal.source, dict) else {}
    entries = source.get("sources")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("path") == name and entry.get("kind") is not None:
            offset: Any = entry.get("offset")
            line: Any = entry.get("line")
            if not (is_count(offset, MAX_SAMPLES) and is_count(line, MAX_SAMPLES)):
                raise _unknown(f"{name}: the seal of chunk {seal.chunk} does not say how far it was read")
            return Mark(offset, line, bool(source.get("skip")))
    # Not begun, or not given yet.
    return Mark(0, 0, bool(source.get("skip")))


def _line(name: str, place: SourcePlace, begin: Mark) -> list[bytes]:
    """Returns what the row may be that is made of the line at a place: as it is, or without white space around it.

    Raises:
        OSError: the file cannot be read.
        ValueError: its lines are not to be had; the message says why.
        StateMismatch: the line is blank.
    """
    path = place.path if os.path.exists(place.path) else name
    # The name is what a seal says: it may be that of anything, and nothing is shown of what is in it.
    opened = open_given_file(Path(path))
    with os.fdopen(os.dup(opened.fd), "rb") as file:
        if file.read(4)[:2] == b"\x1f\x8b" or name.endswith((".zst", ".gz")):
            raise ValueError("the file is compressed; `--text` searches the published rows")
        if place.byte is not None:
            file.seek(_line_start(file, place.byte))
        else:
            assert place.line is not None
            file.seek(begin.offset)
            for _ in range(place.line - 1 - begin.line):
                if not file.readline(MAX_LINE_BYTES):
                    break
        line = file.readline(MAX_LINE_BYTES)
    if not line:
        raise ValueError("the file is shorter now")
    if not line.strip():
        raise _unknown(f"{place}: that line is blank, so no row is made of it")
    return line_forms(line)


def line_forms(line: bytes) -> list[bytes]:
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


def read_seal(directory: Path, chunk: int) -> Seal:
    """Returns the seal of a chunk. Raises SealInvalid or OSError where it cannot be used."""
    path = directory / seal_name(chunk)
    return Seal.decode(read_file(path), chunk, str(path))


def _unknown(what: str) -> StateMismatch:
    return StateMismatch(f"{what}; look for the row with --text, or give it by --sample or --chunk")
