"""Puts what a run has published in its spool to the store, in a thread of its own and in the order of its publishing.

For chunk k: `quarantine.jsonl` and journals as far as the seal of k names them; the side file of arrays if there is
one; the rows; the seal, which publishes k; the head. Then chunk k is deleted from the spool. `stream.end` comes after
the last seal, then the head that says so: at any moment the store holds what a directory could hold after a crash.

Each object of a chunk is put under the condition that there is none: no two producers can both publish chunk N.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import xxhash

from lazyshard.errors import FormatInvalid, LazyShardError, StreamInvalid
from lazyshard.format.names import END, HEAD, MANIFEST, QUARANTINE, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Head, Manifest
from lazyshard.format.seal import Seal, SealedArrays
from lazyshard.store.files import read_file
from lazyshard.stream.retention import retire
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from lazyshard_producer.shipping.object_shelf import ObjectShelf
from lazyshard_producer.shipping.spool import Spool
from lazyshard_producer.shipping.store import Found, GivenUp, StreamStore, look


def put_chunk(store: StreamStore, chunk: int, data: bytes, seal: bytes, arrays: bytes | None = None) -> None:
    """Puts a chunk. It is published if and only if this returns.

    May be repeated, after a crash for instance: what is there already stays.
    """
    replaced = {
        name: _put_data(store, chunk, name, content)
        for name, content in ((arrays_name(chunk), arrays), (chunk_name(chunk), data))
        if content is not None
    }
    store.check_owner()
    name = seal_name(chunk)
    if store.put_new(name, seal):
        return
    found = store.call(lambda: store.objects.get(name))
    if is_same_chunk(found, seal, chunk):
        return
    # By one that has taken the stream over since the look before; or by one that had it before, in its last moment.
    store.check_owner()
    for replaced_name, content in replaced.items():
        if content is not None and _is_sealed_by(found, content, chunk, arrays=replaced_name == arrays_name(chunk)):
            store.replace(replaced_name, content)
    raise StreamInvalid(
        f"{store.objects.name_of(name)}: another producer has published this chunk, with other rows, in its last "
        f"moment; this one stops, and nothing of the stream was changed. Run the same command again: it goes on after "
        f"that chunk",
        directory=store.url,
        chunk=chunk,
    )


def is_same_chunk(one: bytes, other: bytes, chunk: int) -> bool:
    """Whether two seals are of the same rows and the same position, whenever they were made."""
    if one == other:
        return True
    try:
        a, b = Seal.decode(one, chunk), Seal.decode(other, chunk)
    except FormatInvalid:
        return False
    return _are_alike(a, b) and _are_alike(a.arrays, b.arrays) and bool(a.source == b.source)


def _are_alike(one: Seal | SealedArrays | None, other: Seal | SealedArrays | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(one.offsets, other.offsets) and np.array_equal(one.digests, other.digests))


def _put_data(store: StreamStore, chunk: int, name: str, data: bytes) -> bytes | None:
    """Puts an object of a chunk; returns that of another producer which was there and is not any more."""
    if store.put_new(name, data):
        return None
    # Left by a producer that was killed before the seal, mostly with the same rows. Nobody has read it without a seal.
    try:
        store.call(lambda: store.objects.size(seal_name(chunk)))
    except FileNotFoundError:
        return store.replace(name, data)
    return None


def _is_sealed_by(seal: bytes, rows: bytes, chunk: int, *, arrays: bool) -> bool:
    try:
        decoded = Seal.decode(seal, chunk)
    except FormatInvalid:
        return False
    found = decoded.arrays if arrays else decoded
    if found is None or found.size != len(rows):
        return False
    digests: list[int] = found.digests.tolist()
    ranges = itertools.pairwise(found.offsets.tolist())
    return digests == [xxhash.xxh3_64_intdigest(rows[start:stop]) for start, stop in ranges]


LOOK_S: Final = 0.25  # how often it looks whether the head in the spool has changed while no chunk comes
HEAD_S: Final = 0.5  # the head is put no more often while chunks come: it is two requests, readers wait longer


@dataclass(eq=False)
class Shipper:
    """Puts what is in a spool to the store, all of whose calls are made by its own thread.

    `found` is what is in the store; `stop` is set where the thread is to give up at once.
    """

    store: StreamStore
    spool: Spool
    shelf: ObjectShelf
    found: Found
    stop: threading.Event
    _samples_per_chunk: int = 0
    _head_put: bytes | None = None
    _head_at: float = float("-inf")
    _quarantined: int | None = None
    _failure: BaseException | None = None
    _complete: bool = False

    def __post_init__(self) -> None:
        """Makes the thread."""
        self._has_manifest = self.found.manifest is not None
        self._has_end = self.found.end is not None
        self._journals: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lazyshard-shipper", daemon=True)

    def start(self) -> None:
        """Begins, once the run's directory is there."""
        self._thread.start()

    def check(self) -> None:
        """Raises what the thread has ended with, if it has."""
        if self._failure is not None:
            raise self._failure

    def begin_to_close(self) -> None:
        """Has the thread end once all is put that is in the spool by now."""
        self._closing.set()
        self.shelf.wake()

    def is_complete(self) -> bool:
        """Returns whether all is put that was in the spool when the thread was told to end; raises as `check`."""
        self.check()
        return self._complete

    def give_up(self, wait_s: float) -> None:
        """Has the thread end at once; waits for the request in hand no longer than so many seconds."""
        self.stop.set()
        self.begin_to_close()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            while True:
                # Looked at first: what is in the spool by then is put before the thread ends.
                closing = self._closing.is_set()
                self._put_all(closing)
                self._complete = closing
                if closing or self.stop.is_set():
                    return
                self.shelf.wait(LOOK_S)
        except GivenUp:
            return
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None and not isinstance(error, LazyShardError):
                error.filename = str(self.spool.folder)
            self._failure = error

    def _put_all(self, closing: bool) -> None:
        self._put_manifest()
        while self.shelf.shipped < self.shelf.announced:
            if self.stop.is_set():
                raise GivenUp
            self._put_chunk(self.shelf.shipped)
            self._put_head()
            self.shelf.go_on()
        if closing:
            self._put_quarantine(None)
        if self.spool.ended and not self._has_end:
            self._put_end()
        self._put_head(at_once=closing)
        if not closing:
            self.shelf.go_on()
            # No seal can name them any more.
            for name in self.shelf.when_all_shipped(self.spool.drop_journals):
                if self._journals.pop(name, None) is not None:
                    self._delete(f"{JOURNALS}/{name}")
            return
        self.shelf.finish()
        if self._has_end:
            named = named_journals(End.decode(read_file(self.spool.stream / END)).source)
            for name in self.store.names(JOURNALS):
                if name not in named:
                    self._delete(f"{JOURNALS}/{name}")

    def _put_manifest(self) -> None:
        if self._samples_per_chunk:
            return
        try:
            data = read_file(self.spool.stream / MANIFEST)
        except FileNotFoundError:
            return
        if not self._has_manifest:
            self._put_once(MANIFEST, data, "created a stream here at the same time")
            self._has_manifest = True
        self._samples_per_chunk = Manifest.decode(data).samples_per_chunk

    def _put_once(self, name: str, data: bytes, otherwise: str) -> None:
        """Puts what is put once in the life of a stream."""
        self.store.check_owner()
        if self.store.put_new(name, data) or self.store.call(lambda: self.store.objects.get(name)) == data:
            return
        self.store.check_owner()
        raise StreamInvalid(
            f"{self.store.objects.name_of(name)}: somebody else has {otherwise}; this producer stops, nothing of the "
            f"stream was changed",
            directory=self.store.url,
        )

    def _put_chunk(self, chunk: int) -> None:
        stream = self.spool.stream
        seal = read_file(stream / seal_name(chunk))
        rows = (stream / chunk_name(chunk)).read_bytes()
        decoded = Seal.decode(seal, chunk)
        arrays = None if decoded.arrays is None else (stream / arrays_name(chunk)).read_bytes()
        source: Any = decoded.source
        if isinstance(source, dict):
            self._put_quarantine(source.get("quarantine_bytes", 0))
        self._put_journals()
        put_chunk(self.store, chunk, rows, seal, arrays)
        # Before it is deleted here: who asks for its size finds it.
        self.shelf.put(chunk, len(rows) + len(seal) + len(arrays or b""))
        if not self._closing.is_set():
            # The newest one stays, whose seal says where to go on.
            with contextlib.suppress(OSError):
                retire(stream, chunk + 1, self.shelf.announced)

    def _put_quarantine(self, size: int | None) -> None:
        """Puts the file of refused rows, up to so many bytes; None: whole."""
        try:
            with open(self.spool.stream / QUARANTINE, "rb") as file:
                data = file.read(size)
        except FileNotFoundError:
            return
        if data and (size is None or len(data) != self._quarantined):
            self.store.replace(QUARANTINE, data)
            self._quarantined = len(data)

    def _put_journals(self) -> None:
        for path in self.spool.journals():
            data = path.read_bytes()
            if len(data) != self._journals.get(path.name):
                self.store.replace(f"{JOURNALS}/{path.name}", data)
                self._journals[path.name] = len(data)

    def _delete(self, name: str) -> None:
        self.store.check_owner()
        self.store.delete(name)

    def _put_end(self) -> None:
        data = read_file(self.spool.stream / END)
        if End.decode(data).chunks != self.shelf.shipped:
            # Its last chunk is about to be announced.
            return
        for name in look(self.store, None).unsealed:
            self._delete(name)
        # They tell what of followed directories is in the stream.
        self.spool.keep_journals()
        self._put_journals()
        self._put_once(END, data, "ended this stream otherwise")
        self._has_end = True

    def _put_head(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now - self._head_at < HEAD_S:
            return
        try:
            data = read_file(self.spool.stream / HEAD)
            here = Head.decode(data)
        except (FileNotFoundError, FormatInvalid):
            return
        shipped = self.shelf.shipped
        if here.chunks > shipped or (here.ended and not self._has_end):
            data = self._lagging(here, shipped).encode()
        if not self._has_manifest or data == self._head_put:
            return
        self.store.replace(HEAD, data)
        self._head_put, self._head_at = data, now

    def _lagging(self, head: Head, shipped: int) -> Head:
        """Returns the head for readers who find only so many chunks."""
        chunks = min(head.chunks, shipped)
        if head.ended and chunks == head.chunks:
            # The last one may be a partial chunk, which no head names before the end.
            chunks = min(chunks, head.samples // self._samples_per_chunk)
        samples = chunks * self._samples_per_chunk
        state = "running" if head.state == "finished" else head.state
        return replace(head, chunks=chunks, samples=samples, ended=False, state=state)
