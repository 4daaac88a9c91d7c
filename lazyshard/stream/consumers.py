"""The consumers of a stream: what each has told of itself, and how one that will not come back is forgotten.

Files, in `cursors/`: `NAME.json`, the cursor (`lazyshard.stream.cursor`), and `NAME.reading.json`, a hint that is
replaced whole by a reader and never synced. Either may be missing. While a hint is being written there is
`.NAME.reading.TOKEN`, which a kill may leave behind. Any other name is passed over, the lock file `.NAME.lock` too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from lazyshard.errors import FormatInvalid
from lazyshard.format import cursor as names
from lazyshard.format.cursor import Cursor, ReadingHint, check_consumer, cursor_name, reading_name
from lazyshard.format.names import CURSORS
from lazyshard.store.durable import publish_bytes, remove, sync_directory
from lazyshard.store.files import check_folder, list_names, read_file, unreadable
from lazyshard.store.urls import UrlPath, stream_path
from lazyshard.stream.cursor import read_cursor, remove_lock
from lazyshard.stream.listing import read_manifest

_log = logging.getLogger("lazyshard")

_told: set[str] = set()  # files of which this process has said that they cannot be written


@dataclass(frozen=True, slots=True)
class Consumer:
    """What a consumer has told of itself. With a problem it is done with nothing."""

    name: str
    cursor: Cursor | None  # how far its durable checkpoints are; None where it has none that counts
    reading: ReadingHint | None  # a hint of what it needs to read on, None where it has not told, or of another stream
    problem: str | None  # why its cursor does not count, in words

    @property
    def chunks_before(self) -> int:
        """It is done with the chunks of the half-open range [0, chunks_before); without a cursor, with none."""
        return 0 if self.cursor is None else self.cursor.chunks_before


def list_consumers(directory: str | os.PathLike[str], published_chunks: int | None = None) -> tuple[Consumer, ...]:
    """Returns the consumers that have a cursor or a reading hint, by name.

    A cursor that is torn, unreadable, of another stream, or ahead of the `published_chunks`, if they are given, never
    raises: it is a `problem` of its consumer, whose chunks must be kept.

    Raises:
        AccessRefused, OSError: the folder of cursors cannot be listed: who the consumers are is not known.
        FileInvalid, VersionUnsupported: `stream.json` cannot be used.
    """
    stream = stream_path(directory)
    manifest = read_manifest(stream, None)
    stream_id = None if manifest is None else manifest.stream_id
    folder = stream / CURSORS
    try:
        entries = list_names(check_folder(folder))
    except FileNotFoundError:
        return ()
    except PermissionError as cause:
        raise unreadable(folder) from cause
    found = sorted({name for name in map(_consumer_of, entries) if name is not None})
    return tuple(_consumer(stream, name, stream_id, published_chunks) for name in found)


def forget_consumer(directory: str | os.PathLike[str], name: str) -> bool:
    """Removes a consumer's cursor, reading hint and lock file; returns, once durable, whether there was any.

    From then on nothing is kept for it. One that is still alive registers again with its next checkpoint. Raises
    ValueError: there can be no consumer of this name. OSError: the filesystem refused.
    """
    folder = check_folder(stream_path(directory) / CURSORS)
    own = (reading_name(name), cursor_name(name))
    try:
        found = set(list_names(folder))
    except FileNotFoundError:
        return False
    # What a kill has left half written is the consumer's too.
    temporary = re.compile(rf"\.{re.escape(name)}\.(reading\.)?[0-9a-f]{{16}}")
    left = list(filter(temporary.fullmatch, found))
    # The cursor last: as long as it is there the consumer is known, and this can be repeated.
    for path in (folder / entry for entry in (*left, *own)):
        if isinstance(path, UrlPath):
            path.store.delete(path.key)
        else:
            remove(path)
    remove_lock(directory, name)
    if not isinstance(folder, UrlPath):
        sync_directory(folder)
    return not found.isdisjoint(own)


def write_reading(directory: str | os.PathLike[str], hint: ReadingHint) -> bool:
    """Replaces a consumer's reading hint, whole; returns whether it was written.

    Reading goes on without it, so an error of the filesystem is logged, once in each process for each file. Not
    guaranteed: that it survives a power cut, and that of two processes which write at a time the higher one stays.
    """
    folder = stream_path(directory) / CURSORS
    target = folder / reading_name(hint.consumer)
    temporary = folder / f".{hint.consumer}.reading.{secrets.token_hex(8)}"
    try:
        if isinstance(target, UrlPath):
            # Once: a store that does not answer is not waited for to give it a hint.
            target.store.put(target.key, hint.encode(), patience_s=0)
            return True
        folder.mkdir(exist_ok=True)
        check_folder(folder)
        try:
            publish_bytes(hint.encode(), target, temporary, durable=False)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(temporary)
            raise
    except OSError as error:
        if str(target) not in _told:
            _told.add(str(target))
            refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            remedy = f"; let uid {os.geteuid()} write to {folder}" if refused else ""
            _log.warning(
                "%s: cannot be written (%s), so the producer is not told how far this run reads: one that goes no "
                "further ahead than its consumers need may hold back what this run waits for%s",
                *(target, error.strerror or error, remedy),
            )
        return False
    return True


def read_reading(directory: str | os.PathLike[str], consumer: str) -> ReadingHint | None:
    """Returns a consumer's reading hint, None if there is none that can be used: it is a hint.

    Whether it belongs to the stream that is in the directory now is told by its `stream_id`.
    """
    path = stream_path(directory) / CURSORS / reading_name(consumer)
    try:
        check_folder(path.parent)
        return ReadingHint.decode(read_file(path), consumer, str(path))
    except (OSError, FormatInvalid):
        return None


def _consumer_of(entry: str) -> str | None:
    for suffix in (names.READING_SUFFIX, names.CURSOR_SUFFIX):
        if entry.endswith(suffix):
            with contextlib.suppress(ValueError):
                return check_consumer(entry.removesuffix(suffix))
            return None
    return None


def _consumer(stream: Path, name: str, stream_id: str | None, published_chunks: int | None) -> Consumer:
    reading = read_reading(stream, name)
    if reading is not None and reading.stream_id != stream_id:
        reading = None
    try:
        cursor = read_cursor(stream, name)
    except (FormatInvalid, OSError) as error:
        return Consumer(name, None, reading, str(error))
    problem = None if cursor is None else _problem(stream, cursor, stream_id, published_chunks)
    return Consumer(name, None if problem else cursor, reading, problem)


def _problem(stream: Path, cursor: Cursor, stream_id: str | None, published_chunks: int | None) -> str | None:
    """Returns why a cursor that can be read does not count, None where it does."""
    path, chunks = stream / CURSORS / cursor_name(cursor.consumer), cursor.chunks_before
    if cursor.stream_id != stream_id:
        was, now = (f"stream {one}" if one else "a stream without stream.json" for one in (cursor.stream_id, stream_id))
        return f"{path}: of {was}, in the directory is {now}"
    if published_chunks is not None and chunks > published_chunks:
        return f"{path}: is done with {chunks:,} chunks, of which only {published_chunks:,} are published"
    return None
