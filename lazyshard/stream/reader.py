"""Reads rows of a stream by sample number, waiting for rows that are not published yet."""

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
from lazyshard.stream.listing import Published, has_unpublished_rows, invalid, path_hint
from lazyshard.stream.stream import Stream, open_stream
from lazyshard.stream.waiting import HEAD_SLOT, READERS, RETIRED_SLOT, NodePoll, Parent, Waker, first_poll, next_poll

# How long a file of a chunk that `head.json` counts may stay invisible: network filesystems cache that it was absent
GRACE_S: Final = 60.0
# How often to check which chunks were deleted: an open file takes up disk space until it is closed
_LET_GO_S: Final = 1.0
_AHEAD_BYTES: Final = 512 << 10
# Read-ahead starts small and doubles with every read that continues where the last one stopped
_FIRST_AHEAD_BYTES: Final = 16 << 10
# Time above this that a filesystem call takes does not count as waiting for the producer
_ANSWER_S: Final = 5.0

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class StreamReader:
    """Reads a stream, live or ended, native or foreign.

    Sample n is row n % samples_per_chunk of chunk n // samples_per_chunk.

    Every row is checked against its digest before it is returned. Safe under fork. Can be pickled (without its open
    files) and shared by threads.

    Args:
        directory: the stream's directory, or its URL in an object store, like ``s3://bucket/prefix``. If there is no
            stream in it yet, the constructor waits for one; the parent directory must exist.
        samples_per_chunk: needed only for a foreign directory; otherwise None or the value in the stream's manifest.
        max_wait: how many seconds to wait at most for anything that a producer has yet to publish.

    Raises:
        WaitTimeout: no stream has appeared.
        StreamMissing: none can appear: the parent directory is missing too.
        StreamMismatch, FileInvalid, StreamInvalid: see `lazyshard.errors`.
        AccessRefused, StoreUnavailable: the object store cannot be read; any method may raise these.
        ValueError: samples_per_chunk is missing or invalid, or max_wait is negative.

    Attributes:
        directory: the stream's directory, or its URL.
        stream_id: the stream's identity, None for a foreign directory.
        samples_per_chunk: rows in every chunk but possibly the last.
        arrays: whether rows may hold numpy arrays; each is writable and owned by the caller.
        encoding: how rows were encoded, as facts by name; None if rows are not encoded.
        label: the name of this reader in log lines; empty by default.
        share: of a chunk's rows that this node will read, from 0 to 1; see `lazyshard.store.mirror`.
        quiet: whether it does not log its waits, because another reader waits for the same and logs.
        parent: the process for which this one reads. If it has gone, a wait ends this process too; if it needs nothing
            more, the wait ends. None in a pickle, like `on_wait`.
        on_wait: called at least about once per second while this reader waits.
        seen: what was published at the last poll.
        waited_s: seconds spent waiting for the producer.
        chunks_opened: how many times a chunk was opened.
        dealt: how the rows of the most recently opened chunk were dealt by cost; None if they were not.
    """

    def __init__(
        self, directory: str | os.PathLike[str], samples_per_chunk: int | None = None, *, max_wait: float = 600.0
    ) -> None:
        if not max_wait >= 0:
            raise ValueError(f"max_wait is 0 or more seconds, got {max_wait}")
        self.directory, self.max_wait = stream_path(directory), float(max_wait)
        self.label, self.quiet, self.share = "", False, 1.0
        self.parent: Parent | None = None
        self.on_wait: Callable[[], None] | None = None
        self.seen, self.waited_s, self._hung_s = Published(0, 0, False), 0.0, 0.0
        self._least_poll = first_poll(self.directory)
        self.chunks_opened, self._next, self._let_go_at = 0, 0, time.monotonic()
        self.dealt: DealtByCost | None = None
        self._ahead = _FIRST_AHEAD_BYTES
        self._stream = stream = self._wait_for_stream(samples_per_chunk)
        self.samples_per_chunk, self.stream_id = stream.samples_per_chunk, stream.stream_id
        self.arrays, self.encoding = stream.arrays, stream.encoding
        self._chunks = OpenChunks(stream)
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process only, open files included."""
        fresh = {"_chunks": OpenChunks(self._stream), "waited_s": 0.0, "chunks_opened": 0}
        return self.__dict__ | fresh | {"parent": None, "on_wait": None}

    def refresh(self, wanted: int = 0) -> Published:
        """Polls what is published; lists a foreign directory if fewer than `wanted` samples are known.

        Raises:
            StreamMissing: the stream's directory is gone.
            StreamInvalid: the stream has ended with fewer samples than were published.
            StreamMismatch: another stream has taken its place.
        """
        seen = self.seen
        try:
            path = self.directory if self.stream_id is None else self.directory / HEAD
            found = self._ask(lambda: self._stream.published(wanted), "reading %s", path)
            if found.samples < seen.samples:
                # A stream that was created again in the same place has other rows.
                self._stream.check_identity()
        except FileNotFoundError as cause:
            what = f"{self.directory}: the stream disappeared while it was being read: was it removed or unmounted?"
            raise StreamMissing(f"{what} Continue from the last checkpoint", directory=str(self.directory)) from cause
        # A network filesystem may return an older copy: published samples stay published, an ended stream stays ended.
        news = found.ended or not seen.ended
        if found.samples < seen.samples and found.ended:
            what = f"the stream has ended with {found.samples:,} samples, but {seen.samples:,} were published before"
            raise invalid(self.directory, f"{what}; restore what is missing from a copy")
        if news and (found.samples >= seen.samples or (found.gap is not None and self.stream_id is None)):
            self.seen = found
        return self.seen

    def check_end(self) -> None:
        """Checks that nothing follows the end of a foreign directory, for callers that do not read its last chunk."""
        self._ask(self._stream.check_end, "looking into %s", self.directory)

    def wait_for(self, samples: int) -> Published:
        """Returns once `samples`, from the start of the stream, are published or the stream has ended.

        While it waits, it logs after 10 s and then less and less often what it waits for and what the producer does.
        Raises WaitTimeout: not within `max_wait`. StreamMissing: the stream's directory is gone.
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
        """Waits until `look` returns a result. Raises WaitTimeout: not within `max_wait`, or no longer needed.

        `look` may use what was seen up to `age` seconds before. `chunk` holds the last of `samples`; None while waiting
        for the stream itself.
        """
        started = self._clock()
        reported = age = 0.0
        with Waker(self.directory) as waker, contextlib.closing(poll) if poll else contextlib.nullcontext():
            while True:
                found, waited = look(age), self._clock() - started
                over = found is None and waited >= self.max_wait
                if over and poll is not None and age > 0:
                    age = 0.0  # poll once more before giving up
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
                        # Of the workers of a loader that wait, one warns.
                        rank = os.getpid() if self.parent is None else os.getppid()
                        level = logging.WARNING if poll is None or poll.warns_for(rank) else logging.DEBUG
                        if _log.isEnabledFor(level):
                            _log.log(level, "%s", self._describe(samples, chunk, waited))
                age = next_poll(waited, heads.expected_wait(samples, self.seen), self._least_poll)
                due = age if poll is None else poll.pause(HEAD_SLOT, age)
                pause = min(due, self.max_wait - waited, heads.next_report(reported) - waited)
                # Watching the directory is only worth starting for longer waits than this.
                if self._pause(pause, time.sleep if max(waited, pause) < 0.02 else waker.sleep):
                    age = 0.0

    def _describe(self, samples: int, chunk: int | None, waited: float) -> str:
        """Describes what this reader waits for, and what the producer is doing."""
        who = f"{self.label}: " if self.label else ""
        so_far = f"({heads.format_seconds(waited)} of at most {heads.format_seconds(self.max_wait)})"
        if chunk is None:
            hint = path_hint(self.directory)
            return f"{who}{self.directory}: no stream there yet, waiting for a producer to create it {so_far}{hint}"
        seen, head, now, where = self.seen, self.seen.head, time.time(), self.directory
        gone, open_rows, end, idle = False, None, "", None
        if self.stream_id is not None and not isinstance(where, UrlPath):
            # Imported when used: most streams have one producer.
            from lazyshard.stream.members import describe_writers

            idle = self._ask(lambda: describe_writers(where, now), "looking into %s", where)
        if head is not None and head.state in ("running", "waiting"):
            # True if a producer on this machine has ended, or is silent and has no process.
            silent = now - head.updated_at >= heads.STALE_HEARTBEAT_S
            gone = heads.process_ended(head) or (silent and heads.process_gone(head) is True)
            if head.state == "running" and not head.open:
                open_rows = self._ask(lambda: has_unpublished_rows(where, seen.chunks), "looking into %s", where)
        elif head is None and self.stream_id is None and seen.gap is None and seen.short is None:
            end = f"; if no more will follow, create an empty file {where / END}"
        name = "producer" if idle is None else "sequencer"
        producer = heads.describe_producer(seen, samples, now, gone, open_rows, name)
        return f"{who}waiting for chunk {chunk} of {where} {so_far}: {producer}{end}{idle or ''}"

    def _timeout(self, samples: int, chunk: int | None, waited: float) -> WaitTimeout:
        head = self.seen.head
        works = heads.expected_wait(samples, self.seen) is not None
        hint = "" if works else f"{'check' if head else 'start'} its producer, or "
        what = f"{self._describe(samples, chunk, waited)}. Gave up: {hint}wait longer with max_wait"
        fields = {"state": head and head.state, "heartbeat_age": heads.heartbeat_age(self.seen, time.time())}
        return WaitTimeout(what, directory=str(self.directory), chunk=chunk, waited=waited, **fields)

    def _pause(self, seconds: float, sleep: Callable[[float], bool | None]) -> bool:
        """Sleeps while checking the parent; returns whether it was woken. WaitTimeout: the wait is no longer needed."""
        if self.parent is None and self.on_wait is None:
            return bool(sleep(seconds))
        due = time.monotonic() + seconds
        while seconds > 0:
            if self.parent is not None and self.parent.leave_if_gone():
                where = str(self.directory)
                raise WaitTimeout(f"{where}: this wait is no longer needed", directory=where)
            if self.on_wait is not None:
                self.on_wait()
            if sleep(min(seconds, 0.5)):
                return True
            seconds = due - time.monotonic()
        return False

    def _ask(self, call: Callable[[], _T], what: str, *of: object) -> _T:
        """Calls the filesystem; if it does not answer, the watchdog logs the request, `what % of`."""
        asked = time.monotonic()
        if not self.quiet:
            READERS.start()
            READERS.ask(lambda: f"{self.label}: {what % of}" if self.label else what % of)
        try:
            return call()
        finally:
            READERS.answered()
            if (hung := time.monotonic() - asked - _ANSWER_S) > 0:
                self._hung_s += hung

    def _clock(self) -> float:
        """Returns seconds for measuring waits: this clock stops while the filesystem does not answer."""
        return time.monotonic() - self._hung_s

    def _identify(self) -> os.stat_result:
        folder = self.directory if self._stream.mirror is None else self._stream.mirror.folder
        return self._ask(lambda: os.stat(folder), "looking into %s", folder)

    def _look(self, wanted: int) -> bytes | None:
        head = self.refresh(wanted).head
        return None if head is None else head.encode()

    def _adopt(self, data: bytes) -> bool:
        """Uses the `head.json` that another process has read, unless it is invalid or older than what was seen."""
        with contextlib.suppress(FormatInvalid):
            head = Head.decode(data)
            whole = head.is_whole(self.samples_per_chunk, ended=head.ended)
            if whole and head.samples >= self.seen.samples and head.ended >= self.seen.ended:
                self.seen = Published(head.chunks, head.samples, head.ended, head)
                return True
        return False

    def read(self, sample: int) -> dict[str, Any]:
        """Returns one row, waiting for it if necessary.

        Raises:
            IndexError: the stream has ended before this sample.
            WaitTimeout: the sample was not published within `max_wait`.
            ChunkRetired, ChunkCorrupt, RowInvalid, OSError: the producer has deleted it, or it cannot be read.
        """
        self._check(sample)
        return self.read_published(sample, sample + 1, 1)[0]

    def lines_published(self, first: int, stop: int, at_least: int = 1) -> list[bytes]:
        """Returns the checked lines of samples of [first, stop), which `wait_for` has reported as published.

        Consecutive calls read ahead, at most to the end of the chunk. Returns at least one line; fewer than `at_least`
        if the chunk ends, a bad row follows, or rows are large.

        Raises:
            ChunkCorrupt: row `first` is bad.
            ChunkRetired: the producer has deleted its chunk; reported at once, unless the chunk is still open here.
            ChunkMissing: a file of its chunk did not appear within the grace period.
        """
        chunk, row = self.locate(first)
        budget = min(2 * self._ahead, _AHEAD_BYTES) if first == self._next else 0
        last = min(row + stop - first, len(chunk))
        lines = self.read_from(chunk, lambda: chunk.lines(row, last, at_least, budget))
        self._ahead = max(budget, _FIRST_AHEAD_BYTES)
        self._next = first + len(lines)
        return lines

    def read_published(self, first: int, stop: int, at_least: int = 1) -> list[dict[str, Any]]:
        """Returns `lines_published`, parsed, with their arrays. Raises the same, or RowInvalid: row `first` is bad."""
        if self.arrays:
            stop = self.stop_for_arrays(first, stop, at_least)
        return self.parse(self.lines_published(first, stop, at_least), first)

    def parse(self, lines: list[bytes], first: int) -> list[dict[str, Any]]:
        """Parses lines of `lines_published`, the first of which is sample `first`; see `Chunk.parse`."""
        chunk, row = self.locate(first)
        return chunk.parse(lines, row) if not self.arrays else self.read_from(chunk, lambda: chunk.parse(lines, row))

    def stop_for_arrays(self, first: int, stop: int, at_least: int = 1) -> int:
        """Returns where to stop in [first, stop), so that the arrays that are read together are not too large."""
        chunk, row = self.locate(first)
        assert chunk.arrays is not None
        return first - row + chunk.arrays.fit(row, min(row + stop - first, len(chunk)), at_least, _AHEAD_BYTES)

    def arrays_published(self, first: int, stop: int) -> CheckedArrays:
        """Returns the checked bytes of the arrays of one chunk's samples. Raises as `lines_published`."""
        chunk, row = self.locate(first)
        arrays, after = chunk.arrays, row + stop - first
        assert arrays is not None
        data = self.read_from(chunk, lambda: arrays.read_rows(row, after))
        return CheckedArrays(data.tobytes(), arrays.ends(row, after), arrays.digests(row, after))

    def line(self, sample: int) -> bytes:
        """Returns the bytes of one row, newline included, waiting for it if necessary. Raises as `read` does."""
        self._check(sample)
        return self.lines_published(sample, sample + 1)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields all rows in order to the end of the stream, waiting for new ones. Raises as `read` does."""
        sample = 0
        while (published := self.wait_for(sample + 1)).samples > sample:
            rows = self.read_published(sample, published.samples)
            yield from rows
            sample += len(rows)

    def chunk(self, number: int) -> Chunk:
        """Returns a published chunk, open. Only a few stay open, see `OpenChunks`. Raises as `read_published` does."""
        if (chunk := self._chunks.pop(number, None)) is not None:
            self._chunks[number] = chunk
        else:
            chunk = self._open(number)
            self._let_go()
            self._chunks.add(chunk)
        return chunk

    def locate(self, sample: int) -> tuple[Chunk, int]:
        """Returns the chunk of a published sample, open, and its row there. Raises as `read_published`."""
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
                chunk = self._ask(lambda: self._stream.open_chunk(number, self.share), *where)
                break
            except FileNotFoundError as cause:
                waited, file = self._clock() - started, str(cause.filename)
                self.refresh()
                if self.seen.gap is not None and self.seen.gap <= number and not self.seen.ended:
                    # A foreign directory lacks one of the chunks that were counted.
                    self.wait_for(number * self.samples_per_chunk + 1)
                    started = self._clock()
                    continue
                # Only here, so that existing chunks cost nothing extra.
                self._check_retired(number, file, cause)
                if waited > min(GRACE_S, self.max_wait):
                    what = f"{file}: missing for {heads.format_seconds(waited)}, though chunk {number} is published"
                    raise errors.ChunkMissing(f"{what}; restore it", file=file, chunk=number, waited=waited) from cause
                if waited >= heads.next_report(reported):
                    reported = heads.next_report(reported)
                    who = f"{self.label}: " if self.label else ""
                    _log.warning("%schunk %d is published, waiting for %s to appear", who, number, file)
                self._pause(next_poll(waited, None, self._least_poll), time.sleep)
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
        """Closes chunks that were deleted meanwhile: a producer may be waiting for the disk space they take up."""
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

        # An error here would be raised again by the next read.
        with contextlib.suppress(LazyShardError, OSError):
            (poll or NodePoll(None, self._identify, time.monotonic)).renew(RETIRED_SLOT, _LET_GO_S, look, adopt)

    def read_from(self, chunk: Chunk, call: Callable[[], _T]) -> _T:
        """Returns what a call reads from an open chunk. Raises as `lines_published`."""
        try:
            return self._ask(call, "reading %s", chunk.path)
        except FileNotFoundError as cause:
            # Some filesystems cannot read an open file once it is deleted.
            self._chunks.pop(chunk.number, None)
            self._check_retired(chunk.number, str(chunk.path), cause)
            raise
        except ChunkCorrupt:
            if self._stream.mirror is not None:
                self._chunks.pop(chunk.number, None)  # the object itself may be intact
                self._stream.mirror.drop(chunk.number)
            raise

    def _check_retired(self, number: int, file: str, cause: OSError) -> None:
        if number < (retired := self._stream.retired()):
            what = f"{file}: its producer has deleted chunk {number} and all below {retired}, as all consumers had"
            way = "finished them. Continue from a later checkpoint, or produce the stream again with --consumers NAME"
            raise errors.ChunkRetired(f"{what} {way}", file=file, chunk=number, chunks_before=retired) from cause
