"""The sequencer of a stream with several writers: it gives their chunks, the pieces, numbers in the stream.

Each writer publishes into a stream of its own, `.writers/NAME`, with its own lock, recovery and position. The sequencer
is the only producer of the shared stream: it holds that one's lock and fencing token, publishes each piece as the next
chunk, in fair turn, by giving its files a second name, and seals it. Its position is in every seal: how many rows of
each writer the stream has. So a restarted sequencer continues after the newest seal, whatever was on its way.

A crash leaves at most linked files without a seal, which recovery removes: the piece is still in its writer's folder.
A writer deletes pieces only when `committed.json` names them, which is written after their seal is durable.

When a writer has ended, its remainder is fewer rows than a chunk. Remainders are copied, together, into chunks: when
they fill one, and the last ones at the end of the stream.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded
from lazyshard.format.batch import CheckedArrays, CheckedLines
from lazyshard.format.records import END, HEAD, LOCK, End, Head, Manifest, chunk_name, seal_name
from lazyshard.format.seal import SealBytes
from lazyshard.format.writers import (
    WRITERS,
    Committed,
    EndRequest,
    Sequenced,
    WriterRows,
    is_writer_name,
    piece_stream_id,
)
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.files import (
    UrlPath,
    check_folder,
    is_folder,
    is_there,
    list_names,
    read_file,
    read_record,
    read_seal,
)
from lazyshard.stream.chunk import Chunk, open_sealed
from lazyshard.stream.head import FIRST_REQUEST_S, own_process, process_gone
from lazyshard.stream.listing import Published, invalid, read_manifest
from lazyshard.stream.stream import NativeStream

if TYPE_CHECKING:
    from lazyshard.format.seal import Seal
    from lazyshard.stream.writer import ChunkWriter

BEAT_S: Final = 1.0  # how often `committed.json` shows that the sequencer is alive
LEASE_S: Final = 4.0  # another process takes over after as long without a beat
RETRY_S: Final = 1.0  # until a writer in trouble, or the lock, is tried again
FIRST_POLL_S: Final = 0.005
LAST_POLL_S: Final = 0.02  # a poll is one stat for each writer
_HEARTBEAT_S: Final = 5.0
_HOLD_S: Final = 0.2  # a wait for the gate that readers are told of
_SLICE_BYTES: Final = 1 << 20


class Limited(Protocol):
    """Why the next chunk may not be published yet."""

    @property
    def reason(self) -> str:
        """Returns it in words, on one line."""


class Gate(Protocol):
    """The limits of a stream, asked by its sequencer with the published chunks and samples."""

    def before_chunk(self, published_chunks: int, published_samples: int) -> Limited | None:
        """Returns why the next chunk may not be published yet, None if it may."""

    def after_publish(self, published_chunks: int) -> None:
        """Called after a publish; may delete chunks."""


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
            if manifest.stream_id != self._stream_id:
                raise invalid(self.folder, "holds the stream of another writer, or of another shared stream")
            self._stream = NativeStream(self.folder, manifest)
        self.published = self._stream.published()
        if not self.published.ended:
            # Its process may have been killed before `head.json` told so.
            with contextlib.suppress(FileNotFoundError):
                end = read_record(self.folder / END, End.decode)
                self.published = Published(end.chunks, end.samples, True)
        if self.left < 0:
            what = f"{self.taken:,} of its rows are in the stream, {self.published.samples:,} are here; restore it from"
            raise invalid(self.folder, f"{what} a copy, or use another writer's name")
        self.trouble = ""

    def fail(self, cause: Exception) -> None:
        """Remembers why its pieces are not taken."""
        self.trouble = f"{cause}" if isinstance(cause, LazyShardError) else f"{self.folder}: {cause}"


class Sequencer:
    """Publishes what the writers of a stream have published. Its calls raise as those of `ChunkWriter`.

    Args:
        writer: the writer of the shared stream.
        gate: the limits of the stream; None: there are none.
        beat: a number greater than that of any sequencer before.

    Attributes:
        hold: why the gate holds the next chunk back; "" if it does not.
    """

    def __init__(self, writer: ChunkWriter, gate: Gate | None, beat: int) -> None:
        self._writer, self._gate, self._beat = writer, gate, beat
        self.directory, self._size = writer.directory, writer.samples_per_chunk
        manifest = read_manifest(self.directory, None)
        assert manifest is not None
        self._manifest: Manifest = manifest
        self.members: dict[str, SequencedWriter] = {}
        self.ended, self.hold = False, ""
        self._turn, self._process = 0, own_process()
        self._told = self._beaten = self._listed = 0.0
        if writer.source is not None:
            if (found := Sequenced.read_source(writer.source)) is None:
                raise invalid(
                    self.directory, "the newest seal does not say which rows of its writers are in the stream"
                )
            for name, (taken, chunk) in found.taken.items():
                member = self._add(name)
                member.taken, member.chunk = taken, chunk
        self._tell()

    def turn(self) -> int:
        """Publishes at most one piece of each writer, and remainders if they fill a chunk; returns how many chunks.

        Ends the stream if all writers have ended, or its end was requested, and nothing is left to publish.
        """
        before, now = self._writer.published_chunks, time.monotonic()
        # In this order: a writer that has ended before the request is seen.
        requested = self._look(now)
        self.hold = ""
        members = list(self.members.values())
        self._turn = (self._turn + 1) % max(1, len(members))
        for member in members[self._turn :] + members[: self._turn]:
            if not member.trouble and member.left >= self._size:
                if self._is_held():
                    break
                self._take(member)
                self._show_alive()
        rests = [one for one in members if one.published.ended and 0 < one.left < self._size and not one.trouble]
        if not self.hold and sum(one.left for one in rests) >= self._size:
            rests = self._sound(rests)
        while not self.hold and sum(one.left for one in rests) >= self._size and not self._is_held():
            self._merge(rests)
        self._writer.settle()
        published = self._writer.published_chunks - before
        if published and self._gate is not None:
            self._gate.after_publish(self._writer.published_chunks)
        if not published and not self.hold and self._is_complete(requested):
            rests = self._sound(rests)
            # Unless a remainder cannot be read.
            if self._is_complete(requested):
                self._end(rests)
        if published and not self.ended:
            self._tell()
        self._show_alive()
        every_s = _HOLD_S if self.hold and self._writer.state != "waiting" else _HEARTBEAT_S
        if published:
            self._told = now
        elif not self.ended and now - self._told >= every_s:
            self._told = now
            self._writer.heartbeat("waiting" if self.hold else "running", self.hold)
        return published

    def close(self) -> None:
        """Lets another process take over at once."""
        with contextlib.suppress(OSError, LazyShardError, ValueError):
            self._tell(stopped=True)
        self._writer.close(end=False)

    def _add(self, name: str) -> SequencedWriter:
        folder = self.directory / WRITERS / name
        member = self.members[name] = SequencedWriter(name, folder, self._manifest.stream_id)
        return member

    def _look(self, now: float) -> bool:
        """Refreshes what the writers have published; returns whether the end of the stream was requested."""
        fresh = (self.directory / WRITERS / EndRequest.NAME).exists()
        if fresh or now - self._listed >= 10 * LAST_POLL_S:
            self._listed = now
            for name in writer_names(self.directory):
                if name not in self.members:
                    self._add(name)
        for member in self.members.values():
            with self._trouble(member):
                check_folder(member.folder)
                member.look(now, fresh=fresh)
        return fresh

    @contextlib.contextmanager
    def _trouble(self, member: SequencedWriter) -> Iterator[None]:
        """Sets a writer aside whose pieces cannot be used: it stops no other one."""
        try:
            yield
        except (ProducerFenced, StreamEnded):
            raise
        except (LazyShardError, OSError) as cause:
            if self._writer.failed:
                raise
            member.fail(cause)

    def _is_held(self) -> bool:
        if self._gate is not None:
            held = self._gate.before_chunk(self._writer.published_chunks, self._writer.published_samples)
            self.hold = "" if held is None else held.reason
        if not self.hold:
            self._writer.state = "running"
        return bool(self.hold)

    def _take(self, member: SequencedWriter) -> None:
        with self._trouble(member):
            number = member.taken // self._size
            path = member.folder / seal_name(number)
            seal = SealBytes.decode(read_file(path), number, str(path))
            source, chunk = self._source([WriterRows(member.name, member.taken, self._size, seal.source)])
            self._writer.publish_piece(member.folder, seal, source=source)
            member.taken, member.chunk = member.taken + self._size, chunk

    def _source(self, rows: list[WriterRows]) -> tuple[dict[str, Any], int]:
        """Returns the position after a chunk of these rows, and the chunk's number."""
        chunk, taken = self._writer.full_chunks, {m.name: (m.taken, m.chunk) for m in self.members.values() if m.taken}
        taken |= {one.writer: (one.first + one.count, chunk) for one in rows}
        return Sequenced(taken, tuple(rows)).to_source(), chunk

    def _sound(self, rests: list[SequencedWriter]) -> list[SequencedWriter]:
        """Returns the writers whose remainders can be read: all rows are checked before any of them is written."""
        for member in rests:
            with self._trouble(member):
                for _ in checked_slices(*self._remainder(member, member.left)):
                    self._show_alive()
        return [one for one in rests if not one.trouble]

    def _merge(self, rests: list[SequencedWriter]) -> None:
        """Fills a chunk with remainders, or takes all of them if they are fewer rows."""
        room, parts = self._size, list[tuple[SequencedWriter, int]]()
        for member in rests:
            if count := min(room, member.left):
                parts.append((member, count))
                room -= count
        self._fill(parts)

    def _fill(self, parts: list[tuple[SequencedWriter, int]]) -> None:
        """Copies so many rows of each remainder into the next chunk."""
        rows = list[WriterRows]()
        for member, count in parts:
            seal = read_seal(member.folder, member.taken // self._size)
            rows.append(WriterRows(member.name, member.taken, count, seal.source))
        source, chunk = self._source(rows)
        for member, count in parts:
            for lines in checked_slices(*self._remainder(member, count)):
                self._writer.write_lines(lines, source=source)
                self._show_alive()
        for member, count in parts:
            member.taken, member.chunk = member.taken + count, chunk

    def _remainder(self, member: SequencedWriter, count: int) -> tuple[Chunk, Seal, int, int]:
        number, first = divmod(member.taken, self._size)
        seal = read_seal(member.folder, number)
        return open_sealed(member.folder / chunk_name(number), seal), seal, first, first + count

    def _is_complete(self, requested: bool) -> bool:
        declared = self._manifest.writers
        members = self.members.values()
        if any(not one.trouble and one.left >= self._size for one in members):
            return False
        if requested:
            return True
        wanted = declared if isinstance(declared, int) else len(declared or ())
        return (
            bool(wanted) and len(members) >= wanted and all(one.published.ended and not one.trouble for one in members)
        )

    def _end(self, rests: list[SequencedWriter]) -> None:
        # Before the last chunk, whose seal is published only when the stream ends.
        self._tell(stopped=True)
        if rests:
            self._merge(rests)
        self._writer.close()
        self.ended = True

    def _show_alive(self) -> None:
        if not self.ended and time.monotonic() - self._beaten >= BEAT_S:
            self._tell()

    def _tell(self, *, stopped: bool = False) -> None:
        self._beaten, self._beat = time.monotonic(), self._beat + 1
        taken = {one.name: [one.taken, one.chunk] for one in self.members.values() if one.taken}
        refused = {one.name: one.trouble for one in self.members.values() if one.trouble}
        told = Committed(
            self._writer.published_chunks,
            taken,
            refused,
            stopped,
            self._beat,
            socket.gethostname() or "unknown",
            os.getpid(),
            time.time(),
            self._process,
        )
        self._put_told(told)

    def _put_told(self, told: Committed) -> None:
        target = self.directory / WRITERS / Committed.NAME
        try:
            publish_bytes(told.encode(), target, self._writer.check_owner() / Committed.NAME, durable=False)
        except OSError:
            # Raises ProducerFenced if that is because another process has taken over.
            self._writer.check_owner()
            raise


def checked_slices(chunk: Chunk, seal: Seal, first: int, stop: int) -> Iterator[CheckedLines]:
    """Yields rows of a chunk, checked, about 1 MiB at a time."""
    while first < stop:
        lines = chunk.lines(first, stop, 1, _SLICE_BYTES)
        end = first + len(lines)
        ends = seal.offsets[first + 1 : end + 1] - seal.offsets[first]
        tokens = None if seal.tokens is None else seal.tokens[first:end]
        arrays = None
        if chunk.arrays is not None:
            data = chunk.arrays.read_rows(first, end).tobytes()
            arrays = CheckedArrays(data, chunk.arrays.ends(first, end), chunk.arrays.digests(first, end))
        yield CheckedLines(b"".join(lines), ends, np.asarray(seal.digests[first:end]), tokens=tokens, arrays=arrays)
        first = end


class Sequencing:
    """Becomes the sequencer of a stream when there is none, and does its work, step by step.

    Args:
        directory: the stream's directory or URL.
        open_stream: opens its writer, see `lazyshard.stream.writer.open_sequenced`.
        gate: returns the limits of the stream, by that writer; None: there are none.
        kind: the class of its sequencer.

    Attributes:
        sequencer: None while another process is it.
        ended: whether the stream has ended.
    """

    def __init__(
        self,
        directory: Path,
        open_stream: Callable[[], ChunkWriter],
        gate: Callable[[ChunkWriter], Gate] | None = None,
        kind: Callable[[Any, Gate | None, int], Sequencer] = Sequencer,
    ) -> None:
        self.directory, self._open_stream, self._gate, self._kind = directory, open_stream, gate, kind
        # In an object store each poll is a request.
        remote = isinstance(directory, UrlPath)
        self._polls = (FIRST_REQUEST_S, RETRY_S) if remote else (FIRST_POLL_S, LAST_POLL_S)
        self._idle_s = RETRY_S if remote else RETRY_S / 4
        self.sequencer: Sequencer | None = None
        self.ended = False
        self._seen: tuple[Committed | None, float] | None = None  # what was told last, and when that was first seen
        self._try_at = 0.0
        self._pause = self._polls[0]

    def step(self) -> float:
        """Does what can be done now; returns in how many seconds to call it again. Raises as `ChunkWriter`.

        After an error another process may take over, and so may this one, with the next call.
        """
        if self.ended:
            return RETRY_S
        try:
            if self.sequencer is None and not self._begin():
                return self._idle_s
            assert self.sequencer is not None
            published = self.sequencer.turn()
            self.ended = self.sequencer.ended
        except ProducerFenced:
            self.close()
            return RETRY_S
        except StreamEnded:
            self.close()
            self.ended = True
        except BaseException:
            self._try_at = time.monotonic() + RETRY_S
            self.close()
            raise
        else:
            self._pause = self._polls[0] if published else min(self._polls[1], 1.2 * self._pause)
            return 0.0 if published else self._pause
        return 0.0

    def close(self) -> None:
        """Lets another process take over."""
        if (sequencer := self.sequencer) is not None:
            self.sequencer = None
            with contextlib.suppress(OSError, LazyShardError):
                sequencer.close()

    def _begin(self) -> bool:
        now = time.monotonic()
        if now < self._try_at:
            return False
        self.ended = has_ended(self.directory)
        found = read_committed(self.directory)
        if self._seen is None or found != self._seen[0]:
            # What another process has told before this one started may be as old as the stream.
            self._seen = found, now
        alive = found is not None and not found.stopped and not process_gone(found)
        expired = now - self._seen[1] >= LEASE_S
        if self.ended or (alive and not expired):
            return False
        self._try_at = now + RETRY_S
        if expired and not isinstance(self.directory, UrlPath):
            # A process that is stopped, or hangs, may keep this machine's lock: from here on fencing keeps it out.
            remove(self.directory / LOCK)
        writer = self._open_stream()
        try:
            gate = None if self._gate is None else self._gate(writer)
            self.sequencer = self._kind(writer, gate, found.beat if found else 0)
        except BaseException:
            writer.close(end=False)
            raise
        return True


def has_ended(directory: Path) -> bool:
    """Whether the stream has ended and `head.json` tells readers so: a sequencer may be killed in between."""
    with contextlib.suppress(OSError, LazyShardError):
        return is_there(directory / END) and read_record(directory / HEAD, Head.decode).ended
    return False


def read_committed(directory: Path) -> Committed | None:
    """Returns what the sequencer has told last; None where nothing of it can be read."""
    with contextlib.suppress(OSError, LazyShardError):
        return read_record(directory / WRITERS / Committed.NAME, Committed.decode)
    return None


def writer_names(directory: Path) -> list[str]:
    """Returns the names of the writers that have a folder in a stream, in order. Raises OSError."""
    folder = directory / WRITERS
    try:
        names = list_names(check_folder(folder))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if is_writer_name(name) and is_folder(folder / name))


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
