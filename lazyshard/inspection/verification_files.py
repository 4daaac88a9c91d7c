"""What a verification finds in the files of the stream itself and in the names of its chunks.

The order of looks keeps a running producer from being taken for a fault: the cursors come before the head, the head
before the end, the end before the names, so that each later look shows at least what an earlier one speaks of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

from lazyshard import errors
from lazyshard.errors import LazyShardError
from lazyshard.format.cursor import CURSOR_SUFFIX, READING_SUFFIX, Cursor, ReadingHint, check_consumer
from lazyshard.format.names import (
    CURSORS,
    END,
    HEAD,
    MANIFEST,
    OWNER,
    RETIRED,
    SEAL_SUFFIX,
    TEMPORARY,
    arrays_name,
    chunk_name,
    parse_arrays_name,
    parse_chunk_name,
    seal_name,
)
from lazyshard.format.records import End, Head, Manifest, Owner, Retired
from lazyshard.inspection.outlook import producer_state
from lazyshard.store.files import check_folder, is_there, list_names, read_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.retention import read_retired

# damage: what is published is not as it was published; unchecked: this process could not look; leftover: what a crash
# leaves behind, and a producer's next start puts right
Severity = Literal["damage", "unchecked", "leftover"]

RESTORE: Final = "restore the file from a copy"
_BATCH_ROWS: Final = 4096  # Looked at before a word is said: at 2 KB a row 8 MB, a few hundredths of a second
_BATCH_CHUNKS: Final = 64
LAGGING: Final = 64  # Newest chunks that are looked for by name even if not listed: on network filesystems it lags
_RESTORE_ALL: Final = "restore the files from a copy"
_REMOVED: Final = "nothing to do: the producer's next start removes it"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file: as a whole, or of a field, or of `rows` rows of which the first begins at a byte of the file.

    `kind` is a word for programs; `docs/checking.md` lists them.
    """

    kind: str
    file: str
    expected: str
    found: str
    remedy: str = RESTORE
    chunk: int | None = None
    severity: Severity = "damage"
    field: str | None = None
    row: int | None = None
    byte: int | None = None
    rows: int = 0

    def __str__(self) -> str:
        where = self.file
        if self.row is not None:
            more = f" and {self.rows - 1:,} more" if self.rows > 1 else ""
            where += f": row {self.row} (byte {self.byte}){more}"
        elif self.field is not None:
            where += f": field {self.field!r}"
        return f"{where}: expected {self.expected}, found {self.found}; {self.remedy}"


leftover: Final = partial(Fault, severity="leftover")


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """Names of the files of a chunk that is to be looked at; of a foreign one no seal, as its marker says nothing."""

    chunk: int
    data: str
    seal: str | None
    arrays: str | None = None


def file_fault(file: str, error: LazyShardError | OSError, chunk: int | None = None) -> Fault:
    """Returns the fault of a file that cannot be opened, read or used as a whole."""
    expected, found = str(getattr(error, "expected", None)), str(getattr(error, "actual", None))
    if isinstance(error, errors.VersionUnsupported):
        way = "install a newer lazyshard"
        return Fault("version", file, f"stream format {expected}", f"format {found}", way, chunk)
    if isinstance(error, errors.FormatInvalid):
        return Fault("invalid", file, expected, found, chunk=chunk, field=error.field)
    if isinstance(error, errors.ChunkCorrupt):
        return Fault("size", file, expected, found, chunk=chunk)
    if isinstance(error, errors.FileRefused):
        return Fault("not-a-file", file, "a plain file", str(error.kind), chunk=chunk)
    found, mend = getattr(error, "strerror", None) or str(error), "mend the filesystem"
    if isinstance(error, errors.AccessRefused) and error.uid is not None:
        found, mend = f"that uid {error.uid} may not read it", "check the permissions"
    way = f"{mend}, and run the same command again"
    return Fault("unreadable", file, "a readable file", found, way, chunk, "unchecked")


@dataclass(slots=True)
class StreamFiles:
    """What the files of a stream say, but for those of its chunks; None where one is missing or cannot be used.

    `native`: a producer of ours fills the directory; `ended`: there is a `stream.end`, whatever it says; `running`: the
    producer is at work. Chunks have their files by number; those of [first, stop) are to be there, those before it are
    retired. Where a producer is at work, what lies outside may be in its hands.
    """

    directory: Path
    native: bool
    manifest: Manifest | None = None
    head: Head | None = None
    end: End | None = None
    retired: Retired | None = None
    ended: bool = False
    running: bool = False
    first: int = 0
    stop: int = 0
    cursors: list[tuple[str, Cursor]] = field(default_factory=list)
    readings: list[tuple[str, ReadingHint]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    data: dict[int, str] = field(default_factory=dict)
    seals: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, str] = field(default_factory=dict)
    findings: list[Fault] = field(default_factory=list)

    @property
    def stream_id(self) -> str | None:
        """Its identity."""
        return None if self.manifest is None else self.manifest.stream_id

    @property
    def has_arrays(self) -> bool:
        """Whether each chunk has a side file."""
        return self.manifest is not None and self.manifest.arrays

    def told(self, file: str) -> bool:
        """Whether there is a finding that a file cannot be used."""
        return any(found.file == file for found in self.findings)

    def retired_now(self) -> int:
        """Returns how many chunks are retired by now."""
        if self.manifest is not None:
            with contextlib.suppress(LazyShardError, OSError):
                return max(self.first, read_retired(self.directory, self.manifest.stream_id))
        return self.first


def read_files(directory: Path, now: float) -> StreamFiles:
    """Reads what the files say and lists the chunks; `now` in seconds since 1970, by this machine's clock.

    Raises VersionUnsupported if the stream is of a later format, OSError if the directory cannot be listed.
    """
    files = StreamFiles(directory, native=any(is_there(directory / name) for name in (MANIFEST, HEAD)))
    _read_consumers(files)
    if files.native:
        files.manifest = _read(files, MANIFEST, Manifest.decode)
        files.head = head = _read(files, HEAD, Head.decode)
        if head is not None:
            state = producer_state(head, now - head.updated_at, process_gone(head) is True, process_ended(head))
            files.running = state in ("running", "waiting")
        files.end = _read(files, END, End.decode)
        files.retired = _read(files, RETIRED, Retired.decode)
        _read(files, OWNER, Owner.decode)
    try:
        files.names = list_names(directory)
    except FileNotFoundError:
        # A store has no empty folders: there is nothing under this URL.
        if not isinstance(directory, UrlPath):
            raise
    files.ended = END in files.names or files.end is not None
    for name in _listed(files, TEMPORARY) if TEMPORARY in files.names else ():
        if files.native and not files.running:
            found = "what a producer was writing"
            files.findings.append(leftover("temporary", f"{TEMPORARY}/{name}", "nothing", found, _REMOVED))
    sort_names(files)
    _find_extent(files)
    return files


def _read_consumers(files: StreamFiles) -> None:
    for name in _listed(files, CURSORS):
        # The name of a reading hint would be that of a cursor as well.
        is_hint, file = name.endswith(READING_SUFFIX), f"{CURSORS}/{name}"
        consumer = name.removesuffix(READING_SUFFIX if is_hint else CURSOR_SUFFIX)
        try:
            check_consumer(consumer)
        except ValueError:
            continue
        if is_hint:
            if (hint := _read(files, file, ReadingHint.decode, consumer)) is not None:
                files.readings.append((file, hint))
        elif consumer != name and (cursor := _read(files, file, Cursor.decode, consumer)) is not None:
            files.cursors.append((file, cursor))


def _read(files: StreamFiles, name: str, decode: Callable[..., _T], *consumer: str) -> _T | None:
    """Returns what a file says, None where it is missing or cannot be used, which is a finding."""
    try:
        return decode(read_file(files.directory / name), *consumer, name)
    except FileNotFoundError:
        return None
    except (LazyShardError, OSError) as error:
        if name == MANIFEST and isinstance(error, errors.VersionUnsupported):
            # Nothing in the directory may mean what it seems to mean.
            error.file = str(files.directory / name)
            error.args = (f"{files.directory}{os.sep}{error}",)
            raise
        found = file_fault(name, error)
        # These harm nobody: a power cut may leave them empty. Of what is no file at all readers refuse the head too,
        # and the producer may be unable to replace it.
        if found.kind == "invalid" and (name in (HEAD, OWNER) or name.endswith(READING_SUFFIX)):
            who = "its run writes it anew as it reads on"
            who = who if name.endswith(READING_SUFFIX) else "the producer's next start writes it anew"
            found = replace(found, severity="leftover", remedy=f"nothing to do: {who}")
        files.findings.append(found)
        return None


def _listed(files: StreamFiles, folder: str) -> list[str]:
    try:
        return sorted(list_names(check_folder(files.directory / folder)))
    except FileNotFoundError:
        return []
    except OSError as error:
        found = file_fault(folder, error)
        if isinstance(error, NotADirectoryError):
            found = replace(found, severity="damage", expected="a directory", found="something else")
        files.findings.append(found)
    return []


def sort_names(files: StreamFiles) -> None:
    """Finds the chunk files among the names of a directory, and those that a chunk cannot have.

    Of a native stream only the names that a producer of ours gives are names of chunks.
    """
    every: dict[tuple[int, bool], list[str]] = {}
    for name in files.names:
        if (parsed := parse_chunk_name(name)) is not None:
            every.setdefault(parsed, []).append(name)
        elif files.has_arrays and (number := parse_arrays_name(name)) is not None:
            files.arrays[number] = name
    for (chunk, is_seal), names in every.items():
        right = seal_name(chunk) if is_seal else chunk_name(chunk)
        best = right if right in names else min(names)
        (files.seals if is_seal else files.data)[chunk] = best
        if len(names) > 1:
            also = f"also {', '.join(sorted({*names} - {best}))}"
            remedy = "keep the right one and move the other out of the directory"
            files.findings.append(Fault("doubled", best, f"one file for chunk {chunk}", also, remedy, chunk))
        elif files.native and best != right:
            padding, remedy = "another padding, under which readers do not look", f"rename it: `mv {best} {right}`"
            files.findings.append(Fault("misnamed", best, f"the name {right}", padding, remedy, chunk))


def _find_extent(files: StreamFiles) -> None:
    """Finds which chunks are to be there.

    What a running producer has published after the look at its head does not count. Of one that does not run every seal
    counts: it may have been killed before it could replace its head.
    """
    files.stop = max(files.seals, default=-1) + 1
    if not files.native:
        return
    mark = files.retired
    if files.told(RETIRED):
        # What is retired is not known; that the mark cannot be used is told.
        files.first = min(files.seals, default=0)
    elif mark is not None and files.stream_id in (None, mark.stream_id):
        files.first = mark.chunks_before
    if files.end is not None:
        files.stop = files.end.chunks
    elif files.head is not None:
        files.stop = files.head.chunks if files.running else max(files.stop, files.head.chunks)
    files.stop = max(files.first, files.stop)


def chunks_to_check(files: StreamFiles) -> list[ChunkFiles]:
    """Returns what is to be looked at: every chunk of which there is a file, in order."""
    data, seals = files.data, files.seals
    if not files.native:
        sealed = sorted(seals.items())
        return [ChunkFiles(chunk, data.get(chunk) or name.removesuffix(SEAL_SUFFIX), None) for chunk, name in sealed]
    newest = range(max(files.first, files.stop - LAGGING), files.stop)
    return [
        ChunkFiles(
            chunk,
            data.get(chunk) or chunk_name(chunk),
            seals.get(chunk) or seal_name(chunk),
            arrays_name(chunk) if files.has_arrays else None,
        )
        for chunk in sorted({*data, *seals, *newest})
        if files.first <= chunk < files.stop
    ]


def cut_batches(chunks: list[ChunkFiles], per_chunk: int | None, *, quick: bool) -> list[list[ChunkFiles]]:
    """Returns the chunks in batches, which one process looks at and tells of together."""
    size = _BATCH_CHUNKS if quick else max(1, min(_BATCH_CHUNKS, _BATCH_ROWS // (per_chunk or _BATCH_ROWS)))
    return [chunks[at : at + size] for at in range(0, len(chunks), size)]


def missing_chunks(files: StreamFiles, first: int, missing: dict[int, str], there: Set[int]) -> Iterator[Fault]:
    """Yields a finding for each chunk that lacks a file, and one for a whole run of chunks that are not there at all.

    Those below `first` are retired by now. When they were opened, a file of this name was `missing` of a chunk, and the
    chunks `there` were found, whether they were listed or not.
    """
    if not files.native:
        # Opening cannot tell: what a marker says is never looked at.
        unmarked = (chunk for chunk in files.data if chunk < files.stop and chunk not in files.seals)
        missing = missing | {chunk: files.data[chunk] + SEAL_SUFFIX for chunk in unmarked}
    listed = files.data.keys() | files.seals.keys()
    for chunk, name in missing.items():
        if chunk >= first and chunk in listed:
            yield _incomplete(files, chunk, name)
    seal = "seal" if files.native else "marker"
    for chunk in [*sorted(chunk for chunk in listed | there if first <= chunk < files.stop), files.stop]:
        if chunk == first + 1:
            yield Fault("missing", chunk_name(first), f"the chunk and its {seal}", "neither", _RESTORE_ALL, first)
        elif chunk > first:
            expected = f"the chunks {first} to {chunk - 1} and their {seal}s"
            yield Fault("missing", chunk_name(first), expected, f"none of these {chunk - first:,}", _RESTORE_ALL, first)
        first = chunk + 1


def _incomplete(files: StreamFiles, chunk: int, absent: str) -> Fault:
    what, remedy = "a seal" if files.native else "a marker", RESTORE
    if absent.endswith(SEAL_SUFFIX):
        if not files.native:
            remedy = f"if {files.data.get(chunk, chunk_name(chunk))} is complete, make it: `touch {absent}`"
        found = "no such file although the chunk counts as published"
        return Fault("seal-missing", absent, what, found, remedy, chunk)
    kind, of = ("data", "") if parse_arrays_name(absent) is None else ("arrays", "arrays of the ")
    found = f"no such file although {what} is there"
    return Fault(f"{kind}-missing", absent, f"the {of}rows of the chunk", found, remedy, chunk)


def leftovers(files: StreamFiles) -> Iterator[Fault]:
    """Yields a finding for each chunk file outside of what is published."""
    if files.running:
        return
    for chunk, name in (*files.seals.items(), *files.data.items(), *files.arrays.items()):
        if chunk < files.first:
            expected = f"no chunk below {files.first}, which {RETIRED} says are deleted"
            yield leftover("retired", name, expected, "the file", _REMOVED, chunk)
        elif chunk >= files.stop and name.endswith(SEAL_SUFFIX):
            expected = f"no chunk from {files.stop} on, as {END} says"
            remedy = f"restore {END} from a copy, or remove the file with its data if it is not of this stream"
            yield Fault("beyond-end", name, expected, "a seal", remedy, chunk)
        elif chunk >= files.stop and chunk not in files.seals:
            expected, found, remedy = "a seal beside it", "none, so it was never published", _REMOVED
            if not files.native:
                expected = "a marker beside it"
                remedy = f"if it is complete, mark it: `touch {name}{SEAL_SUFFIX}`; otherwise its producer is to do so"
            if files.native or not files.ended:
                yield leftover("unpublished", name, expected, found, remedy, chunk)
            else:
                # Of a foreign stream the end does not count as long as there is such a file.
                remedy += ". Until then readers do not take the stream for ended"
                yield Fault("unpublished", name, expected, found, remedy, chunk)
