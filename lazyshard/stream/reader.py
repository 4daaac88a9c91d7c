"""Rows of a stream by sample number, waiting for those that are not there yet."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from lazyshard.errors import ChunkCorrupt, ChunkMissing, ChunkRetired, LazyShardError, StreamMissing
from lazyshard.format.batch import CheckedArrays
from lazyshard.format.names import CURSORS, HEAD, RETIRED
from lazyshard.format.seal import DealtByCost
from lazyshard.store.urls import check_place, stream_path
from lazyshard.stream.chunk import Chunk
from lazyshard.stream.head import format_seconds, next_poll, next_report
from lazyshard.stream.listing import Published, invalid
from lazyshard.stream.node_poll import HEAD_SLOT, RETIRED_SLOT, NodePoll, decode_head
from lazyshard.stream.stream import Stream, open_stream
from lazyshard.stream.waiting import Waiting

# How long a file of a chunk that `head.json` has named may stay invisible: network filesystems remember for up to a
# minute that a name did not exist
GRACE_S: Final = 60.0
# How often to look which chunks were deleted: a file that is open takes its room on the disk until it is closed
_LET_GO_S: Final = 1.0
_AHEAD_BYTES: Final = 512 << 10
# Reading ahead starts small and doubles with every look that goes on where the last one stopped
_FIRST_AHEAD_BYTES: Final = 16 << 10
OPEN_CHUNKS: Final = 256  # chunks held open at the most: a quarter of the usual limit of 1,024 descriptors
# Rows of all chunks held open, unless a single chunk has more: their offsets and digests take 16 bytes a row
OPEN_ROWS: Final = 1 << 20

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class StreamReader(Waiting):
    """Reads a stream, live or ended, native or foreign.

    Sample n is row n % samples_per_chunk of chunk n // samples_per_chunk.

    Every row is checked against its digest before it is returned. Safe under fork, and can be pickled (open files stay
    behind). Several threads may share one.

    Args:
        directory: the stream's directory, or its URL in an object store, like ``s3://bucket/prefix``. If there is no
            stream in it yet, the constructor waits for one; the directory above must be there.
        samples_per_chunk: needed for a foreign directory only; otherwise None or what the stream's manifest says.
        max_wait: how many seconds to wait at the most for anything that a producer has still to publish.

    Raises:
        WaitTimeout: no stream has appeared.
        StreamMissing: none can appear: the directory above is missing too.
        StreamMismatch, FileInvalid, StreamInvalid: see `lazyshard.errors`.
        AccessRefused, StoreUnavailable: the object store cannot be read; any method may raise these.
        ValueError: samples_per_chunk is needed or impossible, or max_wait is negative.

    Attributes:
        directory: the stream's directory, or its URL.
        stream_id: the stream's identity, None for a foreign directory.
        samples_per_chunk: rows in every chunk but possibly the last.
        arrays: whether rows may hold arrays: numpy arrays, each writable and the caller's own.
        encoding: what encoded rows were made with, facts by name; None for rows that are not encoded.
        label, quiet, parent, on_wait, seen, waited_s: see `Waiting`. In a pickle `parent` and `on_wait` are None.
        chunks_opened: how many times a chunk was opened.
        dealt: how the rows of the chunk that was opened last were dealt by cost; None if they were not.
    """

    def __init__(
        self, directory: str | os.PathLike[str], samples_per_chunk: int | None = None, *, max_wait: float = 600.0
    ) -> None:
        if not max_wait >= 0:
            raise ValueError(f"max_wait is 0 or more seconds, got {max_wait}")
        super().__init__(stream_path(directory), float(max_wait))
        self.chunks_opened = 0
        self.dealt: DealtByCost | None = None
        self._let_go_at = time.monotonic()
        self._next = 0
        self._ahead = _FIRST_AHEAD_BYTES
        self._stream = stream = self._wait_for_stream(samples_per_chunk)
        self.samples_per_chunk, self.stream_id = stream.samples_per_chunk, stream.stream_id
        self.arrays, self.encoding = stream.arrays, stream.encoding
        self._chunks = OpenChunks(stream)
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what is of this process only; open files stay, too."""
        fresh = {"_chunks": OpenChunks(self._stream), "waited_s": 0.0, "chunks_opened": 0}
        return self.__dict__ | fresh | {"parent": None, "on_wait": None}

    def refresh(self, wanted: int = 0) -> Published:
        """Looks what is published now; a foreign directory is listed where fewer than the samples `wanted` are known.

        Raises:
            StreamMissing: the stream's directory has gone.
            StreamInvalid: it has ended with fewer samples than were published.
            StreamMismatch: another stream is in its place.
        """
        seen = self.seen
        try:
            path = self.directory if self.stream_id is None else self.directory / HEAD
            found = self._ask(lambda: self._stream.published(wanted), "reading %s", path)
            if found.samples < seen.samples:
                # A stream that was made anew in the same place has other rows.
                self._stream.check_identity()
        except FileNotFoundError as cause:
            what = f"{self.directory}: the stream has gone while it was being read: was its directory removed, or its"
            way = "filesystem unmounted? When it is there again, continue from the last checkpoint"
            raise StreamMissing(f"{what} {way}", directory=str(self.directory)) from cause
        # A network filesystem may answer from an older copy: what was published stays so, what has ended stays ended.
        news = found.ended or not seen.ended
        if found.samples < seen.samples and found.ended:
            what = f"the stream has ended with {found.samples:,} samples, but {seen.samples:,} were published before"
            raise invalid(self.directory, f"{what}; restore what is missing from a copy")
        if news and (found.samples >= seen.samples or (found.gap is not None and self.stream_id is None)):
            self.seen = found
        return self.seen

    def check_end(self) -> None:
        """Looks whether nothing lies behind the end of a foreign directory, for who leaves its last chunk out."""
        self._ask(self._stream.check_end, "looking into %s", self.directory)

    def wait_for(self, samples: int) -> Published:
        """Returns once so many samples, from the start of the stream, are published or the stream has ended.

        While it waits it logs, after 10 s and then ever more rarely, what for and what the producer is doing. Raises
        WaitTimeout: not within `max_wait`. StreamMissing: the stream's directory has gone.
        """
        if self.seen.ended or self.seen.samples >= samples:
            return self.seen
        poll = NodePoll(self.stream_id, self._identify, lambda: time.monotonic())

        def look(age: float) -> Published | None:
            poll.renew(HEAD_SLOT, age, lambda: self._look(samples), self._adopt)
            if self.seen.ended or self.seen.samples >= samples:
                return self.seen
            self._let_go(poll)
            return None

        return self._wait(look, samples, (samples - 1) // self.samples_per_chunk, poll)

    def _identify(self) -> os.stat_result:
        folder = self.directory if self._stream.mirror is None else self._stream.mirror.folder
        return self._ask(lambda: os.stat(folder), "looking into %s", folder)

    def _look(self, wanted: int) -> bytes | None:
        head = self.refresh(wanted).head
        return None if head is None else head.encode()

    def _adopt(self, data: bytes) -> bool:
        seen, found = self.seen, decode_head(data, self.samples_per_chunk)
        if found is None or found.samples < seen.samples or (seen.ended and not found.ended):
            return False
        self.seen = found
        return True

    def read(self, sample: int) -> dict[str, Any]:
        """Returns one row, waiting for it if need be.

        Raises:
            IndexError: the stream has ended before it.
            WaitTimeout: it was not published within `max_wait`.
            ChunkRetired, ChunkCorrupt, RowInvalid, OSError: it was deleted by the producer, or cannot be read.
        """
        self._check(sample)
        return self.read_published(sample, sample + 1, 1)[0]

    def lines_published(self, first: int, stop: int, at_least: int = 1) -> list[bytes]:
        """Returns the checked lines of samples of [first, stop), known to be published by `wait_for`.

        When calls follow each other in order it reads ahead, at most to the end of the chunk. Returns at least one;
        fewer than `at_least` where the chunk ends, a bad row follows, or rows are large.

        Raises:
            ChunkCorrupt: row `first` is bad.
            ChunkRetired: its chunk was deleted by the producer; found at once, unless the chunk is still open here.
            ChunkMissing: a file of its chunk did not appear within the grace period.
        """
        chunk, row = self._place(first)
        budget = min(2 * self._ahead, _AHEAD_BYTES) if first == self._next else 0
        last = min(row + stop - first, len(chunk))
        lines = self.read_from(chunk, lambda: chunk.lines(row, last, at_least, budget))
        self._ahead = max(budget, _FIRST_AHEAD_BYTES)
        self._next = first + len(lines)
        return lines

    def read_published(self, first: int, stop: int, at_least: int = 1) -> list[dict[str, Any]]:
        """Returns `lines_published`, parsed, with their arrays. Raises as that, or RowInvalid: row `first` is none."""
        if self.arrays:
            stop = self.stop_for_arrays(first, stop, at_least)
        return self.parse(self.lines_published(first, stop, at_least), first)

    def parse(self, lines: list[bytes], first: int) -> list[dict[str, Any]]:
        """Parses lines of `lines_published`, of which the first is sample `first`; see `Chunk.parse`."""
        chunk, row = self._place(first)
        if not self.arrays:
            return chunk.parse(lines, row)
        return self.read_from(chunk, lambda: chunk.parse(lines, row))

    def stop_for_arrays(self, first: int, stop: int, at_least: int = 1) -> int:
        """Returns before which sample of [first, stop) to stop, so that the arrays read together are not too large."""
        chunk, row = self._place(first)
        assert chunk.arrays is not None
        return first - row + chunk.arrays.fit(row, min(row + stop - first, len(chunk)), at_least, _AHEAD_BYTES)

    def arrays_published(self, first: int, stop: int) -> CheckedArrays:
        """Returns the checked bytes of the arrays of samples of one chunk. Raises as `lines_published`."""
        chunk, row = self._place(first)
        arrays, after = chunk.arrays, row + stop - first
        assert arrays is not None
        data = self.read_from(chunk, lambda: arrays.read_rows(row, after))
        return CheckedArrays(data.tobytes(), arrays.ends(row, after), arrays.digests(row, after))

    def line(self, sample: int) -> bytes:
        """Returns the bytes of one row, its newline included, waiting for it if need be. Raises as `read` does."""
        self._check(sample)
        return self.lines_published(sample, sample + 1)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields all rows in order to the end of the stream, waiting for those to come. Raises as `read` does."""
        sample = 0
        while (published := self.wait_for(sample + 1)).samples > sample:
            rows = self.read_published(sample, published.samples)
            yield from rows
            sample += len(rows)

    def chunk(self, number: int) -> Chunk:
        """Returns a published chunk, open. Few stay open, see `OpenChunks`. Raises as `read_published` does."""
        if (chunk := self._chunks.used(number)) is None:
            chunk = self._open(number)
            self._let_go()
            self._chunks.add(chunk)
        return chunk

    def _place(self, sample: int) -> tuple[Chunk, int]:
        number, row = divmod(sample, self.samples_per_chunk)
        return self.chunk(number), row

    def _check(self, sample: int) -> None:
        if sample < 0 or self.wait_for(sample + 1).samples <= sample:
            raise IndexError(f"{self.directory}: no sample {sample}, the stream holds {self.seen.samples} from 0 on")

    def _open(self, number: int) -> Chunk:
        started, reported = self._clock(), 0.0
        while True:
            try:
                where = "opening chunk %d of %s", number, self.directory
                chunk = self._ask(lambda: self._stream.open_chunk(number), *where)
                break
            except FileNotFoundError as cause:
                waited, file = self._clock() - started, str(cause.filename)
                self.refresh()
                if self.seen.gap is not None and self.seen.gap <= number and not self.seen.ended:
                    # A foreign directory lacks a chunk among those that were counted.
                    self.wait_for(number * self.samples_per_chunk + 1)
                    started = self._clock()
                    continue
                # Only here, so that a chunk which is there costs no more than before.
                self._check_retired(number, file, cause)
                if waited > min(GRACE_S, self.max_wait):
                    what = f"{file}: chunk {number} is published, but this file of it has not appeared within"
                    way = "restore it from a copy; `lazyshard verify` tells what else is missing"
                    missing = f"{what} {format_seconds(waited)}: {way}"
                    raise ChunkMissing(missing, file=file, chunk=number, waited=waited) from cause
                if waited >= next_report(reported):
                    reported = next_report(reported)
                    who = f"{self.label}: " if self.label else ""
                    _log.warning("%schunk %d is published, waiting for %s to appear", who, number, file)
                self._pause(next_poll(waited, None, self._least_poll), time.sleep)
        self._check_rows(chunk)
        self.chunks_opened += 1
        self.dealt = chunk.dealt
        return chunk

    def _check_rows(self, chunk: Chunk) -> None:
        if (rows := len(chunk)) == (size := self.samples_per_chunk):
            return
        seen = self.seen if self.seen.ended else self.refresh()
        wanted = min(size, seen.samples - chunk.number * size) if seen.ended else size
        if rows != wanted:
            what = f"{chunk.path.name}: expected {wanted} rows, found {rows}; only the last chunk"
            raise invalid(self.directory, f"{what} of a stream that has ended may hold fewer than {size}", chunk.number)

    def _wait_for_stream(self, samples_per_chunk: int | None) -> Stream:
        checked = False

        def look(age: float) -> tuple[Stream] | None:
            nonlocal checked
            found = self._ask(lambda: open_stream(self.directory, samples_per_chunk), "looking into %s", self.directory)
            if found is None and not checked:
                self._ask(lambda: check_place(self.directory), "looking for %s", self.directory)
                checked = True
            return None if found is None else (found,)

        return self._wait(look, 0, None, None)[0]

    def _let_go(self, poll: NodePoll | None = None) -> None:
        """Closes chunks that were deleted meanwhile: a producer may be waiting for the room that they take."""
        now = time.monotonic()
        if not self._chunks or now - self._let_go_at < _LET_GO_S:
            return
        self._let_go_at = now

        def close(retired: int) -> int:
            for number in [number for number in list(self._chunks) if number < retired]:
                self._chunks.pop(number, None)
            return retired

        def look() -> bytes:
            return b"%d" % close(self._ask(self._stream.retired, "reading %s", self.directory / RETIRED))

        def adopt(data: bytes) -> bool:
            # Another release may have written something else there.
            return data.isdigit() and len(data) < 20 and close(int(data)) >= 0

        # What cannot be told now is told by whoever reads on.
        with contextlib.suppress(LazyShardError, OSError):
            if poll is None:
                look()
            else:
                poll.renew(RETIRED_SLOT, _LET_GO_S, look, adopt)

    def read_from(self, chunk: Chunk, call: Callable[[], _T]) -> _T:
        """Returns what a call reads from an open chunk. Raises as `lines_published`."""
        try:
            return self._ask(call, "reading %s", chunk.path)
        except FileNotFoundError as cause:
            # A filesystem may not give what is open once it is deleted.
            self._chunks.pop(chunk.number, None)
            self._check_retired(chunk.number, str(chunk.path), cause)
            raise
        except ChunkCorrupt:
            if self._stream.mirror is not None:
                # The object may be whole.
                self._chunks.pop(chunk.number, None)
                self._stream.mirror.drop(chunk.number)
            raise

    def _check_retired(self, number: int, file: str, cause: OSError) -> None:
        if number < (retired := self._stream.retired()):
            what = f"{file}: chunk {number} was deleted by the stream's producer, as were all chunks below {retired}:"
            why = f"every consumer that had a cursor in {CURSORS}/ by then was done with them. Continue from a later"
            way = "checkpoint, or produce the stream anew, with --retain all, or with --consumers NAME, which deletes"
            told = f"{what} {why} {way} nothing before the consumer NAME has registered"
            raise ChunkRetired(told, file=file, chunk=number, chunks_before=retired) from cause


class OpenChunks(dict[int, Chunk]):
    """The open chunks of one reader, in the order of use; those that were not used for longest are closed.

    Of an object store no more are held than are needed, as each is kept in the cache meanwhile: one at first, and twice
    as many whenever a chunk has to be opened again that was closed only just before. Several threads may share one, and
    it may be forked at any time: each step is atomic. (An OrderedDict breaks when the end of a value lets a thread in.)
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        files = 1 + stream.arrays
        self._by_rows = max(1, OPEN_ROWS // files // stream.samples_per_chunk)
        self._grows = stream.mirror is not None
        self._most = 1 if self._grows else min(OPEN_CHUNKS // files, self._by_rows)
        self._closed: deque[int] = deque(maxlen=2)

    def used(self, number: int) -> Chunk | None:
        """Returns a chunk that is about to be used, None if it is not open."""
        if (chunk := self.pop(number, None)) is not None:
            self[number] = chunk
        return chunk

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk that was opened and is about to be used; closes others for it, if there are too many."""
        if self._grows and chunk.number in self._closed:
            # It was closed too early: the reader goes to and fro between more of them.
            self._most = min(2 * self._most, OPEN_CHUNKS, self._by_rows)
            self._closed = deque(self._closed, maxlen=2 * self._most)
        self[chunk.number] = chunk
        for old in list(self)[: -self._most]:
            self.pop(old, None)
            self._closed.append(old)
