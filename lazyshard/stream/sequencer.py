"""The sequencer of a stream with several writers: it gives their chunks, the pieces, numbers in the stream.

Each writer publishes into a stream of its own, `.writers/NAME`, with its own lock, recovery and position. The sequencer
is the only producer of the shared stream: it holds that one's lock and fencing token, publishes each piece as the next
chunk, in fair turn, by giving its files a second name, and seals it. Its position is in every seal: how many rows of
each writer the stream has. So a restarted sequencer continues after the newest seal, whatever was on its way.

Pieces that wait are published together, up to `TOGETHER`: they share the sync of the names of their data, `head.json`
and `committed.json`. Each seal is durable before the next one appears.

A crash leaves at most linked files without a seal, which recovery removes: the piece is still in its writer's folder.
A writer deletes pieces only when `committed.json` names them, which is written after their seal is durable.

When a writer has ended, its remainder is fewer rows than a chunk. Remainders are copied, together, into chunks: when
they fill one, and the last ones at the end of the stream.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded
from lazyshard.format.batch import CheckedArrays, CheckedLines
from lazyshard.format.records import LOCK, Manifest, chunk_name, seal_name
from lazyshard.format.seal import Seal, SealBytes
from lazyshard.format.writers import WRITERS, Committed, EndRequest, Sequenced, WriterRows
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.files import UrlPath, check_folder, read_file, read_seal
from lazyshard.stream.chunk import Chunk, open_sealed
from lazyshard.stream.head import HEARTBEAT_S, own_process, process_gone
from lazyshard.stream.listing import invalid, read_manifest
from lazyshard.stream.members import RETRY_S, SequencedWriter, has_ended, read_committed, writer_names
from lazyshard.stream.publishing import SealedPiece
from lazyshard.stream.waiting import first_poll

if TYPE_CHECKING:
    from lazyshard.stream.writer import ChunkWriter

BEAT_S: Final = 1.0  # how often `committed.json` shows that the sequencer is alive
LEASE_S: Final = 4.0  # another process takes over after as long without a beat
LAST_POLL_S: Final = 0.02  # a poll is one stat for each writer
TOGETHER: Final = 8  # pieces that share the sync of a directory, `head.json` and `committed.json`
_HOLD_S: Final = 0.2  # a wait for the gate that readers are told of
_SLICE_BYTES: Final = 1 << 20


class Gate(Protocol):
    """The limits of a stream, asked by its sequencer with the published chunks and samples."""

    def before_chunk(self, published_chunks: int, published_samples: int) -> str | None:
        """Returns why the next chunk may not be published yet, in words on one line; None if it may."""

    def fits(self, published_chunks: int, more: int) -> bool:
        """Returns whether so many more chunks may be published together with one that may; changes nothing."""

    def after_publish(self, published_chunks: int) -> None:
        """Called after a publish; may delete chunks."""


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
        self._turn, self._together, self._process = 0, TOGETHER, own_process()
        self._told = self._beaten = self._listed = 0.0
        if writer.source is not None:
            if (found := Sequenced.read_source(writer.source)) is None:
                what = "the newest seal does not say which rows of its writers are in the stream"
                raise invalid(self.directory, what)
            for name, (taken, chunk) in found.taken.items():
                member = self._add(name)
                member.taken, member.chunk = taken, chunk
        self._tell()

    def turn(self) -> int:
        """Publishes the next pieces together, and remainders if they fill a chunk; returns how many chunks.

        Ends the stream if all writers have ended, or its end was requested, and nothing is left to publish.
        """
        before, now = self._writer.published_chunks, time.monotonic()
        # In this order: a writer that has ended before the request is seen.
        requested = self._look(now)
        self.hold = ""
        members = list(self.members.values())
        self._turn = (self._turn + 1) % max(1, len(members))
        self._take(members[self._turn :] + members[: self._turn], self._together)
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
        every_s = _HOLD_S if self.hold and self._writer.state != "waiting" else HEARTBEAT_S
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
            published = self._writer.published_chunks, self._writer.published_samples
            self.hold = self._gate.before_chunk(*published) or ""
        if not self.hold:
            self._writer.state = "running"
        return bool(self.hold)

    def _take(self, members: list[SequencedWriter], most: int) -> None:
        """Publishes at most so many pieces together: one of each writer, in this order, then the next ones."""
        waiting, pieces, after = deque(members), list[SealedPiece](), self._taken()
        while waiting and len(pieces) < most:
            member = waiting.popleft()
            taken, _ = after.get(member.name, (0, 0))
            if member.trouble or member.published.samples - taken < self._size:
                continue
            gate, published = self._gate, self._writer.published_chunks
            if self._is_held() if not pieces else gate is not None and not gate.fits(published, len(pieces)):
                break
            with self._trouble(member):
                number, chunk = taken // self._size, self._writer.full_chunks + len(pieces)
                if (seal := self._seal(member, number)) is None:
                    continue
                position = after | {member.name: (taken + self._size, chunk)}
                rows = WriterRows(member.name, taken, self._size, seal.source)
                pieces.append(SealedPiece(member.folder, seal, Sequenced(position, (rows,)).to_source()))
                waiting.append(member)
                after = position
        if pieces:
            began = time.monotonic()
            self._writer.publish_pieces(pieces)
            self._took(after)
            # Nothing shows meanwhile that the sequencer is alive.
            slow = time.monotonic() - began > BEAT_S / 2
            self._together = max(1, self._together // 2) if slow else min(TOGETHER, 2 * self._together)

    def _seal(self, member: SequencedWriter, number: int) -> SealBytes | None:
        """Returns the seal of a piece that can be published, None if incomplete. Raises as `SealedPiece.check`."""
        path = member.folder / seal_name(number)
        seal = SealBytes.decode(read_file(path), number, str(path))
        SealedPiece(member.folder, seal, None).check(self._size, arrays=self._writer.arrays)
        return seal

    def _taken(self) -> dict[str, tuple[int, int]]:
        """Returns the position after the last published chunk."""
        return {one.name: (one.taken, one.chunk) for one in self.members.values() if one.taken}

    def _took(self, taken: Mapping[str, tuple[int, int]]) -> None:
        """Goes on from a position, that of the chunks that were published last."""
        for name, (rows, chunk) in taken.items():
            self.members[name].taken, self.members[name].chunk = rows, chunk

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
        after = self._taken() | {one.writer: (one.first + one.count, self._writer.full_chunks) for one in rows}
        source = Sequenced(after, tuple(rows)).to_source()
        for member, count in parts:
            for lines in checked_slices(*self._remainder(member, count)):
                self._writer.write_lines(lines, source=source)
                self._show_alive()
        self._took(after)

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
        complete = all(one.published.ended and not one.trouble for one in members)
        return complete and 0 < wanted <= len(members)

    def _end(self, rests: list[SequencedWriter]) -> None:
        # Before the last chunk, whose seal is published only when the stream ends. Not as stopped: until then no other
        # process may take over.
        self._tell()
        if rests:
            self._merge(rests)
        self._writer.close()
        self.ended = True

    def _show_alive(self) -> None:
        if not self.ended and time.monotonic() - self._beaten >= BEAT_S:
            self._tell()

    def _tell(self, *, stopped: bool = False) -> None:
        self._beaten, self._beat = time.monotonic(), self._beat + 1
        taken = {name: list(one) for name, one in self._taken().items()}
        refused = {one.name: one.trouble for one in self.members.values() if one.trouble}
        who = socket.gethostname() or "unknown", os.getpid(), time.time(), self._process
        self._put_told(Committed(self._writer.published_chunks, taken, refused, stopped, self._beat, *who))

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
        tokens, patches = (None if one is None else one[first:end] for one in (seal.tokens, seal.patches))
        arrays = None
        if chunk.arrays is not None:
            data = chunk.arrays.read_rows(first, end).tobytes()
            arrays = CheckedArrays(data, chunk.arrays.ends(first, end), chunk.arrays.digests(first, end))
        digests = np.asarray(seal.digests[first:end])
        yield CheckedLines(b"".join(lines), ends, digests, tokens=tokens, arrays=arrays, patches=patches)
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
        self._polls = first_poll(directory), RETRY_S if remote else LAST_POLL_S
        self._idle_s = RETRY_S if remote else RETRY_S / 4
        self.sequencer: Sequencer | None = None
        self.ended = False
        self._seen: tuple[Committed | None, float] | None = None  # what was told last, and when that was first seen
        self._try_at = 0.0
        self._pause, self._fenced_s = self._polls[0], self._idle_s / 4

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
            # With jitter, since processes whose locks do not meet fence each other.
            self._fenced_s = min(4 * RETRY_S, 2 * self._fenced_s)
            self._try_at = time.monotonic() + self._fenced_s * (1 + random.random())  # noqa: S311
            return self._idle_s
        except StreamEnded:
            self.close()
            self.ended = True
        except BaseException:
            self._try_at = time.monotonic() + RETRY_S
            self.close()
            raise
        else:
            self._fenced_s = self._idle_s / 4
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
