"""Rows of a stream by sample number, waiting for those that are not there yet."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from lazyshard import errors
from lazyshard.errors import ChunkCorrupt, FormatInvalid, LazyShardError, StreamMissing, WaitTimeout
from lazyshard.format.batch import CheckedArrays
from lazyshard.format.records import END, HEAD, RETIRED, Head
from lazyshard.format.seal import DealtByCost
from lazyshard.store.files import UrlPath, check_place, stream_path
from lazyshard.stream import head as heads
from lazyshard.stream.chunk import Chunk, OpenChunks
from lazyshard.stream.listing import Published, are_whole, has_unpublished_rows, invalid, path_hint
from lazyshard.stream.stream import Stream, open_stream
from lazyshard.stream.waiting import HEAD_SLOT, READERS, RETIRED_SLOT, NodePoll, Parent, Waker

# How long a file of a chunk that `head.json` has named may stay invisible: network filesystems remember for up to a
# minute that a name did not exist
GRACE_S: Final = 60.0
# How often to look which chunks were deleted: a file that is open takes its room on the disk until it is closed
_LET_GO_S: Final = 1.0
_AHEAD_BYTES: Final = 512 << 10
# Reading ahead starts small and doubles with every look that continues where the last one stopped
_FIRST_AHEAD_BYTES: Final = 16 << 10
# What a look at the filesystem takes beyond this is no time in which a producer could have been waited for
_ANSWER_S: Final = 5.0

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class StreamReader:
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
        label: how to call this reader in log lines; empty by default.
        quiet: whether it waits without a word, because somebody else waits for the same and tells.
        parent: the process for which this one reads; once it has gone, a wait leaves this process too, and once it
            wants nothing more, the wait ends. None in a pickle, as `on_wait`.
        on_wait: is called while this reader waits, at least about once a second.
        seen: what was published at the last look.
        waited_s: seconds spent waiting for the producer.
        chunks_opened: how many times a chunk was opened.
        dealt: how the rows of the chunk that was opened last were dealt by cost; None if they were not.
    """

    def __init__(
        self, directory: str | os.PathLike[str], samples_per_chunk: int | None = None, *, max_wait: float = 600.0
    ) -> None:
        if not max_wait >= 0:
            raise ValueError(f"max_wait is 0 or more seconds, got {max_wait}")
        self.directory, self.max_wait = stream_path(directory), float(max_wait)
        self.label, self.quiet = "", False
        self.parent: Parent | None = None
        self.on_wait: Callable[[], None] | None = None
        self.seen, self.waited_s, self._hung_s = Published(0, 0, False), 0.0, 0.0
        self._least_poll = heads.FIRST_REQUEST_S if isinstance(self.directory, UrlPath) else heads.FIRST_POLL_S
        self.chunks_opened, self._next, self._let_go_at = 0, 0, time.monotonic()
        self.dealt: DealtByCost | None = None
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
            what = f"{self.directory}: the stream has gone while it was being read: was it removed, or unmounted?"
            raise StreamMissing(f"{what} Continue from the last checkpoint", directory=str(self.directory)) from cause
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

    def _wait(self, look: Callable[[float], _T | None], samples: int, chunk: int | None, poll: NodePoll | None) -> _T:
        """Waits until there is what is wanted. Raises WaitTimeout: not within `max_wait`, or nobody wants it any more.

        `look` may rest on what was seen so many seconds before; `chunk` has the last of the samples, None for a stream.
        """
        started = self._clock()
        reported = age = 0.0
        with Waker(self.directory) as waker, contextlib.closing(poll) if poll else contextlib.nullcontext():
            while True:
                found, waited = look(age), self._clock() - started
                over = found is None and waited >= self.max_wait
                if over and poll is not None and age > 0:
                    age = 0.0  # nobody gives up by what was seen before
                    continue
                if over or found is not None:
                    self.waited_s += waited
                if over:
                    raise self._timeout(samples, chunk, waited)
                if found is not None:
                    return found
                if waited >= heads.next_report(reported):
                    reported = heads.next_report(reported)
                    if not self.quiet:
                        _log.warning("%s", self._describe(samples, chunk, waited))
                age = heads.next_poll(waited, heads.expected_wait(samples, self.seen), self._least_poll)
                due = age if poll is None else poll.pause(HEAD_SLOT, age)
                pause = min(due, self.max_wait - waited, heads.next_report(reported) - waited)
                # For longer waits than this it is worth to start watching the directory.
                if self._pause(pause, time.sleep if max(waited, pause) < 0.02 else waker.sleep):
                    age = 0.0

    def _describe(self, samples: int, chunk: int | None, waited: float) -> str:
        """Says what is waited for, and what the producer is doing."""
        who = f"{self.label}: " if self.label else ""
        so_far = f"({heads.format_seconds(waited)} of at most {heads.format_seconds(self.max_wait)})"
        if chunk is None:
            hint = path_hint(self.directory)
            return f"{who}{self.directory}: no stream there yet, waiting for a producer to create it {so_far}{hint}"
        seen, head, now, where = self.seen, self.seen.head, time.time(), self.directory
        gone, open_rows, end = False, None, ""
        if head is not None and head.state in ("running", "waiting"):
            # A producer of this machine has ended, or is silent and has no process.
            silent = now - head.updated_at >= heads.STALE_HEARTBEAT_S
            gone = heads.process_ended(head) or (silent and heads.process_gone(head) is True)
            if head.state == "running" and not head.open:
                open_rows = self._ask(lambda: has_unpublished_rows(where, seen.chunks), "looking into %s", where)
        elif head is None and self.stream_id is None and seen.gap is None and seen.short is None:
            end = f"; if no more are to come, an empty file {where / END} says so"
        producer = heads.describe_producer(seen, samples, now, gone, open_rows)
        return f"{who}waiting for chunk {chunk} of {where} {so_far}: {producer}{end}"

    def _timeout(self, samples: int, chunk: int | None, waited: float) -> WaitTimeout:
        head = self.seen.head
        hint = f"{'see to' if head else 'start'} its producer, or wait longer with max_wait"
        what = f"{self._describe(samples, chunk, waited)}. Gave up: {hint}"
        fields = {"state": head and head.state, "heartbeat_age": heads.heartbeat_age(self.seen, time.time())}
        return WaitTimeout(what, directory=str(self.directory), chunk=chunk, waited=waited, **fields)

    def _pause(self, seconds: float, sleep: Callable[[float], bool | None]) -> bool:
        """Sleeps, with an eye on the parent; returns whether something has come. WaitTimeout: nobody wants more."""
        if self.parent is None and self.on_wait is None:
            return bool(sleep(seconds))
        due = time.monotonic() + seconds
        while seconds > 0:
            if self.parent is not None and self.parent.leave_if_gone():
                where = str(self.directory)
                raise WaitTimeout(f"{where}: nobody waits for this any more", directory=where)
            if self.on_wait is not None:
                self.on_wait()
            if sleep(min(seconds, 0.5)):
                return True
            seconds = due - time.monotonic()
        return False

    def _ask(self, call: Callable[[], _T], what: str, *of: object) -> _T:
        """Calls the filesystem; where no answer comes, says what was asked for, `what % of`."""
        asked = time.monotonic()
        if not self.quiet:
            READERS.start()
            READERS.ask(lambda: f"{self.label}: {what % of}" if self.label else what % of)
        try:
            return call()
        finally:
            READERS.answered()
            self._hung_s += max(0.0, time.monotonic() - asked - _ANSWER_S)

    def _clock(self) -> float:
        """Returns seconds for measuring waits: while the filesystem gives no answer, this clock stands still."""
        return time.monotonic() - self._hung_s

    def _identify(self) -> os.stat_result:
        folder = self.directory if self._stream.mirror is None else self._stream.mirror.folder
        return self._ask(lambda: os.stat(folder), "looking into %s", folder)

    def _look(self, wanted: int) -> bytes | None:
        head = self.refresh(wanted).head
        return None if head is None else head.encode()

    def _adopt(self, data: bytes) -> bool:
        """Takes what another process has found in `head.json`, unless that cannot be, or is older than what is seen."""
        with contextlib.suppress(FormatInvalid):
            head = Head.decode(data)
            whole = are_whole(head.chunks, head.samples, head.ended, self.samples_per_chunk)
            if whole and head.samples >= self.seen.samples and head.ended >= self.seen.ended:
                self.seen = Published(head.chunks, head.samples, head.ended, head)
                return True
        return False

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
        return chunk.parse(lines, row) if not self.arrays else self.read_from(chunk, lambda: chunk.parse(lines, row))

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
        if (chunk := self._chunks.pop(number, None)) is not None:
            self._chunks[number] = chunk
        else:
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
                    what = f"{file}: not there after {heads.format_seconds(waited)}, though chunk {number} is published"
                    raise errors.ChunkMissing(f"{what}; restore it", file=file, chunk=number, waited=waited) from cause
                if waited >= heads.next_report(reported):
                    reported = heads.next_report(reported)
                    who = f"{self.label}: " if self.label else ""
                    _log.warning("%schunk %d is published, waiting for %s to appear", who, number, file)
                self._pause(heads.next_poll(waited, None, self._least_poll), time.sleep)
        if (rows := len(chunk)) != (size := self.samples_per_chunk):
            seen = self.seen if self.seen.ended else self.refresh()
            wanted = min(size, seen.samples - number * size) if seen.ended else size
            if rows != wanted:
                what = f"{chunk.path.name}: expected {wanted} rows, found {rows}; only the last chunk"
                raise invalid(self.directory, f"{what} of a stream that has ended may hold fewer than {size}", number)
        self.chunks_opened += 1
        self.dealt = chunk.dealt
        return chunk

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
            (poll or NodePoll(None, self._identify, time.monotonic)).renew(RETIRED_SLOT, _LET_GO_S, look, adopt)

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
            what = f"{file}: chunk {number} was deleted by its producer, as were all below {retired}: all consumers"
            way = "were done with them. Continue from a later checkpoint, or produce it anew, with --consumers NAME"
            raise errors.ChunkRetired(f"{what} {way}", file=file, chunk=number, chunks_before=retired) from cause
