"""The rows of data files that are to be adopted: read, checked, and compared with a seal that is there already.

Nothing is changed. Memory: 16 bytes a row of one chunk.
"""

from __future__ import annotations

import shlex
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import xxhash

from lazyshard.conversion.adoption_names import read_seal, refuse
from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.format import Seal, check_row
from lazyshard.format.manifest import MAX_SAMPLES_PER_CHUNK
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store.files import OpenFile, open_file
from lazyshard.stream.listing import Listing

MAX_ROW_BYTES: Final = 64 << 20
"""Longest row; far above any text sample. It bounds the memory that a file without line ends can take."""

_BOM: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\n"

Phase = Literal["checking", "sealing"]
Report = Callable[[Phase, int, int], None]
"""Called with the phase, how many chunks of it are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class CheckedChunk:
    """A chunk that can be sealed.

    Attributes:
        rows: how many it holds.
        size: bytes in its data file.
        fingerprint: XXH3 of its row starts and row digests.
        sealed: it has a seal, which says the same.
    """

    rows: int
    size: int
    fingerprint: int
    sealed: bool


class Rows:
    """Where the rows of a data file start, and their digests."""

    def __init__(self) -> None:
        self.offsets = array("Q", [0])
        self.digests = array("Q")

    def append(self, line: bytes) -> None:
        """Adds a row, its newline included."""
        self.offsets.append(self.offsets[-1] + len(line))
        self.digests.append(xxhash.xxh3_64_intdigest(line))

    def fingerprint(self) -> int:
        """Returns a number that differs where a row or its place does."""
        hasher = xxhash.xxh3_64(self.offsets.tobytes())
        hasher.update(self.digests.tobytes())
        return hasher.intdigest()

    def seal(self, chunk: int, now: float) -> Seal:
        """Returns the seal that says so."""
        return Seal(
            chunk=chunk,
            offsets=np.asarray(self.offsets, dtype=np.uint64),
            digests=np.asarray(self.digests, dtype=np.uint64),
            sealed_at=now,
        )


def check_rows(directory: Path, listing: Listing, samples_per_chunk: int | None, report: Report) -> list[CheckedChunk]:
    """Reads all chunks; each must hold rows, as many as the others, and be as in the seal that it may have.

    Args:
        directory: the directory.
        listing: its chunks and markers; the chunks are numbered from 0 on.
        samples_per_chunk: rows in every chunk but the last; None for those of chunk 0.
        report: is told how far it is.

    Raises:
        RowInvalid: a line cannot be a row of a stream.
        StreamInvalid: a chunk holds no rows, too many or too few.
        ChunkCorrupt, SealInvalid: a seal says otherwise.
    """
    checked: list[CheckedChunk] = []
    chunks = len(listing.data)
    report("checking", 0, chunks)
    for chunk in range(chunks):
        path = directory / chunk_name(chunk)
        found = _scan_checked(open_file(path), samples_per_chunk)
        rows = len(found.digests)
        if rows == 0:
            way = "remove it and its marker" if chunk == chunks - 1 > 0 else _rewrite(directory, samples_per_chunk)
            raise refuse(directory, f"{path}: holds no rows; {way}", chunk)
        if samples_per_chunk is None:
            samples_per_chunk = rows
        if rows > min(samples_per_chunk, MAX_SAMPLES_PER_CHUNK) or (rows < samples_per_chunk and chunk < chunks - 1):
            exactly = "at most" if chunk == chunks - 1 else "exactly"
            raise refuse(
                directory,
                f"{path}: expected {exactly} {min(samples_per_chunk, MAX_SAMPLES_PER_CHUNK)} rows, found {rows}; every "
                f"chunk of a stream holds the same number, only the last one may hold fewer. "
                f"{_rewrite(directory, samples_per_chunk)}",
                chunk,
            )
        fingerprint = found.fingerprint()
        seal = read_seal(directory, chunk) if chunk in listing.seals else None
        if seal is not None:
            _check_seal(path, chunk, seal, found)
        checked.append(CheckedChunk(rows, found.offsets[-1], fingerprint, seal is not None))
        report("checking", chunk + 1, chunks)
    return checked


def check_last(directory: Path, chunks: list[CheckedChunk], samples_per_chunk: int, end: bool) -> None:
    """Refuses a last chunk that no other can follow although the stream is to stay open."""
    rows = chunks[-1].rows
    if not end and rows < samples_per_chunk:
        raise refuse(
            directory,
            f"{directory / chunk_name(len(chunks) - 1)}: holds {rows} rows of {samples_per_chunk}, so no chunk can "
            f"follow it; end the stream here (leave out --no-end), or move the file out of the directory and give its "
            f"rows to the writer that goes on",
            len(chunks) - 1,
        )


def read_again(file: OpenFile, chunk: int, checked: CheckedChunk) -> Rows:
    """Returns the rows of a data file, which must be those that were checked.

    Raises:
        StreamInvalid: they are others.
    """
    found = Rows()
    for line in _lines(file):
        found.append(line)
    if (found.offsets[-1], found.fingerprint()) != (checked.size, checked.fingerprint):
        raise refuse(
            file.path.parent,
            f"{file.path}: was changed while the directory was being adopted; stop the program that writes to it, and "
            f"run the same command again",
            chunk,
        )
    return found


def _check_seal(path: Path, chunk: int, seal: Seal, found: Rows) -> None:
    actual = found.seal(chunk, 0.0)
    if np.array_equal(seal.offsets, actual.offsets) and np.array_equal(seal.digests, actual.digests):
        return
    same = min(seal.samples, actual.samples)
    differ = (seal.offsets[1 : same + 1] != actual.offsets[1 : same + 1]) | (
        seal.digests[:same] != actual.digests[:same]
    )
    row = int(np.argmax(differ)) if differ.any() else same
    expected, held = (f"{one.samples} rows in {one.size} bytes" for one in (seal, actual))
    raise ChunkCorrupt(
        f"{path}: row {row}: not as in the chunk's seal, which says {expected}; found {held}. The file was changed "
        f"after it was sealed: restore it from a copy, or remove {seal_name(chunk)} to seal it as it is now",
        file=str(path),
        chunk=chunk,
        row=row,
        expected=expected,
        actual=held,
    )


def _scan_checked(file: OpenFile, samples_per_chunk: int | None) -> Rows:
    """Returns the rows of a data file if each is one.

    Raises:
        RowInvalid: a line is not the bytes of a row and a newline.
    """
    found = Rows()
    for line in _lines(file):
        _check_line(file.path, line, found, samples_per_chunk)
        found.append(line)
    return found


def _lines(file: OpenFile) -> Iterator[bytes]:
    """Yields the lines of a file, their newlines included; of one that is too long, no more than shows that it is."""
    with open(file.fd, "rb", buffering=1 << 20, closefd=False) as handle:
        while line := handle.readline(MAX_ROW_BYTES + 1):
            yield line


def _check_line(path: Path, line: bytes, before: Rows, samples_per_chunk: int | None) -> None:
    fault = _fault(line, first=not before.digests)
    if fault is None:
        return
    reason, byte, way = fault
    number = len(before.digests) + 1
    byte += before.offsets[-1]
    raise RowInvalid(
        f"{path}: line {number} (byte {byte}): {reason}; {way or _rewrite(path.parent, samples_per_chunk)}",
        reason=reason,
        file=str(path),
        line=number,
        byte=byte,
    )


def _fault(line: bytes, first: bool) -> tuple[str, int, str] | None:
    """Returns what is wrong with a line, at which byte of it, and what to do (nothing: writing the rows anew helps)."""
    if len(line) > MAX_ROW_BYTES:
        return f"longer than {MAX_ROW_BYTES} bytes, which the producer takes with --max-row-bytes", 0, ""
    if first and line.startswith(_BOM):
        return "a byte order mark before the first row", 0, ""
    if line.endswith(b"\r\n"):
        return "a carriage return before the newline", len(line) - 2, ""
    if not line.strip(_BLANKS):
        return "a blank line", 0, ""
    ended = line.endswith(b"\n")
    try:
        check_row(line)
    except RowInvalid as cause:
        unfinished = "" if ended else "the file ends in this line, is it still being written? "
        return cause.reason or str(cause), cause.byte or 0, f"{unfinished}mend the line, and run the same command again"
    return None if ended else ("no newline after the last row", len(line), "")


def _rewrite(directory: Path, samples_per_chunk: int | None) -> str:
    """Returns the way out where files cannot be taken as they are."""
    sources = f"{shlex.quote(str(directory))}/chunk_*.jsonl"
    return (
        f"`lazyshard-producer run --source {sources} --out NEW --samples-per-chunk {samples_per_chunk or 'N'}` "
        f"writes the rows into a new stream"
    )
