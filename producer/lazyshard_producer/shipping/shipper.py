"""Uploads the chunks that a run publishes in its spool to the store, in a separate thread and in the same order.

The order for each chunk is: refused rows and journals as far as its seal names them, the side file, the rows, the seal,
which publishes the chunk, and the head. At any time the store is in a state that a directory could have after a crash.
Each object of a chunk is put only if absent. Deletion works as in a directory: first the watermark, then each seal
before its data. The consumers are read once more right before the watermark is raised.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from lazyshard.cli import output
from lazyshard.errors import FormatInvalid, LazyShardError
from lazyshard.format import records
from lazyshard.format.records import CURSORS, END, HEAD, MANIFEST, QUARANTINE, End, Head, Manifest
from lazyshard.format.seal import Seal
from lazyshard.format.state import CURSOR_SUFFIX
from lazyshard.format.writers import WRITERS
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.files import read_file
from lazyshard.stream.cursor import Consumer, list_consumers
from lazyshard.stream.listing import retire
from lazyshard_producer.errors import count
from lazyshard_producer.following.journal import DIRECTORY, named_journals
from lazyshard_producer.limits import Hold, Shelf, Tell
from lazyshard_producer.shipping.store import Found, Spool, StoreShelf, StreamStore, read_stream
from lazyshard_producer.stop import GivenUp, Stop

HEAD_S: Final = 0.5  # shortest interval between puts of the head: each is two requests, and readers poll less often
LEAVE_S: Final = 20.0  # how long a run continues to upload after a signal: most systems kill after 30 s
_SLICE_S: Final = 0.05
PULL_S: Final = 1.0  # interval between reads of the consumers' files: a listing, and a request for each


def put_chunk(store: StreamStore, chunk: int, data: bytes, seal: bytes, arrays: bytes | None = None) -> None:
    """Puts a chunk, which is published if and only if this returns. May be repeated: existing objects stay."""
    replaced: dict[str, bytes | None] = {}
    for name, own in ((records.arrays_name(chunk), arrays), (records.chunk_name(chunk), data)):
        # An existing object was left by a producer that was killed before the seal, mostly with the same rows. Without
        # a seal no reader has read it, so it may be replaced.
        if own is not None and not store.put_new(name, own) and not store.exists(records.seal_name(chunk)):
            replaced[name] = store.replace(name, own)
    store.check_owner()
    name = records.seal_name(chunk)
    if store.put_new(name, seal):
        return
    found = store.find(name)
    if found is not None and is_same_chunk(found, seal, chunk):
        return
    # Sealed by a producer that has taken over since the check above, or by the previous owner just before it stopped.
    # In the second case, restore the objects that its seal describes.
    store.check_owner()
    for other, content in replaced.items():
        if found is not None and content is not None and _is_sealed_by(found, content, chunk, other):
            store.replace(other, content)
    why = "another producer has published this chunk, with other rows; run the same command again to continue after it"
    raise store.invalid(name, why, chunk)


def is_same_chunk(one: bytes, other: bytes, chunk: int) -> bool:
    """Returns whether two seals have the same rows and the same position; their times may differ."""
    try:
        first, second = (replace(Seal.decode(seal, chunk), sealed_at=0.0).encode() for seal in (one, other))
    except FormatInvalid:
        return one == other
    return first == second


def _is_sealed_by(seal: bytes, rows: bytes, chunk: int, name: str) -> bool:
    try:
        decoded = Seal.decode(seal, chunk)
    except FormatInvalid:
        return False
    found = decoded.arrays if name == records.arrays_name(chunk) else decoded
    if found is None or found.size != len(rows):
        return False
    ranges = itertools.pairwise(found.offsets.tolist())
    return bool([xxhash.xxh3_64_intdigest(rows[start:stop]) for start, stop in ranges] == found.digests.tolist())


class Shipper(StoreShelf, contextlib.AbstractContextManager["Shipper"]):
    """The chunks of a stream in an object store, and the thread that uploads and deletes them.

    Chunks before `shipped` are in the store, those in [shipped, announced) are pending. From `begin` on only the thread
    calls the store. If the chunks are pieces of a writer, no consumer reads them.
    """

    def __init__(
        self, store: StreamStore, spool: Spool, found: Found, max_spool: int, stop: Stop, warn: Callable[[str], None]
    ) -> None:
        super().__init__(store, spool.stream, found)
        self.spool, self._pieces = spool, Path(store.url).parent.name == WRITERS
        self._max_spool, self._signals, self._warn = max_spool, stop, warn
        self.shipped = self.announced = found.listing.sealed
        self.largest = 0  # bytes of the largest chunk that was announced
        self._retire_before = self._marked
        self._pulled_at = self._refused_at = self._head_at = float("-inf")
        self._has_end = found.end is not None
        self._head: bytes | None = None
        self._put: dict[str, int] = {}  # sizes of the uploaded journals and refused rows
        self._failure: BaseException | None = None
        self._pull_requested = self._closing = self._complete = self._settled = False
        self._lock, self._news, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lazyshard-shipper", daemon=True)

    def visible(self, published: int) -> int:
        """Returns how many chunks are in the store."""
        return min(published, self.shipped)

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as last copied, and requests a new copy."""
        self._pull_requested = True
        return super().consumers(published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Requests a deletion; the thread does it soon, after reading the consumers again."""
        self._retire_before = max(self._retire_before, min(chunks_before, published - 1))
        if self._complete:
            # The thread has ended.
            self.finish()

    def begin(self, published: int) -> None:
        """Starts to upload from the run's directory: the `published` chunks, and those that follow."""
        if not self._pieces:
            # Before the run reads the consumers for the first time.
            self.pull()
        self.announce(published)
        # From here on the run handles signals, so only `_stop` interrupts a pause.
        self.store.pause = self._stop.wait
        self._thread.start()

    def announce(self, published: int) -> None:
        """Records the number of chunks that are published in the spool."""
        with self._lock:
            if published > self.announced:
                self.spool.keep_journals()
            for chunk in range(self.announced, published):
                self.add(Shelf.chunk_size(self, chunk))
                self.largest = max(self.largest, self._sizes[-1])
            self.announced = max(self.announced, published)
        self._news.set()

    def check(self) -> None:
        """Raises the error with which the thread has ended, if any."""
        if self._failure is not None:
            raise self._failure

    def held(self) -> Hold | None:
        """Returns the hold at `max_spool`, if there is one; raises as `check`."""
        self.check()
        pending, most, trouble = sum(self._sizes[self.shipped : self.announced]), self._max_spool, self.store.trouble
        if not pending or pending + self.largest <= most:
            return None
        left = f"{count(self.announced - self.shipped, 'chunk')} ({output.size(pending)}) in {self.spool.folder}"
        why = f"{left} to be uploaded to {self.name}; {trouble or 'uploads are slower than production'}"
        return Hold(f"--max-spool {output.size(most)}: {why}", retry_s=0.2, stalled=trouble is not None)

    def settle(self, published: int, tell: Tell) -> bool:
        """Waits until everything is in the store, after a signal at most `LEAVE_S`; returns whether it is."""
        if self._thread.ident is None:
            self.begin(published)
        self.announce(published)
        try:
            self._settled = self._wait(None if self._signals.requested is None else LEAVE_S, tell)
        finally:
            tell(None)
        return self._settled

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Stops the thread. After an error, first waits a short time for pending chunks and the head.

        Clears the spool if the stream has ended and everything is in the store.
        """
        try:
            if isinstance(error, Exception) and self._thread.ident is not None and not self._settled:
                try:
                    self._wait(LEAVE_S / 4)
                except (LazyShardError, OSError) as other:
                    if other is not error:
                        self._warn(str(other))
            if self._settled and self.spool.ended:
                self.spool.clear()
        finally:
            # Do not wait for a pending request.
            self._stop.set()
            self._close()
            if self._thread.is_alive():
                self._thread.join(_SLICE_S)

    def _close(self) -> None:
        """Makes the thread end once the present contents of the spool are uploaded."""
        self._closing = True
        self._news.set()

    def _wait(self, seconds: float | None, tell: Tell = lambda text: None) -> bool:
        """Waits until all is uploaded, after a signal at most `LEAVE_S` more. Returns False with a warning if not."""
        self._close()
        due = None if seconds is None else time.monotonic() + seconds
        while not self._complete:
            self.check()
            if due is None and self._signals.requested is not None:
                due = time.monotonic() + LEAVE_S
            left, trouble = self.announced - self.shipped, self.store.trouble
            what = f"{count(left, 'chunk') if left else 'the final records'} of {self.name}: not uploaded yet,"
            what += f" kept in {self.spool.folder}{f': {trouble}' if trouble else ''}"
            if due is not None and time.monotonic() > due:
                self._warn(f"{what}; the same command here uploads them, on another machine it produces them again")
                return False
            tell(what if trouble else None)
            time.sleep(_SLICE_S)
        return True

    def _run(self) -> None:
        try:
            while not self._complete and not self._stop.is_set():
                # Read before uploading, so everything that is in the spool when it is set gets uploaded.
                closing = self._closing
                self._put_all(closing)
                self._complete = closing
                # The head in the spool may change even without new chunks.
                self._news.wait(0.25)
                self._news.clear()
        except GivenUp:
            return
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None and not isinstance(error, LazyShardError):
                error.filename = str(self.spool.folder)
            self._failure = error

    def _put_all(self, closing: bool) -> None:
        if self._manifest is None and (data := self._read(MANIFEST)) is not None:
            self.store.put_once(MANIFEST, data, "created a stream here at the same time")
            self._manifest = Manifest.decode(data)
        while self.shipped < self.announced:
            if self._stop.is_set():
                raise GivenUp
            self._put_chunk(self.shipped)
            self._put_head()
            self.go_on()
        if closing:
            self._put_grown(QUARANTINE, self._read(QUARANTINE))
        if self.spool.ended and not self._has_end:
            self._put_end()
        self._put_head(at_once=closing)
        if closing:
            self.finish()
            if self._has_end:
                named = named_journals(End.decode(read_file(self.directory / END)).source)
                self.store.remove(*(f"{DIRECTORY}/{name}" for name in self.store.names(DIRECTORY) if name not in named))
            return
        self.go_on()
        with self._lock:
            # No later seal can name these journals. The lock prevents announcements meanwhile.
            gone = self.spool.drop_journals() if self.shipped == self.announced else []
        self.store.remove(*(name for name in gone if self._put.pop(name, None) is not None))

    def _read(self, name: str, size: int | None = None) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), open(self.directory / name, "rb") as file:
            return file.read(size)
        return None

    def _put_grown(self, name: str, data: bytes | None) -> None:
        """Puts an append-only file if it has grown."""
        if data and len(data) != self._put.get(name):
            self.store.replace(name, data)
            self._put[name] = len(data)

    def _put_journals(self) -> None:
        for path in self.spool.journals():
            self._put_grown(f"{DIRECTORY}/{path.name}", path.read_bytes())

    def _put_chunk(self, chunk: int) -> None:
        stream = self.directory
        seal, rows = read_file(stream / records.seal_name(chunk)), (stream / records.chunk_name(chunk)).read_bytes()
        decoded = Seal.decode(seal, chunk)
        arrays = None if decoded.arrays is None else (stream / records.arrays_name(chunk)).read_bytes()
        if isinstance(decoded.source, dict):
            self._put_grown(QUARANTINE, self._read(QUARANTINE, decoded.source.get("quarantine_bytes", 0)))
        self._put_journals()
        put_chunk(self.store, chunk, rows, seal, arrays)
        # Recorded before the chunk is deleted locally, so that its size stays known.
        self._sizes[chunk] = len(rows) + len(seal) + len(arrays or b"")
        self.shipped = chunk + 1
        if not self._closing:
            # The newest chunk stays, because its seal holds the position to continue from.
            with contextlib.suppress(OSError):
                retire(stream, chunk + 1, self.announced)

    def _put_end(self) -> None:
        data = read_file(self.directory / END)
        if End.decode(data).chunks != self.shipped:
            # The last chunk has not been announced yet.
            return
        self.store.remove(*read_stream(self.store, None).unsealed)
        # Journals record which files of followed directories are in the stream.
        self.spool.keep_journals()
        self._put_journals()
        self.store.put_once(END, data, "ended this stream with other contents")
        self._has_end = True

    def _put_head(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._manifest is None or (not at_once and now - self._head_at < HEAD_S):
            return
        try:
            here = Head.decode(data := self._read(HEAD) or b"")
        except FormatInvalid:
            return
        if here.chunks > self.shipped or (here.ended and not self._has_end):
            # The store does not have all chunks of this head yet, so readers get a head with fewer.
            chunks, size = min(here.chunks, self.shipped), self._manifest.samples_per_chunk
            if here.ended and chunks == here.chunks:
                # The last chunk may be partial; a head counts a partial chunk only once the stream has ended.
                chunks = min(chunks, here.samples // size)
            state = "running" if here.state == "finished" else here.state
            data = replace(here, chunks=chunks, samples=chunks * size, ended=False, state=state).encode()
        if data != self._head:
            self.store.replace(HEAD, data)
            self._head, self._head_at = data, now

    def pull(self) -> None:
        """Copies the consumers' files into the spool."""
        there = {name for name in self.store.names(CURSORS) if name.endswith(CURSOR_SUFFIX) and name[0] != "."}
        folder = self.directory / CURSORS
        folder.mkdir(exist_ok=True)
        for name in sorted(there):
            if (data := self.store.find(f"{CURSORS}/{name}")) is not None:
                publish_bytes(data, folder / name, folder / f".{secrets.token_hex(8)}", durable=False)
        for path in folder.iterdir():
            if path.name not in there:
                remove(path)
        self._pulled_at = time.monotonic()

    def go_on(self) -> None:
        """Does a part of the pending copies and deletions."""
        if self._pull_requested and time.monotonic() - self._pulled_at >= PULL_S:
            self._pull_requested = False
            self.pull()
        if self._retire_before > self._marked and time.monotonic() - self._refused_at >= PULL_S:
            self._mark()
        self.delete()

    def finish(self) -> None:
        """Does all pending copies and deletions."""
        self._refused_at = float("-inf")
        self.go_on()
        while self._leftovers:
            self.go_on()

    def _mark(self) -> None:
        target = min(self._retire_before, self.shipped - 1)
        if not self._pieces:
            self.pull()
            done = [consumer.chunks_before for consumer in list_consumers(self.directory, self.shipped)]
            target = min(target, min(done, default=0))
        if target < self._retire_before:
            # Retried later, since the caller counts the deletion as done. A cursor may be ahead of the known chunks.
            self._refused_at = time.monotonic()
        self.mark(target)
