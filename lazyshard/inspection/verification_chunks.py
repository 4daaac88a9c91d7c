"""What a verification finds in one chunk: its data against its seal, row by row.

Memory: offsets and digests of one chunk, 16 bytes a row, and a block of rows. Nothing is raised for what is wrong with
the chunk: it is returned, so that the chunks after it are looked at too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lazyshard.errors import (
    ChunkCorrupt,
    FileRefused,
    FileUnreadable,
    FormatInvalid,
    LazyShardError,
    RowInvalid,
    VersionUnsupported,
)
from lazyshard.format import FORMAT, Seal, check_lines, check_row, parse_row, seal_digest
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.fields import FORMAT_WITH_ARRAYS
from lazyshard.format.names import MANIFEST, tokens_name
from lazyshard.format.row import parse_lines
from lazyshard.inspection.verification_findings import RESTORE, Finding, Severity
from lazyshard.inspection.verification_names import foreign_tokens
from lazyshard.store.files import is_there, open_file, open_unread, read_file
from lazyshard.stream.chunk import Chunk, open_copy, open_foreign
from lazyshard.stream.chunk_files import ChunkArrays
from lazyshard.stream.token_lengths import measured_tokens

BLOCK_BYTES: Final = 1 << 20
"""Rows are read in pieces of about this size; more gains nothing."""

_SMALL_BLOCK_BYTES: Final = 4096

_MEND: Final = "restore the file from a copy, or have its producer make it anew: readers refuse this row"


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The files of a chunk that is to be looked at.

    Attributes:
        chunk: its number.
        data: name of its data file.
        seal: name of its seal, None for a chunk of a foreign directory, whose marker says nothing.
        arrays: name of its side file, None in a stream whose rows hold no arrays.
        tokens: whether there is a file of measured lengths.
    """

    chunk: int
    data: str
    seal: str | None
    arrays: str | None = None
    tokens: bool = False


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks that one process looks at, one after the other.

    Attributes:
        directory: the stream's directory.
        files: their files.
        quick: whether to leave their rows unread.
    """

    directory: Path
    files: tuple[ChunkFiles, ...]
    quick: bool


@dataclass(frozen=True, slots=True)
class ChunkVerdict:
    """What was found in a chunk.

    Attributes:
        chunk: its number.
        data: name of its data file.
        samples: rows, as its seal says (of a foreign chunk: as they were counted); None where nothing can tell.
        size: bytes of its data file, and of its side file if it has one, as its seal says; None where nothing can tell.
        findings: what is wrong with it.
        missing: name of a file that was not there, None if all were.
    """

    chunk: int
    data: str
    samples: int | None
    size: int | None
    findings: tuple[Finding, ...]
    missing: str | None = None


def check_batch(batch: ChunkBatch) -> list[ChunkVerdict]:
    """Looks at the chunks of a batch."""
    return [check_chunk(batch.directory, files, quick=batch.quick) for files in batch.files]


def check_chunk(directory: Path, files: ChunkFiles, *, quick: bool) -> ChunkVerdict:
    """Looks at a chunk.

    Args:
        directory: the stream's directory.
        files: the chunk's files.
        quick: whether to compare only the size of the data file with the seal. Of a foreign chunk the rows are counted
            in any case, since nothing else tells how many there are.
    """
    name = files.data
    samples = size = None
    beside: tuple[Finding, ...] = ()
    try:
        if files.seal is None:
            chunk = open_foreign(directory / name, files.chunk)
        else:
            name = files.seal
            data = read_file(directory / name)
            seal = Seal.decode(data, files.chunk, name)
            if (seal.arrays is None) is not (files.arrays is None):
                return _of_another_format(files, seal)
            if files.tokens:
                beside = _bad_tokens(directory, files.chunk, data, seal)
            name = files.data
            samples, size = seal.samples, seal.size
            how = open_unread if quick else open_file
            rows, side = how(directory / name), None
            if seal.arrays is not None and files.arrays is not None:
                name, size = files.arrays, size + seal.arrays.size
                side = how(directory / name)
                ChunkArrays(side, files.chunk, seal.arrays)
                name = files.data
            chunk = open_copy(rows, seal, side)
        if files.seal is None:
            samples, size = len(chunk), chunk.offset(len(chunk))
        faults = () if quick else _bad_rows(files, chunk)
    except FileNotFoundError:
        return ChunkVerdict(files.chunk, files.data, samples, size, (), name)
    except (LazyShardError, OSError) as error:
        faults = (file_finding(name, error, files.chunk),)
    return ChunkVerdict(files.chunk, files.data, samples, size, faults + beside)


def _bad_tokens(directory: Path, chunk: int, data: bytes, seal: Seal) -> tuple[Finding, ...]:
    """Returns what is wrong with the file of measured lengths beside a seal, whose bytes are given."""
    name, digest = tokens_name(chunk), seal_digest(data)
    try:
        if measured_tokens(directory, chunk, digest, seal.samples) is None and is_there(directory / name):
            return (foreign_tokens(chunk, f"lengths for the seal {digest}", "those for another seal"),)
    except (LazyShardError, OSError) as error:
        found = file_finding(name, error, chunk)
        if found.severity == "damage" and not isinstance(error, VersionUnsupported):
            found = replace(found, remedy="remove the file, or have `lazyshard measure` make it anew")
        return (found,)
    return ()


def _of_another_format(files: ChunkFiles, seal: Seal) -> ChunkVerdict:
    assert files.seal is not None
    expected, found = (FORMAT_WITH_ARRAYS, FORMAT) if seal.arrays is None else (FORMAT, FORMAT_WITH_ARRAYS)
    fault = Finding(
        severity="damage",
        kind="invalid",
        file=files.seal,
        expected=f"{expected}, as {MANIFEST} says",
        found=str(found),
        remedy=RESTORE,
        chunk=files.chunk,
        field="format",
    )
    return ChunkVerdict(files.chunk, files.data, seal.samples, seal.size, (fault,))


def _bad_rows(files: ChunkFiles, chunk: Chunk) -> tuple[Finding, ...]:
    """Returns the first bad row of each kind, and how many there are of it."""
    first: dict[str, Finding] = {}
    for row, error in _faults(chunk, sealed=files.seal is not None):
        found = _row_finding(files, error, row, chunk.offset(row))
        kind = f"{found.file} {found.kind}"
        before = first.get(kind, found)
        first[kind] = replace(before, rows=before.rows + 1)
    return tuple(first.values())


def _faults(chunk: Chunk, *, sealed: bool) -> Iterator[tuple[int, LazyShardError]]:
    """Yields each bad row with what is wrong with it.

    Raises:
        ChunkCorrupt: the file was cut while it was read.
        OSError: the filesystem failed.
    """
    row = 0
    budget = BLOCK_BYTES
    while row < len(chunk):
        try:
            lines = chunk.lines(row, len(chunk), 1, budget)
        except (ChunkCorrupt, RowInvalid) as error:
            if isinstance(error, ChunkCorrupt) and error.row is None:
                raise
            yield row, error
            row += 1
            # The whole block is read again for each bad row in it, so after one they are read singly for a while.
            budget = 0
            continue
        budget = min(BLOCK_BYTES, max(2 * budget, _SMALL_BLOCK_BYTES))
        # Without digests the reader has held the rows to the rules already.
        if sealed and not _are_rows(lines):
            for at, line in enumerate(lines, row):
                try:
                    _check_line(line)
                except RowInvalid as error:
                    yield at, error
        if chunk.arrays is not None:
            yield from _bad_arrays(chunk, lines, row)
        row += len(lines)


def _bad_arrays(chunk: Chunk, lines: list[bytes], first: int) -> Iterator[tuple[int, LazyShardError]]:
    """Yields each row whose arrays are not what was sealed, or are described wrongly. Raises as `_faults`."""
    assert chunk.arrays is not None
    for row, line in enumerate(lines, first):
        try:
            data = chunk.arrays.read(row)
            # Of what is no JSON object it was told before.
            if may_hold_arrays(line) and parse_lines([line]):
                fill_row(parse_row(line), data)
        except (ChunkCorrupt, RowInvalid) as error:
            if isinstance(error, ChunkCorrupt) and error.row is None:
                raise
            yield row, error


def _are_rows(lines: list[bytes]) -> bool:
    """Whether all lines are rows, which is found quickly; if not, each has to be looked at."""
    return all(line.endswith(b"\n") for line in lines) and check_lines(lines).refused is None


def _check_line(line: bytes) -> None:
    if not line.endswith(b"\n"):
        raise RowInvalid(reason="no newline at its end", byte=len(line))
    check_row(line)


def _row_finding(files: ChunkFiles, error: LazyShardError, row: int, start: int) -> Finding:
    file = files.data
    if isinstance(error, RowInvalid):
        # Of a sealed row it is told where in the row, of another one where in the file.
        byte = (error.byte or 0) + (start if error.file is None else 0)
        reason = str(error.reason).removeprefix("expected a JSON object, found ")
        kind, expected, found, remedy = "row", "a JSON object on a line", f"{reason} (byte {byte})", _MEND
    else:
        assert isinstance(error, ChunkCorrupt)
        kind, expected, found, remedy = "digest", str(error.expected), str(error.actual), RESTORE
        if files.arrays is not None and error.file is not None and error.file.endswith(files.arrays):
            file, start = files.arrays, error.byte or 0
    return Finding(
        severity="damage",
        kind=kind,
        file=file,
        expected=expected,
        found=found,
        remedy=remedy,
        chunk=files.chunk,
        row=row,
        byte=start,
    )


def file_finding(file: str, error: LazyShardError | OSError, chunk: int | None = None) -> Finding:
    """Returns the finding for a file that cannot be opened, read or used as a whole."""
    severity: Severity = "damage"
    remedy, field = RESTORE, None
    expected, found = getattr(error, "expected", None), getattr(error, "actual", None)
    if isinstance(error, VersionUnsupported):
        kind, remedy = "version", "install a newer lazyshard"
        expected, found = f"stream format {expected}", f"format {found}"
    elif isinstance(error, FormatInvalid):
        kind, field = "invalid", error.field
    elif isinstance(error, ChunkCorrupt):
        kind = "size"
    elif isinstance(error, FileRefused):
        kind, expected, found = "not-a-file", "a plain file", error.kind
    elif isinstance(error, FileUnreadable):
        severity, kind, remedy = "unchecked", "unreadable", "check the permissions, and run the same command again"
        expected, found = "a readable file", f"that uid {error.uid} may not read it"
    else:
        severity, kind, remedy = "unchecked", "unreadable", "mend the filesystem, and run the same command again"
        expected, found = "a readable file", getattr(error, "strerror", None) or str(error)
    return Finding(
        severity=severity,
        kind=kind,
        file=file,
        expected=str(expected),
        found=str(found),
        remedy=remedy,
        chunk=chunk,
        field=field,
    )
