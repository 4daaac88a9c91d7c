"""The directory in which a run publishes: whether it can be one, and whether its stream has ended.

A stream that has ended is recognised without taking its lock, and not touched unless a crash has left something.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamInvalid, StreamMismatch
from lazyshard.format.names import END, HEAD, MANIFEST, RETIRED, TEMPORARY, seal_name
from lazyshard.format.records import End, Head
from lazyshard.format.seal import Seal
from lazyshard.store.files import is_there, read_file
from lazyshard.store.urls import is_url, stream_path
from lazyshard.stream import ChunkWriter
from lazyshard.stream.listing import list_chunks, read_manifest
from lazyshard.stream.recovery import find_manifest
from lazyshard.stream.retention import list_kept
from lazyshard_producer.configuration.problems import MAX_NAME_BYTES
from lazyshard_producer.configuration.settings import Settings, SourceSettings, flag
from lazyshard_producer.errors import SettingInvalid, SourceRefused
from lazyshard_producer.following.directory import list_unread
from lazyshard_producer.following.journal import DIRECTORY, named_journals, remove_journals
from lazyshard_producer.following.journal import KIND as FOLLOWED
from lazyshard_producer.opening import open_source, source_kind
from lazyshard_producer.position import (
    PACKED_SIZE,
    RunPosition,
    compare_sources,
    decode_position,
    plain_name,
    source_names,
)
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.pipeline import changes, describe
from lazyshard_producer.sources.files import file_size
from lazyshard_producer.sources.source import PYTHON, STANDARD_INPUT, Context
from lazyshard_producer.wording import count


def check_out(out: str) -> None:
    """Checks that a directory can have this name, or has it."""
    long: list[str] = []
    try:
        there = stat.S_ISDIR(os.stat(out).st_mode)
        problem = "" if there else "expected a directory (or nothing yet), found a file"
    except FileNotFoundError:
        problem = "expected a directory, found a link to nothing" if os.path.islink(out) else ""
        # The filesystem says so only once the directories above it are there, that is after some were made.
        long = [part for part in Path(out).parts if len(os.fsencode(part)) > MAX_NAME_BYTES]
    except OSError as cause:
        if cause.errno not in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP):
            raise
        problem = f"cannot be a directory: {cause.strerror}"
        long = [out] if cause.errno == errno.ENAMETOOLONG else []
    for name in long:
        raise SettingInvalid(f"--out: a name of {len(name)} characters is too long: {name[:40]}...", option="--out")
    if problem:
        raise StreamInvalid(f"{out}: {problem}", directory=out)


def is_gone(out: str) -> bool:
    """Returns whether the filesystem says that there is no such directory. No answer, or no permission, is none."""
    try:
        os.stat(out)
    except OSError as cause:
        return cause.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


_MOST_NAMED: Final = 5  # files that are named where a stream that has ended lacks many


def find_end(out: str, samples_per_chunk: int) -> End | None:
    """Returns how much an ended stream holds, None where there is no stream or it has not ended."""
    try:
        data = read_file(Path(out, END))
    except FileNotFoundError:
        return None
    there = read_manifest(Path(out), samples_per_chunk) is not None
    return End.decode(data, str(Path(out, END))) if there else None


@contextlib.contextmanager
def telling_how_to_begin_anew(out: str) -> Iterator[None]:
    """Has the refusal of a stream that does not fit say what to do where no row is published in it.

    Its manifest is not replaced without being asked: a reader that waits for its first row has read it already, and
    would take rows for what they are not. Of a stream in an object store nothing is said.
    """
    try:
        yield
    except StreamMismatch as error:
        names: list[str] = []
        # A URL is no such directory.
        with contextlib.suppress(LazyShardError, OSError):
            listing, there = list_chunks(Path(out)), os.listdir(out)
            if not (listing.data or listing.seals or RETIRED in there):
                names = [name for name in (MANIFEST, HEAD, END) if name in there]
        if names:
            begin = "to begin anew in the same place, stop what waits for its rows, remove"
            again = f"{begin} {' and '.join(names)} in it, and run the same command again"
            error.args = (f"{error}. No row is published in it: {again}",)
        raise


def complete_end(out: str, end: End) -> None:
    """Does what may be left to be done behind the end: readers are told of it, `.tmp/`, retired chunks and journals go.

    Nothing is touched where all is done, which is so as good as always. Raises as `ChunkWriter`.
    """
    stream, told = Path(out), False
    manifest = read_manifest(stream, None)
    assert manifest is not None
    with contextlib.suppress(FileNotFoundError, LazyShardError):
        head = Head.decode(read_file(stream / HEAD), str(stream / HEAD))
        told = head.ended and (head.chunks, head.samples) == (end.chunks, end.samples)
    # Deleting may have failed as the run was ending, which has told of it and gone on.
    if not told or os.path.lexists(stream / TEMPORARY) or list_kept(stream, arrays=manifest.arrays).leftovers:
        # Opening does it. One that holds the lock is at it.
        with contextlib.suppress(StreamEnded, ProducerFenced):
            ChunkWriter(out, arrays=manifest.arrays, encoding=manifest.encoding)
    clear_journals(out)


def clear_journals(out: str) -> None:
    """Removes the journals of followed directories from a stream that has ended, but those that tell what was read."""
    with contextlib.suppress(OSError, LazyShardError):
        end = End.decode(read_file(Path(out, END)), str(Path(out, END)))
        remove_journals(Path(out, DIRECTORY), named_journals(end.source))


_Entry: TypeAlias = dict[str, Any]
_Tell: TypeAlias = Callable[[str], None]
_Asked: TypeAlias = Callable[[], bool] | None


def check_ended(settings: Settings, end: End, warn: _Tell, stopped: _Asked = None) -> None:
    """Looks whether a stream that has ended is the one asked for: its rows made alike, and all rows of the sources.

    What was deleted since holds none. Pipes and functions cannot be looked at without taking their rows, nor standard
    input where no run asks (`stopped`, whether to stop waiting for it, is None): that is told, as are lacking sources,
    and that only the mix would be another.
    """
    # A source that has gone would tell what rows are.
    with contextlib.suppress(SourceRefused):
        form = form_of(settings)
        find_manifest(Path(settings.out), settings.samples_per_chunk, form.arrays, form.encoding)
    source = end.source
    earlier = "the stream was ended by an earlier release; rows that were added to its sources since are not noticed"
    if source is None:
        path = Path(settings.out, seal_name(max(0, end.chunks - 1)))
        try:
            source = Seal.decode(read_file(path), end.chunks - 1, str(path)).source
        except OSError:
            warn(earlier)
            return
    position, names = decode_position(source, settings.out), source_names(source)
    changed = changes(position.recipe, describe(settings)) if end.chunks else {}
    if changed.keys() - {"weights"}:
        text = "the stream has ended, and its rows were made in another way than is asked for"
        advice = "nothing can be added to it. Go on with the settings of before, or choose another --out"
        raise SettingInvalid(f"{text}: {', '.join(changed.values())}; {advice}", option=flag(next(iter(changed))))
    if changed:
        warn(f"the stream was mixed otherwise: {', '.join(changed.values())}")
    # Behind the last of full chunks there may have been rows that were left out.
    if end.source is None and not end.samples % settings.samples_per_chunk:
        warn(earlier)
        return
    entries = dict(zip(names, position.sources, strict=True))
    missing: list[str] = []
    for one in settings.sources:
        entry = entries.get(plain_name(one.path))
        missing += _not_taken(one) if entry is None else _behind(settings, one, entry, warn, stopped)
    if missing:
        more = f" and {len(missing) - _MOST_NAMED:,} more" if len(missing) > _MOST_NAMED else ""
        text = f"the stream has ended with {count(end.samples, 'sample')}, and these rows are not in it: "
        advice = "Publish them as a stream of their own, with another --out"
        raise StreamEnded(f"{text}{', '.join(missing[:_MOST_NAMED])}{more}. {advice}", samples=end.samples)
    difference = compare_sources(names, [one.path for one in settings.sources])
    if difference is not None:
        number, expected, actual = difference
        warn(f"the stream was made from other sources: source {number} was {expected}, now it is {actual}")


def _not_taken(source: SourceSettings) -> list[str]:
    """Returns a source of which nothing is in the stream, unless there is nothing in it."""
    path = source.path
    if path == STANDARD_INPUT:
        return ["standard input"]
    if glob.has_magic(path) and not os.path.lexists(path):
        return []
    if source_kind(source) != "jsonl":
        return [plain_name(path)]
    return [_grown(path, 0, size)] if (size := file_size(path)) else []


def _behind(settings: Settings, source: SourceSettings, entry: _Entry, warn: _Tell, stopped: _Asked) -> list[str]:
    """Returns the source, or files of it, if it holds rows behind the place where it ended."""
    path = source.path
    if path == STANDARD_INPUT and stopped is not None:
        return ["standard input"] if _has_more(settings, source, entry, stopped) else []
    if path.startswith(PYTHON) or entry["kind"] == "stdin":
        warn(f"{path}: not looked at; nothing can be added to a stream that has ended")
        return []
    if not (is_there(stream_path(path) / MANIFEST) if is_url(path) else os.path.lexists(path)):
        return []
    if entry["kind"] == source_kind(source) == FOLLOWED:
        unread = list_unread(source, entry, Path(settings.out, DIRECTORY), settings.max_row_bytes)
        return [_grown(*one) for one in unread]
    size, is_file = file_size(path), os.path.isfile(path)
    # Of a directory the size says nothing. A compressed file is read from its start only if it is another size.
    if (is_file and size in (0, entry.get(PACKED_SIZE))) or not _has_more(settings, source, entry, None):
        return []
    read = int(entry.get(PACKED_SIZE) or entry.get("offset") or 0)
    return [_grown(path, read, size) if is_file else plain_name(path)]


def _grown(path: str, read: int, there: int) -> str:
    behind = f" behind byte {read:,}" if read else ""
    return f"{plain_name(path)} ({count(there - read, 'byte')}{behind})"


def _has_more(settings: Settings, source: SourceSettings, entry: _Entry, stopped: _Asked) -> bool:
    """Returns whether a source holds a row behind those that were read; standard input is waited for, till then."""
    opened = open_source(source, entry, Context(Path(settings.out), settings.max_row_bytes))
    with contextlib.closing(opened):
        if stopped is None:
            # A stream that is still produced is looked at, not waited for.
            opened.end()
        while (stopped is None or not stopped()) and (rows := opened.read()) is not None:
            if rows.lines:
                return True
            if stopped is not None:
                opened.wait(1.0)
    return False


def leftovers(position: RunPosition, sources: Sequence[str]) -> list[str]:
    """Returns a sentence for each plain file that holds more than was read of it; `sources` are the paths."""
    since = "since its end was read; they are not in the stream"
    return [
        f"{plain_name(path)}: has grown by {count(more, 'byte')} {since}"
        for entry, path in zip(position.sources, sources, strict=False)
        if entry is not None and entry["kind"] == "jsonl" and (more := file_size(path) - entry["offset"]) > 0
    ]
