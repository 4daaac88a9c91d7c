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
from typing import Any, Final

from lazyshard.errors import LazyShardError, ProducerLocked, StreamEnded, StreamInvalid, StreamMismatch
from lazyshard.format.names import END, HEAD, MANIFEST, RETIRED, TEMPORARY, seal_name
from lazyshard.format.records import End, Head
from lazyshard.format.seal import Seal
from lazyshard.store.files import is_there, read_file
from lazyshard.store.urls import is_url, stream_path
from lazyshard.stream import ChunkWriter
from lazyshard.stream.listing import list_chunks, read_manifest
from lazyshard.stream.recovery import find_manifest
from lazyshard.stream.retention import list_kept
from lazyshard_producer.configuration.problems import MAX_NAME_BYTES, is_python
from lazyshard_producer.configuration.settings import Settings, SourceSettings
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
from lazyshard_producer.sources.source import STANDARD_INPUT, Context, file_size
from lazyshard_producer.wording import count


def check_out(out: str) -> None:
    """Checks that a directory can have this name, or has it."""
    try:
        mode = os.stat(out).st_mode
    except FileNotFoundError:
        if os.path.islink(out):
            raise StreamInvalid(f"{out}: expected a directory, found a link to nothing", directory=out) from None
        # The filesystem says so only once the directories above it are there, that is after some were made.
        for part in Path(out).parts:
            if len(os.fsencode(part)) > MAX_NAME_BYTES:
                raise _name_too_long(part) from None
        return
    except OSError as cause:
        if cause.errno == errno.ENAMETOOLONG:
            raise _name_too_long(out) from None
        if cause.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StreamInvalid(f"{out}: cannot be a directory: {cause.strerror}", directory=out) from None
        raise
    if not stat.S_ISDIR(mode):
        raise StreamInvalid(f"{out}: expected a directory (or nothing yet), found a file", directory=out)


def is_gone(out: str) -> bool:
    """Returns whether the filesystem says that there is no such directory. No answer, or no permission, is none."""
    try:
        os.stat(out)
    except OSError as cause:
        return cause.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _name_too_long(name: str) -> SettingInvalid:
    return SettingInvalid(f"--out: a name of {len(name)} characters is too long: {name[:40]}...", option="--out")


_MOST_NAMED: Final = 5  # files that are named where a stream that has ended lacks many


def find_end(out: str, samples_per_chunk: int) -> End | None:
    """Returns how much an ended stream holds, None where there is no stream or it has not ended."""
    try:
        data = read_file(Path(out, END))
    except FileNotFoundError:
        return None
    there = read_manifest(Path(out), samples_per_chunk) is not None
    return End.decode(data, str(Path(out, END))) if there else None


def check_made_alike(settings: Settings, end: End, warn: Callable[[str], None]) -> None:
    """Compares how the rows of an ended stream were made with how they would be: nobody is to take it for another one.

    `warn` is told where only the mix would be another.
    """
    # A source that has gone would tell what rows are.
    with contextlib.suppress(SourceRefused):
        form = form_of(settings)
        find_manifest(Path(settings.out), settings.samples_per_chunk, form.arrays, form.encoding)
    if not end.chunks:
        return
    try:
        position, _ = _last_position(settings.out, end)
    except (LazyShardError, OSError):
        # Of another program, or deleted.
        return
    changed = changes(position.recipe, describe(settings))
    names = ", ".join(changed.values())
    if changed.keys() == {"weights"}:
        warn(f"the stream was mixed otherwise: {names}")
    elif changed:
        raise SettingInvalid(
            f"the stream has ended, and its rows were made in another way than is asked for: {names}; nothing can be "
            f"added to it. Go on with the settings of before, or choose another --out",
            option=f"--{next(iter(changed)).replace('_', '-')}",
        )


@contextlib.contextmanager
def telling_how_to_begin_anew(out: str) -> Iterator[None]:
    """Has the refusal of a stream that does not fit say what to do where no row is published in it.

    Its manifest is not replaced without being asked: a reader that waits for its first row has read it already, and
    would take rows for what they are not. Of a stream in an object store nothing is said.
    """
    try:
        yield
    except StreamMismatch as error:
        files = [] if is_url(out) else _files_without_rows(Path(out))
        if files:
            error.args = (
                f"{error}. No row is published in it: to begin anew in the same place, stop what waits for its rows, "
                f"remove {' and '.join(files)} in it, and run the same command again",
            )
        raise


def _files_without_rows(out: Path) -> list[str]:
    """Returns the names of the files that make a directory a stream, if it is one into which no row has come."""
    try:
        listing = list_chunks(out)
        names = set(os.listdir(out))
    except (LazyShardError, OSError):
        return []
    if listing.data or listing.seals or RETIRED in names:
        return []
    return [name for name in (MANIFEST, HEAD, END) if name in names]


def complete_end(out: str, end: End) -> None:
    """Does what may be left to be done behind the end: readers are told of it, `.tmp/`, retired chunks and journals go.

    Nothing is touched where all is done, which is so as good as always. Raises as `ChunkWriter`.
    """
    manifest = read_manifest(Path(out), None)
    assert manifest is not None
    if not _is_complete(Path(out), end, manifest.arrays):
        # Opening does it. One that holds the lock is at it.
        with contextlib.suppress(StreamEnded, ProducerLocked):
            ChunkWriter(out, arrays=manifest.arrays, encoding=manifest.encoding)
    clear_journals(out)


def clear_journals(out: str) -> None:
    """Removes the journals of followed directories from a stream that has ended, but those that tell what was read."""
    with contextlib.suppress(OSError, LazyShardError):
        end = End.decode(read_file(Path(out, END)), str(Path(out, END)))
        remove_journals(Path(out, DIRECTORY), named_journals(end.source))


def _is_complete(out: Path, end: End, arrays: bool) -> bool:
    try:
        head = Head.decode(read_file(out / HEAD), str(out / HEAD))
    except (FileNotFoundError, LazyShardError):
        return False
    told = head.ended and (head.chunks, head.samples) == (end.chunks, end.samples)
    # Deleting may have failed as the run was ending, which has told of it and gone on.
    return told and not os.path.lexists(out / TEMPORARY) and not list_kept(out, arrays=arrays).leftovers


def check_all_taken(
    settings: Settings, end: End, warn: Callable[[str], None], stopped: Callable[[], bool] | None = None
) -> None:
    """Looks whether sources hold rows that are not in a stream that has ended.

    What was deleted since holds none. Pipes and functions cannot be looked at without taking their rows, nor standard
    input where no run asks (`stopped`, whether to stop waiting for it, is None): that is told, as are lacking sources.
    """
    found = _final_position(settings.out, end)
    if found is None:
        warn("the stream was ended by an earlier release; rows that were added to its sources since are not noticed")
        return
    position, names = found
    entries = dict(zip(names, position.sources, strict=True))
    missing: list[str] = []
    for source in settings.sources:
        entry = entries.get(plain_name(source.path))
        missing += _not_taken(source) if entry is None else _behind(settings, source, entry, warn, stopped)
    if missing:
        more = f" and {len(missing) - _MOST_NAMED:,} more" if len(missing) > _MOST_NAMED else ""
        raise StreamEnded(
            f"the stream has ended with {count(end.samples, 'sample')}, and these rows are not in it: "
            f"{', '.join(missing[:_MOST_NAMED])}{more}. Publish them as a stream of their own, with another --out",
            samples=end.samples,
        )
    difference = compare_sources(names, [source.path for source in settings.sources])
    if difference is not None:
        number, expected, actual = difference
        warn(f"the stream was made from other sources: source {number} was {expected}, now it is {actual}")


def _final_position(out: str, end: End) -> tuple[RunPosition, list[str]] | None:
    """Returns where all sources ended, and their names; None where that is not known."""
    if end.source is not None:
        return decode_position(end.source, out), source_names(end.source)
    try:
        manifest = read_manifest(Path(out), None)
        position = _last_position(out, end)
    except OSError:
        return None
    # Behind the last of full chunks there may have been rows that were left out.
    exact = end.chunks and manifest is not None and end.samples % manifest.samples_per_chunk
    return position if exact else None


def _not_taken(source: SourceSettings) -> list[str]:
    """Returns a source of which nothing is in the stream, unless there is nothing in it."""
    if glob.has_magic(source.path) and not os.path.lexists(source.path):
        return []
    if source.path == STANDARD_INPUT:
        return ["standard input"]
    if source_kind(source) != "jsonl":
        return [plain_name(source.path)]
    size = file_size(source.path)
    return [f"{plain_name(source.path)} ({count(size, 'byte')})"] if size else []


def _behind(
    settings: Settings,
    source: SourceSettings,
    entry: dict[str, Any],
    warn: Callable[[str], None],
    stopped: Callable[[], bool] | None,
) -> list[str]:
    """Returns what a source holds behind the place where it ended."""
    path = source.path
    if path == STANDARD_INPUT and stopped is not None:
        return ["standard input"] if _has_more(settings, source, entry, stopped) else []
    if is_python(path) or entry["kind"] == "stdin":
        warn(f"{path}: not looked at; nothing can be added to a stream that has ended")
        return []
    if not (is_there(stream_path(path) / MANIFEST) if is_url(path) else os.path.lexists(path)):
        return []
    if entry["kind"] == source_kind(source) == FOLLOWED:
        unread = list_unread(source, entry, Path(settings.out, DIRECTORY), settings.max_row_bytes)
        return [_grown(*one) for one in unread]
    size, is_file = file_size(path), os.path.isfile(path)
    # Of a directory the size says nothing. A compressed file is read from its start only if it is another size.
    if is_file and size in (0, entry.get(PACKED_SIZE)):
        return []
    if not _has_more(settings, source, entry, None):
        return []
    return [_grown(path, entry.get(PACKED_SIZE, entry.get("offset", 0)), size) if is_file else plain_name(path)]


def _has_more(
    settings: Settings, source: SourceSettings, entry: dict[str, Any], stopped: Callable[[], bool] | None
) -> bool:
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


def _grown(path: str, read: int, there: int) -> str:
    behind = f" behind byte {read:,}" if read else ""
    return f"{plain_name(path)} ({count(there - read, 'byte')}{behind})"


def leftovers(position: RunPosition, sources: Sequence[str]) -> list[str]:
    """Returns a sentence for each plain file that holds more than was read of it; `sources` are the paths."""
    found = []
    for entry, path in zip(position.sources, sources, strict=False):
        if entry is None or entry["kind"] != "jsonl":
            continue
        more = file_size(path) - entry["offset"]
        if more > 0:
            added = count(more, "byte")
            found.append(f"{plain_name(path)}: has grown by {added} since its end was read; they are not in the stream")
    return found


def _last_position(out: str, end: End) -> tuple[RunPosition, list[str]]:
    if not end.chunks:
        return RunPosition(sources=()), []
    path = Path(out, seal_name(end.chunks - 1))
    source = Seal.decode(read_file(path), end.chunks - 1, str(path)).source
    return decode_position(source, out), source_names(source)
