"""What a verification finds in the files of the stream itself and in the names of its chunks.

The order of looks is what keeps a running producer from being taken for a fault: the cursors come before the head, the
head before the end, the end before the names, so that each later look shows at least what an earlier one speaks of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from lazyshard.errors import LazyShardError, VersionUnsupported
from lazyshard.format.cursor import CURSOR_SUFFIX, READING_SUFFIX, Cursor, ReadingMark, check_consumer
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
from lazyshard.inspection.verification_chunks import (
    REMOVED,
    RESTORE,
    ChunkBatch,
    ChunkFiles,
    Fault,
    damage,
    file_finding,
    leftover,
)
from lazyshard.store.files import check_folder, is_there, list_names, read_file
from lazyshard.store.urls import UrlPath
from lazyshard.stream.head import process_ended, process_gone
from lazyshard.stream.pacing import STALE_HEARTBEAT_S

# A producer that gives no sign for so long counts as stopped. It decides no more than whether what it leaves is told
# of: clocks of machines differ, and a writer that waits for one slow row is silent too.
SILENT_S: Final = 60.0

# Rows that are looked at before a word is said: at 2 KB a row some 8 MB, a few hundredths of a second
_BATCH_ROWS: Final = 4096

_BATCH_CHUNKS: Final = 64

# So many of the newest chunks are looked for by name even if they are not listed: on network filesystems it lags
LAGGING: Final = 64

_REWRITTEN: Final = "nothing to do: the producer's next start writes it anew"
_REMARKED: Final = "nothing to do: its run writes it anew as it reads on"

_T = TypeVar("_T")


@dataclass(slots=True)
class StreamFiles:
    """What the files of a stream say, apart from its chunks; None where one is missing or cannot be used.

    `native`: a producer of ours fills the directory; `running`: it is at work; `has_end`: there is a `stream.end`,
    whatever it says. Cursors and hints have their names in the directory; `temporary` is what is in `.tmp`.
    """

    directory: Path
    native: bool
    manifest: Manifest | None = None
    head: Head | None = None
    end: End | None = None
    retired: Retired | None = None
    has_end: bool = False
    running: bool = False
    cursors: list[tuple[str, Cursor]] = field(default_factory=list)
    readings: list[tuple[str, ReadingMark]] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    findings: list[Fault] = field(default_factory=list)

    def told(self, file: str) -> bool:
        """Whether there is a finding that a file cannot be used."""
        return any(found.file == file for found in self.findings)


def gather_facts(directory: Path, now: float) -> StreamFiles:
    """Reads them; `now` in seconds since 1970, by this machine's clock.

    Raises VersionUnsupported if the stream is of a later format, OSError if the directory cannot be listed.
    """
    facts = StreamFiles(directory, native=any(is_there(directory / name) for name in (MANIFEST, HEAD)))
    _read_consumers(facts)
    if facts.native:
        facts.manifest = _read(facts, MANIFEST, Manifest.decode)
        facts.head = _read(facts, HEAD, Head.decode)
        if facts.head is not None and not process_ended(facts.head):
            facts.running = is_running(facts.head, process_gone(facts.head), now)
        facts.end = _read(facts, END, End.decode)
        facts.retired = _read(facts, RETIRED, Retired.decode)
        _read(facts, OWNER, Owner.decode)
    try:
        facts.names = list_names(directory)
    except FileNotFoundError:
        # A store has no empty folders: there is nothing under this URL.
        if not isinstance(directory, UrlPath):
            raise
    facts.has_end = END in facts.names or facts.end is not None
    if TEMPORARY in facts.names:
        facts.temporary = _listed(facts, TEMPORARY)
    return facts


def is_running(head: Head, gone: bool | None, now: float) -> bool:
    """Whether the producer is at work, as far as its head tells; `gone`: its process is not to be seen on this machine.

    That is None where it runs on another one.
    """
    silent_s = now - head.updated_at
    # Containers may share the name of a machine, but not its processes: a fresh sign counts for more than that.
    return head.state in ("running", "waiting") and silent_s <= (STALE_HEARTBEAT_S if gone else SILENT_S)


def _read_consumers(facts: StreamFiles) -> None:
    for name in _listed(facts, CURSORS):
        # The name of a reading mark would be that of a cursor as well.
        is_mark, file = name.endswith(READING_SUFFIX), f"{CURSORS}/{name}"
        consumer = name.removesuffix(READING_SUFFIX if is_mark else CURSOR_SUFFIX)
        try:
            check_consumer(consumer)
        except ValueError:
            continue
        if is_mark:
            mark = _read(facts, file, ReadingMark.decode, consumer)
            facts.readings += [] if mark is None else [(file, mark)]
        elif consumer != name:
            cursor = _read(facts, file, Cursor.decode, consumer)
            facts.cursors += [] if cursor is None else [(file, cursor)]


def _read(facts: StreamFiles, name: str, decode: Callable[..., _T], *consumer: str) -> _T | None:
    """Returns what a file says, None where it is missing or cannot be used, which is a finding."""
    try:
        return decode(read_file(facts.directory / name), *consumer, name)
    except FileNotFoundError:
        return None
    except (LazyShardError, OSError) as error:
        if name == MANIFEST and isinstance(error, VersionUnsupported):
            # Nothing in the directory may mean what it seems to mean.
            error.file = str(facts.directory / name)
            error.args = (f"{facts.directory}{os.sep}{error}",)
            raise
        found = file_finding(name, error)
        # These harm nobody: a power cut may leave them empty. Of what is no file at all readers refuse the head too,
        # and the producer may be unable to replace it.
        if found.kind == "invalid" and (name in (HEAD, OWNER) or name.endswith(READING_SUFFIX)):
            remedy = _REMARKED if name.endswith(READING_SUFFIX) else _REWRITTEN
            found = replace(found, severity="leftover", remedy=remedy)
        facts.findings.append(found)
        return None


def _listed(facts: StreamFiles, folder: str) -> list[str]:
    try:
        return sorted(list_names(check_folder(facts.directory / folder)))
    except FileNotFoundError:
        return []
    except OSError as error:
        found = file_finding(folder, error)
        if isinstance(error, NotADirectoryError):
            found = replace(found, severity="damage", expected="a directory", found="something else")
        facts.findings.append(found)
    return []


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The names of the chunk files of a directory by chunk number, and findings of those that a chunk cannot have."""

    data: dict[int, str]
    seals: dict[int, str]
    findings: tuple[Fault, ...]
    arrays: dict[int, str] = field(default_factory=dict)

    @property
    def sealed_before(self) -> int:
        """The number after that of the last seal, 0 if there is none."""
        return max(self.seals, default=-1) + 1


@dataclass(frozen=True, slots=True)
class Extent:
    """Which chunks are to be there: those of the half-open range [first, stop); those before it are retired.

    Where a producer is at work, what lies outside of the range may be in its hands. `arrays`: each has a side file.
    """

    first: int
    stop: int
    native: bool
    ended: bool
    running: bool
    arrays: bool = False


def sort_names(found: Iterable[str], *, native: bool) -> ChunkNames:
    """Returns the chunk files among the names of a directory; any other name is passed over.

    `native`: only the names that a producer of ours gives are names of chunks.
    """
    kept: tuple[dict[int, str], dict[int, str]] = ({}, {})
    others: dict[tuple[int, bool], list[str]] = {}
    findings: list[Fault] = []
    arrays: dict[int, str] = {}
    for name in found:
        parsed = parse_chunk_name(name)
        if parsed is None:
            if (number := parse_arrays_name(name)) is not None:
                arrays[number] = name
            continue
        chunk, is_seal = parsed
        first = kept[is_seal].setdefault(chunk, name)
        if first is not name:
            others.setdefault(parsed, [first]).append(name)
    for (chunk, is_seal), names in others.items():
        right = seal_name(chunk) if is_seal else chunk_name(chunk)
        best = right if right in names else min(names)
        kept[is_seal][chunk] = best
        also = f"also {', '.join(sorted(set(names) - {best}))}"
        remedy = "keep the right one and move the other out of the directory"
        findings.append(damage("doubled", best, f"one file for chunk {chunk}", also, remedy, chunk))
    for is_seal in (False, True) if native else ():
        for chunk, name in kept[is_seal].items():
            right = seal_name(chunk) if is_seal else chunk_name(chunk)
            if name != right and (chunk, is_seal) not in others:
                padding, remedy = "another padding, under which readers do not look", f"rename it: `mv {name} {right}`"
                findings.append(damage("misnamed", name, f"the name {right}", padding, remedy, chunk))
    return ChunkNames(kept[False], kept[True], tuple(findings), arrays)


def missing_chunks(names: ChunkNames, extent: Extent, missing: dict[int, str], there: Set[int]) -> Iterator[Fault]:
    """Yields a finding for each chunk that lacks a file, and one for a whole run of chunks that are not there at all.

    When they were opened, a file of this name was `missing` of a chunk, and the chunks `there` were found, whether they
    were listed or not.
    """
    listed = names.data.keys() | names.seals.keys()
    for chunk, name in missing.items():
        if chunk >= extent.first and chunk in listed:
            yield _incomplete(chunk, name, names, extent.native)
    position = extent.first
    for chunk in [*sorted(chunk for chunk in listed | there if extent.first <= chunk < extent.stop), extent.stop]:
        if chunk > position:
            yield _gap(position, chunk, extent.native)
        position = chunk + 1


def leftovers(names: ChunkNames, extent: Extent) -> Iterator[Fault]:
    """Yields a finding for each chunk file outside of what is published."""
    if extent.running:
        return
    kinds = (names.seals, names.data, names.arrays) if extent.arrays else (names.seals, names.data)
    for chunk, name in (one for kind in kinds for one in kind.items()):
        if chunk < extent.first:
            expected = f"no chunk below {extent.first}, which {RETIRED} says are deleted"
            yield leftover("retired", name, expected, "the file", REMOVED, chunk)
        elif chunk >= extent.stop and name.endswith(SEAL_SUFFIX):
            expected = f"no chunk from {extent.stop} on, as {END} says"
            remedy = f"restore {END} from a copy, or remove the file with its data if it is not of this stream"
            yield damage("beyond-end", name, expected, "a seal", remedy, chunk)
        elif chunk >= extent.stop and chunk not in names.seals:
            yield _unpublished(chunk, name, extent)


def _gap(start: int, stop: int, native: bool) -> Fault:
    seal = "seal" if native else "marker"
    if stop == start + 1:
        expected, found = f"the chunk and its {seal}", "neither"
    else:
        expected, found = f"the chunks {start} to {stop - 1} and their {seal}s", f"none of these {stop - start:,}"
    return damage("missing", chunk_name(start), expected, found, "restore the files from a copy", start)


def _incomplete(chunk: int, absent: str, names: ChunkNames, native: bool) -> Fault:
    seal, arrays = absent.endswith(SEAL_SUFFIX), parse_arrays_name(absent) is not None
    what = "a seal" if native else "a marker"
    kind = "seal-missing" if seal else "arrays-missing" if arrays else "data-missing"
    expected = what if seal else f"the {'arrays of the ' if arrays else ''}rows of the chunk"
    found = "no such file although " + ("the chunk counts as published" if seal else f"{what} is there")
    remedy = RESTORE
    if seal and not native:
        remedy = f"if {names.data.get(chunk, chunk_name(chunk))} is complete, make it: `touch {absent}`"
    return damage(kind, absent, expected, found, remedy, chunk)


def _unpublished(chunk: int, name: str, extent: Extent) -> Fault:
    found = "none, so it was never published"
    if extent.native:
        return leftover("unpublished", name, "a seal beside it", found, REMOVED, chunk)
    remedy = f"if it is complete, mark it: `touch {name}{SEAL_SUFFIX}`; otherwise its producer is still to do so"
    if not extent.ended:
        return leftover("unpublished", name, "a marker beside it", found, remedy, chunk)
    # Of a foreign stream the end does not count as long as there is such a file.
    remedy += ". Until then readers do not take the stream for ended"
    return damage("unpublished", name, "a marker beside it", found, remedy, chunk)


def find_extent(facts: StreamFiles, names: ChunkNames) -> Extent:
    """Returns which chunks are to be there.

    What a running producer has published after the look at its head does not count. Of one that does not run every seal
    counts: it may have been killed before it could replace its head.
    """
    if not facts.native:
        return Extent(0, names.sealed_before, native=False, ended=facts.has_end, running=False)
    mark, first = facts.retired, 0
    if facts.told(RETIRED):
        # What is retired is not known; that the mark cannot be used is told.
        first = min(names.seals, default=0)
    elif mark is not None and (facts.manifest is None or mark.stream_id == facts.manifest.stream_id):
        first = mark.chunks_before
    if facts.end is not None:
        stop = facts.end.chunks
    elif facts.running and facts.head is not None:
        stop = facts.head.chunks
    else:
        stop = max(names.sealed_before, 0 if facts.head is None else facts.head.chunks)
    arrays = facts.manifest is not None and facts.manifest.arrays
    return Extent(first, max(first, stop), native=True, ended=facts.has_end, running=facts.running, arrays=arrays)


def plan_batches(
    directory: Path, names: ChunkNames, extent: Extent, per_chunk: int | None, *, quick: bool
) -> list[ChunkBatch]:
    """Returns what is to be looked at: every chunk of which there is a file, in order."""
    files = list(_files_of(names, extent))
    size = _BATCH_CHUNKS if quick else max(1, min(_BATCH_CHUNKS, _BATCH_ROWS // (per_chunk or _BATCH_ROWS)))
    return [ChunkBatch(directory, tuple(files[at : at + size]), quick) for at in range(0, len(files), size)]


def unmarked_chunks(names: ChunkNames, extent: Extent) -> dict[int, str]:
    """Returns the chunks of a foreign directory that lack their marker, with the name that it should have.

    Opening cannot tell: what a marker says is never looked at.
    """
    if extent.native:
        return {}
    unmarked = (chunk for chunk in names.data if chunk < extent.stop and chunk not in names.seals)
    return {chunk: names.data[chunk] + SEAL_SUFFIX for chunk in unmarked}


def _files_of(names: ChunkNames, extent: Extent) -> Iterator[ChunkFiles]:
    if not extent.native:
        for chunk, marker in sorted(names.seals.items()):
            yield ChunkFiles(chunk, names.data.get(chunk) or marker.removesuffix(SEAL_SUFFIX), None)
        return
    newest = range(max(extent.first, extent.stop - LAGGING), extent.stop)
    for chunk in sorted(names.data.keys() | names.seals.keys() | set(newest)):
        if extent.first <= chunk < extent.stop:
            data = names.data.get(chunk) or chunk_name(chunk)
            seal = names.seals.get(chunk) or seal_name(chunk)
            yield ChunkFiles(chunk, data, seal, arrays_name(chunk) if extent.arrays else None)
