"""A survey of a stream: everything that its files report, and what is wrong with them.

It writes nothing, takes no lock, and reads no row. With a readable `head.json` the cost does not grow with the stream,
except for a listing of its names, about 1 us per file. Damage becomes a sentence in a list of problems, and the next
best source of the same fact is used instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from lazyshard import errors
from lazyshard.format import records
from lazyshard.format.records import END, HEAD, MANIFEST, End, Head, Manifest, ProducerState, Retired
from lazyshard.format.seal import MixedSource, Seal, mixed_sources
from lazyshard.format.state import CursorToken
from lazyshard.format.writers import WRITERS, Committed, Sequenced
from lazyshard.store import files
from lazyshard.stream import Consumer, list_consumers, listing, read_retired
from lazyshard.stream.head import STALE_HEARTBEAT_S, is_silent, no_process, process_ended, process_gone
from lazyshard.stream.listing import list_chunks, names_of, read_manifest, unlisted_chunks
from lazyshard.stream.members import read_position, writer_names
from lazyshard.stream.reader import GRACE_S

_T = TypeVar("_T")
Names = Callable[[int], Sequence[str]]  # returns a chunk's seal, data file, and other files

_MAX_SEAL_BYTES: Final = 4 << 20  # a larger seal, of over 100,000 rows, is not read: surveys must not burden a share
SAMPLED_CHUNKS: Final = 128  # each takes two calls, and on a network filesystem a call takes about a millisecond
_MOST_LOOKED_UP: Final = 1000  # the lowest chunks missing from a listing, which may be older than they are
_COUNTED_BYTES: Final = 16 << 20  # counted in about 10 ms; the lines of a longer file are estimated


class Survey(NamedTuple):
    """The result of one survey of a stream. Times are seconds since 1970."""

    directory: Path
    looked_at: float  # by this machine's clock
    census: Census
    gone: bool | None  # the producer's process does not exist on this machine; None if it runs on another machine
    consumers: tuple[Consumer, ...]  # by name
    unread_since: dict[str, float]  # when the first chunk that a consumer has not finished was published
    disk: DiskUse
    free: int | None  # free bytes of its filesystem
    quarantine: Lines | None  # rows that the producer has refused, None if there is no such file
    problems: tuple[str, ...]  # what is wrong with the files, one sentence each
    mixture: tuple[MixedSource, ...] = ()  # the sources that the producer mixes by weight, up to the newest chunk
    ended: bool = False  # the producer's process has certainly ended, and is not merely invisible
    writers: tuple[WriterOutlook, ...] = ()  # by name; empty in a stream of one producer
    sequencer: Committed | None = None  # what the sequencer of the writers has reported last
    sequencer_gone: bool | None = None  # as `gone`, of its process
    runs_gone: tuple[str, ...] = ()  # consumers whose cursor was written by a process that this machine no longer has


State = Literal[ProducerState, "dead"]
WriterState = Literal[State, "refused", "unknown"]
"""refused: the sequencer does not take its pieces; unknown: it has not begun, or its head cannot be read."""


class WriterOutlook(NamedTuple):
    """What a writer of a stream with several does; None if unknown. Field names match the JSON output."""

    name: str
    state: WriterState
    published_samples: int | None  # in its pieces so far
    stream_samples: int  # of these, in the stream
    waiting_pieces: int | None = None  # pieces whose rows are not all in the stream yet; 0 once it has ended
    samples_per_s: float | None = None
    heartbeat_age_s: float | None = None  # since its last sign of life
    host: str | None = None
    pid: int | None = None
    reason: str | None = None  # why it is refused, has failed or waits
    left_out_samples: int | None = None  # rows in its pieces that are not part of the stream, which has ended

    @property
    def in_trouble(self) -> bool:
        """Whether somebody has to do something about it."""
        return self.state in ("refused", "failed", "dead", "unknown")


class Census(NamedTuple):
    """What a stream has published."""

    native: bool  # whether it is a native stream
    manifest: Manifest | None  # None if there is none that can be read
    head: Head | None  # likewise
    chunks: int  # the chunks [0, chunks), including retired ones
    samples: int | None  # rows in them
    ended: bool
    retired: int  # the chunks [0, retired) are deleted or being deleted
    names: Names


def take_survey(directory: Path, now: float, lost: LostChunks | None = None) -> Survey:
    """Surveys a stream once; `lost` is kept from one survey to the next. Raises as `take_census`."""
    problems: list[str] = []
    census = take_census(directory, problems)
    head, since = census.head, dict[str, float]()
    disk = measure_disk(directory, census.retired, census.chunks, census.names, lost or LostChunks())
    problems += _lost(disk, directory, census, now)
    consumers = tolerate(lambda: list_consumers(directory, census.chunks), problems) or ()
    for consumer in consumers:
        if consumer.chunks_before < census.chunks:
            # A retired or lost chunk has no time.
            with contextlib.suppress(OSError):
                since[consumer.name] = files.modified_at(directory / census.names(consumer.chunks_before)[0])
    mixture: tuple[MixedSource, ...] = ()
    if census.native and census.chunks > census.retired:
        newest = census.chunks - 1
        # Its damage is reported by `verify`; the head counts it as published.
        with contextlib.suppress(errors.LazyShardError, OSError):
            data = files.read_file(directory / census.names(newest)[0], _MAX_SEAL_BYTES)
            source = Seal.decode(data, newest).source
            # The mixture of one of several writers is not that of the stream.
            of_one = (position := Sequenced.read_source(source)) is None or len(position.taken) == 1
            mixture = mixed_sources(source) if of_one else ()
    writers, sequencer = _survey_writers(directory, census, now, problems)
    if head is not None and sequencer is not None and sequencer.updated_at > head.updated_at:
        # The sequencer writes both files, this one more often.
        own = {name: getattr(sequencer, name) for name in ("host", "pid", "process", "updated_at")}
        head = replace(head, **own)
        census = census._replace(head=head)
    gone, ended = (None, False) if head is None else (process_gone(head), process_ended(head))
    # Damage of the manifest is reported twice.
    told, rows = tuple(dict.fromkeys(problems)), count_lines(directory / records.QUARANTINE)
    left = free_bytes(directory)
    about = directory, now, census, gone, consumers, since, disk, left, rows, told, mixture, ended
    runs_gone = tuple(one.name for one in consumers if _is_gone(one, now))
    return Survey(*about, writers, sequencer, None if sequencer is None else process_gone(sequencer), runs_gone)


def _is_gone(one: Consumer, now: float) -> bool:
    run = None if one.cursor is None else CursorToken.parse(one.cursor.owner)
    # Another run of this name may read already, and have written no cursor yet.
    reads = one.reading is not None and now - one.reading.updated_at < 60.0
    return run is not None and not reads and run.host == socket.gethostname() and no_process(run.pid)


def _survey_writers(
    directory: Path, census: Census, now: float, problems: list[str]
) -> tuple[tuple[WriterOutlook, ...], Committed | None]:
    """Returns the writers of a stream, and its sequencer; nothing for a stream of one producer."""
    if (manifest := census.manifest) is None or manifest.writers is None:
        return (), None
    folder, writers = directory / WRITERS, list[WriterOutlook]()
    # First: pieces that are published meanwhile are not in the stream yet.
    told = tolerate(lambda: files.find_record(folder / Committed.NAME, Committed.decode), problems)
    taken: Mapping[str, Any] = {} if told is None else told.taken
    refused: Mapping[str, str] = {} if told is None else told.refused
    if census.ended:
        # Written before the last chunk, which takes the remainders. Damage of its seal is reported by `verify`.
        with contextlib.suppress(errors.LazyShardError, OSError):
            taken = read_position(directory).taken
    names = {*taken, *(manifest.writers if isinstance(manifest.writers, tuple) else ()), *writer_names(directory)}
    for name in sorted(names):
        head = tolerate(partial(files.find_record, folder / name / HEAD, Head.decode), problems)
        known = taken.get(name, [0])[0], refused.get(name)
        writers.append(outlook_of_writer(name, head, *known, manifest.samples_per_chunk, now, census.ended))
    return tuple(writers), told


def outlook_of_writer(
    name: str, head: Head | None, taken: int, refused: str | None, samples_per_chunk: int, now: float, ended: bool
) -> WriterOutlook:
    """Returns what a writer does, given its rows in the stream, why it is refused, and whether the stream has ended."""
    if head is None:
        return WriterOutlook(name, "refused" if refused else "unknown", None, taken, reason=refused)
    age = max(0.0, now - head.updated_at)
    state = "refused" if refused else producer_state(head, age, process_gone(head) is True, process_ended(head))
    rate = head.rate if state in ("running", "waiting", "refused") and not is_silent(head, now) else 0.0
    left = max(0, head.samples - taken)
    pieces = 0 if ended else -(-left // samples_per_chunk)
    about = name, state, head.samples, taken, pieces, rate, age, head.host, head.pid
    return WriterOutlook(*about, refused or head.note or None, left if ended else 0)


def producer_state(head: Head, age: float, gone: bool, ended: bool = False) -> State:
    """Returns a producer's state, given the age of its head; `gone` may also mean that it runs in a container."""
    # A producer sends a heartbeat every few seconds; after a minute it cannot be relied on.
    silent = ended or age > (STALE_HEARTBEAT_S if gone else 60.0)
    return "dead" if silent and head.state in ("running", "waiting") else head.state


def _lost(disk: DiskUse, directory: Path, census: Census, now: float) -> list[str]:
    """Reports missing chunks, unless they were retired meanwhile or are too new to be visible everywhere."""
    if not disk.missing:
        return []
    retired = tolerate(lambda: _retired_chunks(directory, census.manifest), []) or 0
    missing, newest = [chunk for chunk in disk.missing if chunk >= retired], census.chunks - 1
    while missing and missing[-1] == newest and census.head is not None and now - census.head.updated_at < GRACE_S:
        newest = missing.pop() - 1
    if not missing:
        return []
    others = f", as are files of {len(missing) - 1} other{'s' * (len(missing) > 2)}" if missing[1:] else ""
    command = f"lazyshard verify {shlex.quote(str(directory))}"
    return [f"chunk {missing[0]} is published, but some of its files are missing{others}: run `{command}`"]


def take_census(directory: Path, problems: list[str]) -> Census:
    """Counts what is published, adding to `problems`. Raises StreamMissing, FileInvalid, StreamInvalid."""
    try:
        manifest = tolerate(lambda: read_manifest(directory, None), problems)
    except NotADirectoryError as cause:
        raise errors.StreamMissing(f"{directory}: a file, not a directory", directory=str(directory)) from cause
    head = tolerate(lambda: _read_head(directory / HEAD, manifest), problems)
    native = any(files.is_there(directory / name) for name in (MANIFEST, HEAD, records.OWNER))
    if native and manifest is None and not files.is_there(directory / MANIFEST):
        problems.append(f"{directory / MANIFEST}: missing; restore it from a copy")
    files_of = partial(names_of, arrays=manifest is not None and manifest.arrays)
    if head is None:
        return _listed(directory, native, manifest, files_of, problems)
    # After the head: chunks that it counts may have been deleted since, and then they are known to be.
    retired = min(tolerate(lambda: _retired_chunks(directory, manifest), problems) or 0, head.chunks)
    if head.ended:
        # Readers use the head; the producer, and readers if the head is lost, need a valid end.
        tolerate(lambda: files.find_record(directory / END, End.decode), problems)
    return Census(native, manifest, head, head.chunks, head.samples, head.ended, retired, files_of)


def tolerate(read: Callable[[], _T | None], problems: list[str]) -> _T | None:
    """Returns what is read, None if the file is damaged, which is added to `problems`."""
    try:
        return read()
    except errors.VersionUnsupported:
        raise
    except (errors.FormatInvalid, errors.FileRefused) as error:
        problems.append(str(error))
    return None


def _read_head(path: Path, manifest: Manifest | None) -> Head | None:
    head, size = files.find_record(path, Head.decode), 0 if manifest is None else manifest.samples_per_chunk
    if head is None or not size or head.is_whole(size, ended=head.ended):
        return head
    what = f"{path}: expected {head.chunks} chunks of {size} samples, found {head.samples} samples in all"
    expected, actual = str(head.chunks * size), str(head.samples)
    raise errors.FileInvalid(what, file=str(path), field="samples", expected=expected, actual=actual)


def _retired_chunks(directory: Path, manifest: Manifest | None) -> int:
    if manifest is not None:
        return read_retired(directory, manifest.stream_id)
    # Without a manifest it is unknown to which stream the mark belongs; its value is still the best guess.
    mark = files.find_record(directory / records.RETIRED, Retired.decode)
    return 0 if mark is None else mark.chunks_before


def _listed(directory: Path, native: bool, manifest: Manifest | None, canonical: Names, problems: list[str]) -> Census:
    """Counts what is published if there is no head."""
    try:
        listed = list_chunks(directory)
    except FileNotFoundError:
        raise listing.stream_missing(directory) from None
    samples: int | None = None
    end: End | None = None
    has_head = files.is_there(directory / HEAD)
    if not (has_head or listed.data or listed.seals or files.is_there(directory / MANIFEST)):
        raise listing.stream_missing(directory)
    if not native and not listed.seals:
        raise listing.stream_unsealed(directory, len(listed.data))
    if native:
        if not has_head:
            problems.append(f"{directory / HEAD}: missing, so the chunks were counted by listing them")
        listed = listed.starting_at(tolerate(lambda: _retired_chunks(directory, manifest), problems) or 0)
    chunks, gap, ended = listed.complete, listed.gap, not native and files.is_there(directory / END)
    if ended and gap is None and len(listed.data) > chunks:
        # The end of a foreign stream counts only once every data file has its marker.
        gap = chunks
    if gap is not None:
        problems.append(f"chunk {gap} lacks its data or its marker, so it and all later chunks do not count")
    if native:
        end = tolerate(lambda: files.find_record(directory / END, End.decode), problems)
    if end is not None:
        chunks, samples = end.chunks, end.samples
    elif native and manifest is not None:
        if chunks > listed.first:
            # It may be the partial chunk of a stream whose `stream.end` does not exist yet.
            last = tolerate(lambda: files.read_seal(directory, chunks - 1, listed.seals[chunks - 1]), problems)
            chunks -= last is None or last.samples < manifest.samples_per_chunk
        samples = chunks * manifest.samples_per_chunk

    def files_of(chunk: int) -> Sequence[str]:
        seal, data, *others = canonical(chunk)
        return listed.seals.get(chunk, seal), listed.data.get(chunk, data), *others

    ended = end is not None or (ended and gap is None)
    return Census(native, manifest, None, chunks, samples, ended, min(listed.first, chunks), files_of)


class DiskUse(NamedTuple):
    """The disk space that a stream takes."""

    size: int  # bytes of its chunks, seals and unpublished files: sizes, not blocks
    exact: bool  # whether every chunk was measured
    chunk_size: float | None  # mean bytes of a chunk with its seal, None if no chunk was found
    missing: tuple[int, ...]  # chunks that lack a file, among those measured and those not listed


class Lines(NamedTuple):
    """The length of a file in lines; `exact` if the lines were counted."""

    lines: int
    size: int
    exact: bool


def sampled_chunks(first: int, stop: int, most: int = SAMPLED_CHUNKS) -> list[int]:
    """Returns at most `most` (2 or more) chunks of [first, stop), evenly spaced, including both ends.

    >>> sampled_chunks(0, 3), sampled_chunks(10, 110, 4)
    ([0, 1, 2], [10, 43, 76, 109])
    """
    count = stop - first
    if count <= most:
        return list(range(first, stop))
    return [first + index * (count - 1) // (most - 1) for index in range(most)]


def estimate_size(count: int, sizes: dict[int, int], last: int) -> int:
    """Estimates the bytes of `count` chunks from some sizes, by number; the last chunk may be a partial one."""
    known, others = sum(sizes.values()), len(sizes) - (last in sizes)
    part = sizes.get(last, 0)
    mean = (known - part) / others if others else known
    return round(mean * (count - (last in sizes)) + part)


class LostChunks:
    """Finds chunks that lack a file by listings, which take at most 5 % of the time and are reused."""

    def __init__(self) -> None:
        self._unlisted: list[int] = []
        self._again_at = float("-inf")

    def unlisted(self, directory: Path, first: int, stop: int, *, arrays: bool) -> list[int]:
        """Returns chunks of [first, stop) that lack a file in the last listing; none for a store, which charges."""
        # A directory holds fewer: a head with more is damaged, and must not take memory.
        if isinstance(directory, files.UrlPath) or stop - first > 20_000_000:
            return []
        started = time.monotonic()
        if started >= self._again_at:
            self._unlisted = files.again_if_stale(lambda: unlisted_chunks(directory, first, stop, arrays=arrays))
            ended = time.monotonic()
            self._again_at = ended + (ended - started) / 0.05
        return [chunk for chunk in self._unlisted if first <= chunk < stop]


def measure_disk(
    directory: Path, first: int, stop: int, files_of: Names = names_of, lost: LostChunks | None = None
) -> DiskUse:
    """Measures some chunks of [first, stop) and unpublished files; `lost` names others to look up."""
    # In an object store a call takes some ten milliseconds.
    looked_at = sampled_chunks(first, stop, 16 if isinstance(directory, files.UrlPath) else SAMPLED_CHUNKS)
    exact = len(looked_at) == stop - first
    unlisted: list[int] = []
    if lost is not None and not exact:
        unlisted = lost.unlisted(directory, first, stop, arrays=len(files_of(first)) > 2)
        looked_at = sorted({*looked_at, *unlisted[:_MOST_LOOKED_UP]})
    sizes: dict[int, int] = {}
    missing = set(unlisted[_MOST_LOOKED_UP:])
    for chunk in looked_at:
        try:
            sizes[chunk] = sum(files.size_of(directory / name) for name in files_of(chunk))
        except OSError as error:
            # A link that leads to itself leads to no file either; `verify` reports which of the two it is.
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            missing.add(chunk)
    size = estimate_size(len(sizes) if exact else stop - first, sizes, stop - 1)
    for folder, _, written in () if isinstance(directory, files.UrlPath) else os.walk(directory / records.TEMPORARY):
        for name in written:
            # A file that is being written is renamed at any time.
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
    return DiskUse(size, exact, sum(sizes.values()) / len(sizes) if sizes else None, tuple(sorted(missing)))


def count_lines(path: Path) -> Lines | None:
    """Returns the lines of a file, estimated from its beginning if long; None for an object or if not a plain file."""
    try:
        if isinstance(path, files.UrlPath):
            return None
        opened = files.open_file(path)
    except (errors.LazyShardError, OSError):
        return None
    data = opened.read(0, min(opened.size, _COUNTED_BYTES))
    lines, read = data.count(b"\n"), len(data)
    exact = read >= opened.size or not read
    return Lines(lines if exact else round(lines * opened.size / read), opened.size, exact)


def free_bytes(directory: Path) -> int | None:
    """Returns how many bytes this user may still write to the filesystem, None for a store or if unknown."""
    if not isinstance(directory, files.UrlPath):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(directory).free
    return None
