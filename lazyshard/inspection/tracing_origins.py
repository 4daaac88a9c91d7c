"""From a row of a stream back to the line of a source file that it was made of, by positions and digests in the seals.

The seals of a chunk and of the one before it say which part of each source was read for it. Within that part, the line
of a row is found by its digest, where the file still holds it and rows are published as they are: `tracing_sources` the
other way round.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from lazyshard.errors import StateMismatch
from lazyshard.format import Seal
from lazyshard.inspection.tracing_sources import MAX_LINE_BYTES, OF_LINES, Mark, line_forms, read_seal, source_mark
from lazyshard.store.files import open_given_file

_PACKED: Final = (b"\x1f\x8b", b"\x28\xb5")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row may have come from.

    Attributes:
        path: the source, as its stream calls it.
        lines: from 1: those that the row equals; more than one where lines are alike. Empty where none was found.
        among: the half-open range of lines that its chunk was made of; None for sources that have no lines.
        why: why its line is not told; None where it is.
    """

    path: str
    lines: tuple[int, ...] = ()
    among: tuple[int, int] | None = None
    why: str | None = None

    def __str__(self) -> str:
        """Returns it in words.

        >>> str(Origin("b.jsonl", (41,), (41, 49))), str(Origin("b.jsonl", (), (41, 49), "the file has changed"))
        ('b.jsonl:41', 'b.jsonl, lines 41 to 48 (the file has changed)')
        """
        if self.lines:
            return " or ".join(f"{self.path}:{line}" for line in self.lines)
        if self.among is None:
            return f"{self.path} ({self.why})"
        first, last = self.among[0], self.among[1] - 1
        return f"{self.path}, {f'line {first}' if first == last else f'lines {first} to {last}'} ({self.why})"


class Origins:
    """Tells where rows came from, chunk by chunk.

    Args:
        directory: the stream's directory, of a stream of ours.
        chunks: those that are there: from what is deleted to what is published.
    """

    def __init__(self, directory: Path, chunks: range) -> None:
        self._directory = directory
        self._chunks = chunks
        # Of the chunk that was asked for last: rows that are asked for one after another are mostly of one.
        self._chunk = -1
        self._seal: Seal | None = None
        self._read: list[tuple[Origin, dict[int, list[int]]]] = []

    def of(self, chunk: int, row: int) -> tuple[Origin, ...]:
        """Returns where a row may have come from: one source where its line was found, or else all that may be.

        Empty where that is not known: the chunk is deleted, or the one before it, whose seal tells from where on its
        sources were read; or the chunk ends within a block of which the rest is not published yet.

        Raises:
            StateMismatch: the seal does not tell of any source.
            SealInvalid, OSError: a seal cannot be used.
        """
        if chunk not in self._chunks or max(0, chunk - 1) not in self._chunks:
            return ()
        if self._seal is None or chunk != self._chunk:
            self._seal = self._look(chunk)
            self._chunk = chunk
        digest = int(self._seal.digests[row])
        found = [
            Origin(origin.path, tuple(lines[digest]), origin.among) for origin, lines in self._read if digest in lines
        ]
        return tuple(found) or tuple(origin for origin, _ in self._read)

    def _look(self, chunk: int) -> Seal:
        seal = read_seal(self._directory, chunk)
        begin = read_seal(self._directory, chunk - 1) if chunk else None
        end = self._end(seal)
        known = _entries(begin)
        self._read = []
        for name, entry in _entries(end).items():
            if end is None or entry == known.get(name) or entry.get("kind") is None:
                continue
            if entry["kind"] in OF_LINES:
                first = Mark(0, 0, False) if begin is None else source_mark(begin, name)
                self._read.append(_look_into(name, first, source_mark(end, name)))
            else:
                self._read.append((Origin(name, why=f"a source of kind {entry['kind']} has no lines"), {}))
        if not _entries(seal):
            raise StateMismatch(
                f"{self._directory}: the seal of chunk {chunk} does not say which sources it was read from; leave out "
                f"--origins"
            )
        return seal

    def _end(self, seal: Seal) -> Seal | None:
        """Returns the seal that tells how far sources were read for a chunk, None if it is not there yet.

        It is the chunk's own, or where that ends within a block that is shuffled or packed, the next that is past the
        block: a seal tells of whole blocks.
        """
        if not _counted(seal, "skip"):
            return seal
        read = _counted(seal, "rows")
        at = self._chunks.start + bisect_right(
            self._chunks, read, key=lambda chunk: _counted(read_seal(self._directory, chunk), "rows")
        )
        return read_seal(self._directory, at) if at in self._chunks else None


def _counted(seal: Seal, name: str) -> int:
    value = seal.source.get(name) if isinstance(seal.source, dict) else None
    return value if isinstance(value, int) else 0


def _entries(seal: Seal | None) -> dict[str, dict[str, Any]]:
    """Returns what a seal says of each source, by name."""
    source = None if seal is None else seal.source
    entries = source.get("sources") if isinstance(source, dict) else None
    if not isinstance(entries, list):
        return {}
    return {str(entry["path"]): entry for entry in entries if isinstance(entry, dict) and "path" in entry}


def _look_into(name: str, begin: Mark, end: Mark) -> tuple[Origin, dict[int, list[int]]]:
    """Reads a part of a source; returns the numbers of its lines by digest, and what is to be said of other rows."""
    among = (begin.line + 1, max(begin.line + 1, end.line) + 1)
    lines: dict[int, list[int]] = {}
    try:
        for number, line in _read_lines(Path(name), begin, end):
            for form in set(line_forms(line)):
                lines.setdefault(xxhash.xxh3_64_intdigest(form), []).append(number)
    except OSError as error:
        return Origin(name, (), among, f"the file cannot be read: {error.strerror or error}"), {}
    except ValueError as error:
        return Origin(name, (), among, str(error)), {}
    return Origin(name, (), among, "no line there equals the row"), lines


def _read_lines(path: Path, begin: Mark, end: Mark) -> Iterator[tuple[int, bytes]]:
    # The name is what a seal says: it may be that of anything, and nothing is shown of what is in it.
    opened = open_given_file(path)
    with os.fdopen(os.dup(opened.fd), "rb") as file:
        if file.read(2) in _PACKED:
            raise ValueError("the file is compressed")
        file.seek(begin.offset)
        number = begin.line
        while file.tell() < end.offset and (line := file.readline(MAX_LINE_BYTES)):
            number += 1
            yield number, line
