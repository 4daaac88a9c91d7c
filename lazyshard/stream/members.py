"""The writers of a stream that has several, and what its sequencer has told them."""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.format.records import END, HEAD, End, Head, printable
from lazyshard.format.writers import WRITERS, Committed, Sequenced, is_writer_name, piece_stream_id
from lazyshard.store.files import check_folder, find_record, is_folder, is_there, list_names, read_record, read_seal
from lazyshard.stream.head import STALE_HEARTBEAT_S, format_seconds, process_gone
from lazyshard.stream.listing import Published, invalid, read_manifest
from lazyshard.stream.stream import NativeStream

_SHOWN: Final = 8  # writers named in a message
RETRY_S: Final = 1.0  # until a writer in trouble, or the lock, is tried again


class SequencedWriter:
    """A writer, as the sequencer sees it."""

    def __init__(self, name: str, folder: Path, stream_id: str) -> None:
        self.name, self.folder, self._stream_id = name, folder, piece_stream_id(stream_id, name)
        self.taken, self.chunk = 0, 0  # its rows in the shared stream, and the last chunk with some
        self.published = Published(0, 0, False)
        self.trouble = ""  # why its pieces are not taken
        self._stream: NativeStream | None = None
        self._seen: tuple[int, int, int] | None = None
        self._due = 0.0

    @property
    def left(self) -> int:
        """Rows that are published and not in the shared stream yet."""
        return self.published.samples - self.taken

    def look(self, now: float, *, fresh: bool) -> None:
        """Refreshes what is published: at once if `fresh` or its `head.json` is another file, else once a second."""
        try:
            status = os.stat(self.folder / HEAD)
            seen = status.st_ino, status.st_mtime_ns, status.st_size
        except FileNotFoundError:
            seen = None
        if not fresh and now < self._due and (seen == self._seen or self.trouble):
            return
        self._seen, self._due = seen, now + RETRY_S
        if self._stream is None:
            if (manifest := read_manifest(self.folder, None)) is None:
                return
            self._check_identity(manifest.stream_id)
            self._stream = NativeStream(self.folder, manifest)
        self.published = self._stream.published()
        # Its process may have been killed before `head.json` told so.
        if not self.published.ended and (end := find_record(self.folder / END, End.decode)) is not None:
            self.published = Published(end.chunks, end.samples, True)
        self._check_published()
        self.trouble = ""

    def _check_identity(self, stream_id: str) -> None:
        if stream_id != self._stream_id:
            raise invalid(self.folder, "holds the stream of another writer, or of another shared stream")

    def _check_published(self) -> None:
        if self.left < 0:
            what = f"{self.taken:,} of its rows are in the stream, {self.published.samples:,} are here; restore it from"
            raise invalid(self.folder, f"{what} a copy, or use another writer's name")

    def fail(self, cause: Exception) -> None:
        """Remembers why its pieces are not taken."""
        self.trouble = f"{cause}" if isinstance(cause, LazyShardError) else f"{self.folder}: {cause}"


def has_ended(directory: Path) -> bool:
    """Whether the stream has ended and `head.json` tells readers so: a sequencer may be killed in between."""
    with contextlib.suppress(OSError, LazyShardError):
        return is_there(directory / END) and read_record(directory / HEAD, Head.decode).ended
    return False


_decode_committed: Final = lru_cache(maxsize=8)(Committed.decode)  # writers that wait find the same bytes again


def read_committed(directory: Path) -> Committed | None:
    """Returns what the sequencer has told last; None where nothing of it can be read."""
    with contextlib.suppress(OSError, LazyShardError):
        return read_record(directory / WRITERS / Committed.NAME, _decode_committed)
    return None


def writer_names(directory: Path) -> list[str]:
    """Returns the names of the writers that have a folder in a stream, in order. Raises OSError."""
    folder = directory / WRITERS
    try:
        names = list_names(check_folder(folder))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if is_writer_name(name) and is_folder(folder / name))


def describe_writers(directory: Path, now: float) -> str | None:
    """Describes which writers will publish nothing soon, "" if none; None if the stream does not have several.

    Reads the head of each.
    """
    try:
        names = writer_names(directory)
    except (LazyShardError, OSError):
        return None
    if not names:
        return None
    found = []
    for name in names:
        try:
            head = read_record(directory / WRITERS / name / HEAD, Head.decode)
        except (LazyShardError, OSError):
            found.append(f"{name} has not begun, or its head.json cannot be read")
            continue
        age, who = max(0.0, now - head.updated_at), f"{name} (pid {head.pid} on {printable(head.host)})"
        if head.state == "failed":
            found.append(f"{who} has failed")
        elif head.state == "idle":
            found.append(f"{who} was stopped")
        elif not head.ended and process_gone(head):
            found.append(f"{who} no longer runs")
        elif not head.ended and age > STALE_HEARTBEAT_S:
            found.append(f"{who} has given no sign of life for {format_seconds(age)}")
    more = f", and {len(found) - _SHOWN:,} more like that" if len(found) > _SHOWN else ""
    return f"; of its {len(names):,} writers: {', '.join(found[:_SHOWN])}{more}" if found else ""


def read_position(directory: Path) -> Sequenced:
    """Returns the position of the sequencer, by the newest seal. Raises StreamInvalid, OSError."""
    manifest = read_manifest(directory, None)
    if manifest is None:
        return Sequenced({})
    chunks = NativeStream(directory, manifest).published().chunks
    if not chunks:
        return Sequenced({})
    if (found := Sequenced.read_source(read_seal(directory, chunks - 1).source)) is None:
        raise invalid(directory, f"chunk {chunks - 1} was not sealed by a sequencer of writers", chunks - 1)
    return found
