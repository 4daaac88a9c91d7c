"""Puts what a run has published in its spool to the store, in a thread of its own and in the order of its publishing.

For chunk k: refused rows and journals as far as its seal names them; the side file; the rows; the seal, which publishes
it; the head. At any moment the store holds what a directory could hold after a crash; each object of a chunk is put on
condition that there is none. Deleted is as in a directory: first the mark, then each seal before its data. Right before
the mark the consumers are looked at once more.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

import xxhash

from lazyshard.cli import output
from lazyshard.errors import FormatInvalid, LazyShardError
from lazyshard.format import records
from lazyshard.format.records import CURSORS, END, HEAD, MANIFEST, QUARANTINE, RETIRED, End, Head, Manifest, Retired
from lazyshard.format.seal import Seal
from lazyshard.format.state import CURSOR_SUFFIX
from lazyshard.inspection.survey import chunk_files
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.files import read_file
from lazyshard.stream.cursor import Consumer, list_consumers
from lazyshard.stream.listing import retire
from lazyshard_producer.errors import count
from lazyshard_producer.following.journal import DIRECTORY, named_journals
from lazyshard_producer.limits import Hold, Shelf, Stock, Tell
from lazyshard_producer.shipping.store import Found, Spool, StreamStore, look
from lazyshard_producer.stop import GivenUp, Stop

HEAD_S: Final = 0.5  # the head is put no more often while chunks come: it is two requests, readers wait longer
LEAVE_S: Final = 20.0  # how long a run that was told to stop still puts chunks: most systems kill after 30 s
_SLICE_S: Final = 0.05
PULL_S: Final = 1.0  # how old what is known of the consumers may get: a listing, and a request for each


def put_chunk(store: StreamStore, chunk: int, data: bytes, seal: bytes, arrays: bytes | None = None) -> None:
    """Puts a chunk; it is published if and only if this returns. May be repeated: what is there already stays."""
    replaced: dict[str, bytes | None] = {}
    for name, own in ((records.arrays_name(chunk), arrays), (records.chunk_name(chunk), data)):
        # Left by a producer that was killed before the seal, mostly with the same rows. Nobody has read it without a
        # seal.
        if own is not None and not store.put_new(name, own) and not store.exists(records.seal_name(chunk)):
            replaced[name] = store.replace(name, own)
    store.check_owner()
    name = records.seal_name(chunk)
    if store.put_new(name, seal):
        return
    found = store.find(name)
    if found is not None and is_same_chunk(found, seal, chunk):
        return
    # By one that has taken the stream over since the look before; or by one that had it before, in its last moment.
    store.check_owner()
    for other, content in replaced.items():
        if found is not None and content is not None and _is_sealed_by(found, content, chunk, other):
            store.replace(other, content)
    why = "another producer has published this chunk, with other rows; run the same command again to continue after it"
    raise store.invalid(name, why, chunk)


def is_same_chunk(one: bytes, other: bytes, chunk: int) -> bool:
    """Whether two seals are of the same rows and the same position, whenever they were made."""
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


class Shipper(Shelf):
    """The chunks of a stream in an object store, and the thread that puts them there and deletes them.

    `shipped` are in the store, those up to `announced` on their way. From `begin` on only the thread calls the store.
    """

    remote = True

    def __init__(
        self, store: StreamStore, spool: Spool, found: Found, max_spool: int, stop: Stop, warn: Callable[[str], None]
    ) -> None:
        super().__init__(spool.stream, store.url)
        self.store, self.spool = store, spool
        self._max_spool, self._signals, self._warn = max_spool, stop, warn
        self.shipped = self.announced = found.listing.sealed
        self.largest = 0  # bytes of the largest chunk that was announced
        first = found.listing.first
        # Eight bytes a chunk: a stream of a million of them takes 8 MB. 0 for those that are retired.
        self._sizes = array("Q", [0] * first)
        for chunk in range(first, found.listing.sealed):
            self._sizes.append(sum(found.sizes.get(name, 0) for name in chunk_files(chunk, arrays=True)))
        self._leftovers = [*found.listing.leftovers]  # names below the mark that are still to be deleted
        self._marked = self._wanted = first
        self._pulled_at = self._refused_at = self._head_at = float("-inf")
        self._manifest, self._has_end = found.manifest, found.end is not None
        self._head: bytes | None = None
        self._put: dict[str, int] = {}  # sizes of the journals and refused rows that were put
        self._failure: BaseException | None = None
        self._asked = self._closing = self._complete = self._settled = False
        self._lock, self._news, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lazyshard-shipper", daemon=True)

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return self._marked

    def visible(self, published: int) -> int:
        """Returns how many chunks are in the store."""
        return min(published, self.shipped)

    def consumers(self, published: int) -> tuple[Consumer, ...]:
        """Returns the consumers as they were last copied, and has them copied again within a moment."""
        self._asked = True
        return super().consumers(published)

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Asks for chunks to be deleted, which is done within a moment, once the consumers were looked at again."""
        self._wanted = max(self._wanted, min(chunks_before, published - 1))

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Returns what the chunks [first, stop) take; always exact."""
        sizes = self._sizes[first:stop]
        return Stock(first, stop, sum(sizes), largest=max(sizes, default=0))

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk, of one that is retired what it had."""
        return sum(self._sizes[chunk : chunk + 1])

    def used_bytes(self, published: int) -> int:
        """Returns how many bytes the stream takes in the store and on its way."""
        return sum(self._sizes[self._marked : published])

    def begin(self, published: int) -> None:
        """Begins to put what is in the run's directory: so many chunks, and what comes after them."""
        # Before the run looks at the consumers for the first time.
        self.pull()
        self.announce(published)
        # From here on a signal is the run's affair.
        self.store.pause = self._stop.wait
        self._thread.start()

    def announce(self, published: int) -> None:
        """Notes that so many chunks are published in the spool."""
        with self._lock:
            if published > self.announced:
                self.spool.keep_journals()
            for chunk in range(self.announced, published):
                self._sizes.append(super().chunk_size(chunk))
                self.largest = max(self.largest, self._sizes[-1])
            self.announced = max(self.announced, published)
        self._news.set()

    def check(self) -> None:
        """Raises what the thread has ended with, if it has."""
        if self._failure is not None:
            raise self._failure

    def held(self) -> Hold | None:
        """Returns the hold at `max_spool`, if there is one; raises as `check`."""
        self.check()
        pending, most, trouble = sum(self._sizes[self.shipped : self.announced]), self._max_spool, self.store.trouble
        if not pending or pending + self.largest <= most:
            return None
        left = f"{count(self.announced - self.shipped, 'chunk')} ({output.size(pending)}) wait in {self.spool.folder}"
        why = f"{left} to be put to {self.name}; {trouble or 'the store takes them more slowly than rows come'}"
        return Hold(f"--max-spool {output.size(most)}: {why}", retry_s=0.2, stalled=trouble is not None)

    def settle(self, published: int, tell: Tell) -> bool:
        """Waits until all is in the store; after a signal so long as a run may take to stop."""
        if self._thread.ident is None:
            self.begin(published)
        self.announce(published)
        try:
            self._settled = self._wait(None if self._signals.requested is None else LEAVE_S, tell)
        finally:
            tell(None)
        return self._settled

    def __enter__(self) -> Shipper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Stops the thread; after an error once what was published is put, and the head, if that is soon done.

        Throws the spool away where all of it is in the store and the stream has ended.
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
            # The request in hand is not waited for any longer.
            self._stop.set()
            self._close()
            if self._thread.is_alive():
                self._thread.join(_SLICE_S)

    def _close(self) -> None:
        """Has the thread end once all is put that is in the spool by now."""
        self._closing = True
        self._news.set()

    def _wait(self, seconds: float | None, tell: Tell = lambda text: None) -> bool:
        """Waits for all to be put; a signal that comes meanwhile leaves it `LEAVE_S`. Warns where not all is."""
        self._close()
        due = None if seconds is None else time.monotonic() + seconds
        while not self._complete:
            self.check()
            if due is None and self._signals.requested is not None:
                due = time.monotonic() + LEAVE_S
            left, trouble = self.announced - self.shipped, self.store.trouble
            what = f"{count(left, 'chunk') if left else 'the last facts'} of {self.name}: still to be put to the store,"
            what += f" and kept in {self.spool.folder}{f': {trouble}' if trouble else ''}"
            if due is not None and time.monotonic() > due:
                self._warn(f"{what}; the same command here puts them, one on another machine makes them again")
                return False
            tell(what if trouble else None)
            time.sleep(_SLICE_S)
        return True

    def _run(self) -> None:
        try:
            while not self._complete and not self._stop.is_set():
                # Looked at first: what is in the spool by then is put before the thread ends.
                closing = self._closing
                self._put_all(closing)
                self._complete = closing
                # While no chunk comes the head in the spool may change.
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
            self._put_once(MANIFEST, data, "created a stream here at the same time")
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
            # No seal can name them any more; meanwhile nothing can be announced.
            gone = self.spool.drop_journals() if self.shipped == self.announced else []
        self.store.remove(*(name for name in gone if self._put.pop(name, None) is not None))

    def _read(self, name: str, size: int | None = None) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), open(self.directory / name, "rb") as file:
            return file.read(size)
        return None

    def _put_once(self, name: str, data: bytes, otherwise: str) -> None:
        """Puts what is put once in the life of a stream."""
        self.store.check_owner()
        if self.store.put_new(name, data) or self.store.find(name) == data:
            return
        self.store.check_owner()
        raise self.store.invalid(name, f"somebody else has {otherwise}; this producer stops, nothing was changed")

    def _put_grown(self, name: str, data: bytes | None) -> None:
        """Puts what is only ever added to, where it has grown."""
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
        # Before it is deleted here: who asks for its size finds it.
        self._sizes[chunk] = len(rows) + len(seal) + len(arrays or b"")
        self.shipped = chunk + 1
        if not self._closing:
            # The newest one stays, whose seal says where to continue.
            with contextlib.suppress(OSError):
                retire(stream, chunk + 1, self.announced)

    def _put_end(self) -> None:
        data = read_file(self.directory / END)
        if End.decode(data).chunks != self.shipped:
            # Its last chunk is about to be announced.
            return
        self.store.remove(*look(self.store, None).unsealed)
        # They tell what of followed directories is in the stream.
        self.spool.keep_journals()
        self._put_journals()
        self._put_once(END, data, "ended this stream otherwise")
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
            # For readers who find only so many chunks.
            chunks, size = min(here.chunks, self.shipped), self._manifest.samples_per_chunk
            if here.ended and chunks == here.chunks:
                # The last one may be a partial chunk, which no head names before the end.
                chunks = min(chunks, here.samples // size)
            state = "running" if here.state == "finished" else here.state
            data = replace(here, chunks=chunks, samples=chunks * size, ended=False, state=state).encode()
        if data != self._head:
            self.store.replace(HEAD, data)
            self._head, self._head_at = data, now

    def pull(self) -> None:
        """Copies the files of consumers into the spool."""
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
        """Does a part of what is to be copied and deleted."""
        if self._asked and time.monotonic() - self._pulled_at >= PULL_S:
            self._asked = False
            self.pull()
        if self._wanted > self._marked and time.monotonic() - self._refused_at >= PULL_S:
            self._mark()
        # A few before the next chunk is put: each is two requests.
        left, self._leftovers = self._leftovers[:16], self._leftovers[16:]
        self.store.remove(*left)

    def finish(self) -> None:
        """Does all of it."""
        self._refused_at = float("-inf")
        self.go_on()
        while self._leftovers:
            self.go_on()

    def _mark(self) -> None:
        self.pull()
        done = [consumer.chunks_before for consumer in list_consumers(self.directory, self.shipped)]
        target = min(self._wanted, self.shipped - 1, min(done, default=0))
        if target < self._wanted:
            # Not dropped: whoever asked counts it as done. A cursor may be ahead of what is known to be in the store.
            self._refused_at = time.monotonic()
        if target > self._marked and self._manifest is not None:
            self.store.replace(RETIRED, Retired(self._manifest.stream_id, target, time.time()).encode())
            kinds = (records.seal_name, records.chunk_name, records.arrays_name)[: 2 + self.has_arrays()]
            self._leftovers += [name_of(chunk) for chunk in range(self._marked, target) for name_of in kinds]
            self._marked = target
