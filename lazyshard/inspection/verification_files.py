"""The part of a verification that checks the files of the stream itself, its chunk names, and writers' positions.

The order of reads keeps a running producer from looking like a fault: the cursors come before the head, the head before
the end, the end before the names, so that each later read shows at least what an earlier one refers to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from lazyshard import errors
from lazyshard.format import records
from lazyshard.format.records import SEAL_SUFFIX, chunk_name, seal_name
from lazyshard.format.state import CURSOR_SUFFIX, READING_SUFFIX, Cursor, ReadingHint, check_consumer
from lazyshard.format.writers import Sequenced
from lazyshard.inspection.survey import producer_state
from lazyshard.store.files import UrlPath, check_folder, is_there, list_names, read_file
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.listing import read_retired

# damage: published data has changed since; unchecked: this process could not check it; leftover: left by a crash, and
# fixed by the producer's next start
Severity = Literal["damage", "unchecked", "leftover"]

RESTORE: Final = "restore the file from a copy"
LAGGING: Final = 64  # newest chunks to look up by name even if not listed: listings of network filesystems lag
_REMOVED: Final = "harmless: the producer's next start removes it, if the stream has not ended"

_T = TypeVar("_T")
Taken: TypeAlias = Mapping[str, tuple[int, int]]  # by writer: rows in the stream, and the last chunk with some


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file, a field, or `rows` rows, the first at a byte; `docs/checking.md` lists the kinds."""

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


class ChunkFiles(NamedTuple):
    """Names of the files of a chunk to check; no seal for a foreign chunk, as its marker is empty."""

    chunk: int
    data: str
    seal: str | None
    arrays: str | None = None


def file_fault(file: str, error: errors.LazyShardError | OSError, chunk: int | None = None) -> Fault:
    """Returns the fault of a file that cannot be opened, read or used as a whole."""
    expected, found = str(getattr(error, "expected", None)), str(getattr(error, "actual", None))
    if isinstance(error, errors.VersionUnsupported):
        return Fault("version", file, f"format {expected}", f"format {found}", "install a newer lazyshard", chunk)
    if isinstance(error, errors.ChunkCorrupt) and not file.endswith(SEAL_SUFFIX):
        return Fault("size", file, expected, found, chunk=chunk)
    if isinstance(error, errors.FormatInvalid):
        return Fault("invalid", file, expected, found, chunk=chunk, field=error.field)
    if isinstance(error, errors.FileRefused):
        return Fault("not-a-file", file, "a plain file", str(error.kind), chunk=chunk)
    found, fix = getattr(error, "strerror", None) or str(error), "fix the filesystem"
    if isinstance(error, errors.AccessRefused) and error.uid is not None:
        found, fix = f"that uid {error.uid} may not read it", "check the permissions"
    return Fault("unreadable", file, "a readable file", found, f"{fix}, and run this again", chunk, "unchecked")


@dataclass(slots=True)
class StreamFiles:
    """The content of a stream's files, except those of its chunks; None if one is missing or invalid.

    `native`: whether it is a native stream; `ended`: whether there is a `stream.end`, valid or not; `running`: whether
    its producer is running. Chunks have their files by number; the chunks [first, stop) must exist, those before are
    retired. A running producer may be working on other chunks.
    """

    directory: Path
    native: bool
    manifest: records.Manifest | None = None
    head: records.Head | None = None
    end: records.End | None = None
    retired: records.Retired | None = None
    ended: bool = False
    running: bool = False
    first: int = 0
    stop: int = 0
    cursors: list[tuple[str, Cursor | ReadingHint]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    data: dict[int, str] = field(default_factory=dict)
    seals: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, str] = field(default_factory=dict)
    findings: list[Fault] = field(default_factory=list)

    @property
    def stream_id(self) -> str | None:
        """The identity of the stream."""
        return None if self.manifest is None else self.manifest.stream_id

    def told(self, file: str) -> bool:
        """Returns whether there is a finding for a file."""
        return any(found.file == file for found in self.findings)

    def retired_now(self) -> int:
        """Returns how many chunks are retired by now."""
        if self.manifest is not None:
            with contextlib.suppress(errors.LazyShardError, OSError):
                return max(self.first, read_retired(self.directory, self.manifest.stream_id))
        return self.first


def read_files(directory: Path, now: float) -> StreamFiles:
    """Reads the files and lists the chunks; `now` is seconds since 1970. Raises VersionUnsupported, OSError."""
    files = StreamFiles(directory, native=any(is_there(directory / name) for name in (records.MANIFEST, records.HEAD)))
    for name in _listed(files, records.CURSORS):
        _read_consumer(files, name)
    if files.native:
        files.manifest = _read(files, records.MANIFEST, records.Manifest.decode)
        files.head = head = _read(files, records.HEAD, records.Head.decode)
        if head is not None:
            state = producer_state(head, now - head.updated_at, process_gone(head) is True, process_ended(head))
            files.running = state in ("running", "waiting")
        files.end = _read(files, records.END, records.End.decode)
        files.retired = _read(files, records.RETIRED, records.Retired.decode)
        _read(files, records.OWNER, records.Owner.decode)
    try:
        files.names = list_names(directory)
    except FileNotFoundError:
        # A store has no empty folders: there is nothing under this URL.
        if not isinstance(directory, UrlPath):
            raise
    files.ended = records.END in files.names or files.end is not None
    left = files.native and not files.running and records.TEMPORARY in files.names
    for path in [f"{records.TEMPORARY}/{name}" for name in (_listed(files, records.TEMPORARY) if left else ())]:
        files.findings.append(leftover("temporary", path, "nothing", "an unpublished file of a producer", _REMOVED))
    sort_names(files)
    # Chunks that a running producer has published since its head was read do not count. If it is not running, every
    # seal counts: it may have been killed before it could replace its head.
    files.stop, mark = max(files.seals, default=-1) + 1, files.retired
    if files.told(records.RETIRED):
        # The retired chunks are unknown; the invalid mark is a finding already.
        files.first = min(files.seals, default=0)
    elif mark is not None and files.stream_id in (None, mark.stream_id):
        files.first = mark.chunks_before
    if files.end is not None:
        files.stop = files.end.chunks
    elif files.head is not None:
        files.stop = files.head.chunks if files.running else max(files.stop, files.head.chunks)
    files.stop = max(files.first, files.stop)
    return files


def _read_consumer(files: StreamFiles, name: str) -> None:
    # The name of a reading hint would also be valid for a cursor.
    hint, file = name.endswith(READING_SUFFIX), f"{records.CURSORS}/{name}"
    consumer = name.removesuffix(READING_SUFFIX if hint else CURSOR_SUFFIX)
    with contextlib.suppress(ValueError):
        if check_consumer(consumer) != name:
            decode: Callable[..., Cursor | ReadingHint] = ReadingHint.decode if hint else Cursor.decode
            if (found := _read(files, file, decode, consumer)) is not None:
                files.cursors.append((file, found))


def _read(files: StreamFiles, name: str, decode: Callable[..., _T], *consumer: str) -> _T | None:
    """Returns the content of a file, None if it is missing or invalid, which is a finding."""
    try:
        return decode(read_file(files.directory / name), *consumer, name)
    except FileNotFoundError:
        return None
    except (errors.LazyShardError, OSError) as error:
        if name == records.MANIFEST and isinstance(error, errors.VersionUnsupported):
            # Nothing else in the directory can be interpreted reliably.
            error.file = str(files.directory / name)
            error.args = (f"{files.directory}{os.sep}{error}",)
            raise
        found, is_hint = file_fault(name, error), name.endswith(READING_SUFFIX)
        # These are harmless: a power cut may leave them empty. But readers refuse a head that is not a plain file, and
        # the producer may be unable to replace it.
        if found.kind == "invalid" and (name in (records.HEAD, records.OWNER) or is_hint):
            who = "its run writes it again as it reads on" if is_hint else "the producer's next start writes it again"
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
    """Sorts chunk files from the names, and reports invalid names; foreign chunks may have any padding."""
    every: dict[tuple[int, bool], list[str]] = {}
    has_arrays = files.manifest is not None and files.manifest.arrays
    for name in files.names:
        if (parsed := records.parse_chunk_name(name)) is not None:
            every.setdefault(parsed, []).append(name)
        elif has_arrays and (number := records.parse_arrays_name(name)) is not None:
            files.arrays[number] = name
    for (chunk, is_seal), same in every.items():
        right = seal_name(chunk) if is_seal else chunk_name(chunk)
        best = right if right in same else min(same)
        (files.seals if is_seal else files.data)[chunk] = best
        if len(same) > 1:
            also = f"also {', '.join(sorted({*same} - {best}))}"
            remedy = "keep the right one and move the other out of the directory"
            files.findings.append(Fault("doubled", best, f"one file for chunk {chunk}", also, remedy, chunk))
        elif files.native and best != right:
            padding, remedy = "another padding, which readers do not look for", f"rename it: `mv {best} {right}`"
            files.findings.append(Fault("misnamed", best, f"the name {right}", padding, remedy, chunk))


def chunks_to_check(files: StreamFiles) -> list[ChunkFiles]:
    """Returns the chunks to check: every chunk that has a file, in order."""
    data, seals = files.data, files.seals
    if not files.native:
        sealed = sorted(seals.items())
        return [ChunkFiles(chunk, data.get(chunk) or name.removesuffix(SEAL_SUFFIX), None) for chunk, name in sealed]
    newest = range(max(files.first, files.stop - LAGGING), files.stop)
    found, has_arrays = list[ChunkFiles](), files.manifest is not None and files.manifest.arrays
    for chunk in (chunk for chunk in sorted({*data, *seals, *newest}) if files.first <= chunk < files.stop):
        own = data.get(chunk) or chunk_name(chunk), seals.get(chunk) or seal_name(chunk)
        found.append(ChunkFiles(chunk, *own, records.arrays_name(chunk) if has_arrays else None))
    return found


def missing_chunks(files: StreamFiles, first: int, missing: dict[int, str | None]) -> Iterator[Fault]:
    """Yields a finding for each chunk that lacks a file, and one for each range of chunks without any file.

    Chunks below `first` are retired by now. `missing`: for chunks that were opened, the name of a missing file.
    """
    if not files.native:
        # Opening cannot detect this: markers are never read.
        unmarked = (chunk for chunk in files.data if chunk < files.stop and chunk not in files.seals)
        missing = {**missing, **{chunk: files.data[chunk] + SEAL_SUFFIX for chunk in unmarked}}
    listed, seal = files.data.keys() | files.seals.keys(), "seal" if files.native else "marker"
    for chunk, name in missing.items():
        if name is None or chunk < first or chunk not in listed:
            continue
        if name.endswith(SEAL_SUFFIX):
            make = f"if {files.data.get(chunk, chunk_name(chunk))} is complete, make it: `touch {name}`"
            found, fix = "no such file although the chunk counts as published", RESTORE if files.native else make
            yield Fault("seal-missing", name, f"a {seal}", found, fix, chunk)
        else:
            kind, of = ("data", "") if records.parse_arrays_name(name) is None else ("arrays", "arrays of the ")
            found = f"no such file although a {seal} exists"
            yield Fault(f"{kind}-missing", name, f"the {of}rows of the chunk", found, RESTORE, chunk)
    there = listed | {chunk for chunk, name in missing.items() if name is None}
    for chunk in [*sorted(chunk for chunk in there if first <= chunk < files.stop), files.stop]:
        if chunk > first:
            expected, found = f"the chunks {first} to {chunk - 1} and their {seal}s", f"none of these {chunk - first:,}"
            if chunk == first + 1:
                expected, found = f"the chunk and its {seal}", "neither"
            yield Fault("missing", chunk_name(first), expected, found, "restore the files from a copy", first)
        first = chunk + 1


def leftovers(files: StreamFiles) -> Iterator[Fault]:
    """Yields a finding for each chunk file outside the published range."""
    for chunk, name in (*files.seals.items(), *files.data.items(), *files.arrays.items()) if not files.running else ():
        if chunk < files.first:
            yield leftover("retired", name, f"no chunk below {files.first}: deleted", "the file", _REMOVED, chunk)
        elif chunk >= files.stop and name.endswith(SEAL_SUFFIX):
            remedy = f"restore {records.END} from a copy, or remove the file with its data if it is not of this stream"
            yield Fault("beyond-end", name, f"no chunk from {files.stop} on, by {records.END}", "a seal", remedy, chunk)
        elif chunk >= files.stop and chunk not in files.seals:
            found = "none, so it was never published"
            mark = f"if it is complete, mark it: `touch {name}{SEAL_SUFFIX}`; otherwise its producer must do so"
            if files.native:
                yield leftover("unpublished", name, "a seal for it", found, _REMOVED, chunk)
            elif not files.ended:
                yield leftover("unpublished", name, "a marker for it", found, mark, chunk)
            else:
                # A foreign stream does not count as ended while there is such a file.
                mark += ". Until then readers do not treat the stream as ended"
                yield Fault("unpublished", name, "a marker for it", found, mark, chunk)


class SealedPositions:
    """Checks that the rows of each writer are contiguous over the chunks, whose seals are given in order.

    Attributes:
        findings: what is wrong; at most one finding for a chunk.
        taken: rows of each writer up to the last chunk, None if they are unknown.
    """

    def __init__(self) -> None:
        self.findings: list[Fault] = []
        self.taken: Taken | None = {}
        self._next = 0

    def add(self, chunk: int, position: Sequenced | None, samples: int | None) -> None:
        """Adds the position in a chunk's seal; None if it has none or cannot be read."""
        # Nothing is known after chunks that are deleted or damaged.
        before = self.taken if chunk == self._next else None
        self._next, self.taken = chunk + 1, None
        if position is None:
            return
        self.taken = position.taken
        told = next(_compare(chunk, position, samples, before), None)
        if told is not None:
            self.findings.append(Fault("position", seal_name(chunk), *told, chunk=chunk))


def _compare(chunk: int, position: Sequenced, samples: int | None, before: Taken | None) -> Iterator[tuple[str, str]]:
    """Yields what was expected and what was found, where a position does not continue the one before."""
    counted = sum(one.count for one in position.rows)
    if samples is not None and counted != samples:
        yield f"{samples:,} rows of writers, as in the chunk", f"{counted:,}"
    if before is None:
        return
    for one in position.rows:
        if one.first != (first := before.get(one.writer, (0, 0))[0]):
            yield f"the rows of writer {one.writer!r} from row {first:,} on, as in chunk {chunk - 1}", f"{one.first:,}"
    after = {**before, **{one.writer: (one.first + one.count, chunk) for one in position.rows}}
    for name in sorted({*after, *position.taken}):
        expected, found = after.get(name, (0, 0)), position.taken.get(name, (0, 0))
        if expected != found:
            told = [f"{rows:,} rows, the last in chunk {last}" for rows, last in (expected, found)]
            yield f"writer {name!r} with {told[0]}", told[1]
