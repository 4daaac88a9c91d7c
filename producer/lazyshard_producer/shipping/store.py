"""A stream in an object store, its contents and its owner; and the spool for it on this machine.

A start takes `stream.owner` by a conditional put and always takes over: there is no lease to wait for or to renew. The
previous owner is fenced at its next check. It cannot publish a chunk twice, because seals are put only if absent.

There is one spool directory per URL. It is valid while the owner in the store is listed in its `owners.json`::

    lock          held while a producer of this machine runs on the URL; never removed
    owners.json   the tokens under which this spool has owned the stream in the store
    stream/       an ordinary stream directory with the newest chunks; uploaded chunks are deleted from it
    journals/     hard links to journals of followed directories that a chunk not yet uploaded may name
    restoring/    a `stream/` that is being rebuilt from the store
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import filelock
import orjson
import xxhash

from lazyshard.errors import ChunkMissing, FileInvalid, ProducerFenced, StreamInvalid, StreamMismatch
from lazyshard.format import records
from lazyshard.format.records import END, HEAD, MANIFEST, OWNER, QUARANTINE, RETIRED
from lazyshard.store.durable import publish_bytes, remove, rename, sync_directory
from lazyshard.store.files import stream_path
from lazyshard.store.objects import ObjectStore
from lazyshard.stream.cursor import list_consumers
from lazyshard.stream.listing import Listing, names_of, sort_names
from lazyshard.stream.lock import check_gaps
from lazyshard_producer.following.journal import DIRECTORY, is_journal_name, list_journals
from lazyshard_producer.limits import Shelf, Stock
from lazyshard_producer.stop import GivenUp

_T = TypeVar("_T")
_U = TypeVar("_U")

SHOWN_S: Final = 2.0  # shorter failures are not reported
_AT_ONCE: Final = 16  # objects that are deleted before the next chunk is published: each is two requests


class StreamStore(ObjectStore):
    """The objects of a stream. `owner` is this process, once it has taken the stream.

    While a call is retried, `trouble` describes the failure, and `pause` waits; if `pause` returns True, the call
    raises GivenUp. `left_in` is added to the error after the store has failed for `patience_s`.
    """

    def __init__(self, url: str, patience_s: float, left_in: str, pause: Callable[[float], bool]) -> None:
        super().__init__(url, patience_s=patience_s)
        self.owner: records.Owner | None = None
        self.pause = pause
        self._advice = f"{left_in}; --store-patience-seconds {patience_s:g} is the time limit"
        self._failing: tuple[float, str] | None = None

    @property
    def trouble(self) -> str | None:
        """Why and for how long requests have failed, in words; None if they succeed, or failed for under `SHOWN_S`."""
        if (failing := self._failing) is None or (lasted := time.monotonic() - failing[0]) < SHOWN_S:
            return None
        return f"the store has not responded for {lasted:.0f} s ({failing[1]})"

    def request(self, name: str, doing: str, call: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        """As `ObjectStore.request`."""
        found = super().request(name, doing, call, patience_s)
        self._failing = None
        return found

    def _wait(self, pause: float, started: float, most: float, doing: str, words: str) -> None:
        self._failing = started if self._failing is None else self._failing[0], words
        if self.pause(pause):
            raise GivenUp

    def find(self, name: str) -> bytes | None:
        """Returns an object, None if there is none."""
        return _if_there(lambda: self.get(name), None)

    def names(self, folder: str = "") -> dict[str, int]:
        """Returns the names directly in a folder with their sizes; empty if there is no such folder."""
        return _if_there(lambda: self.list(folder), {})

    def remove(self, *names: str) -> None:
        """Deletes objects. Raises ProducerFenced if another producer has the stream."""
        if names:
            self.check_owner()
        for name in names:
            self.delete(name)

    def replace(self, name: str, data: bytes) -> bytes | None:
        """Replaces an object if its content differs; returns the replaced content, None if nothing was replaced.

        A fenced producer cannot overwrite what its successor put, because the tag is read before the owner.
        """
        # A conditional put fails only if another process has put the object meanwhile.
        for _ in range(10):
            found, tag = self.tagged(name)
            if found == data:
                return None
            self.check_owner()
            if self.swap(name, data, tag):
                return found
        raise self.invalid(name, "another process keeps overwriting this object; find it and stop it")

    def put_once(self, name: str, data: bytes, otherwise: str) -> None:
        """Puts an object that is put only once in the life of a stream. `otherwise` is for the error."""
        self.check_owner()
        if self.put_new(name, data) or self.find(name) == data:
            return
        self.check_owner()
        raise self.invalid(name, f"another program has {otherwise}; this producer stops, nothing was changed")

    def find_owner(self) -> tuple[records.Owner | None, str | None]:
        """Returns the owner, None if unreadable or absent, and the tag of its object, None if absent."""
        data, tag = self.tagged(OWNER)
        with contextlib.suppress(FileInvalid):
            return None if data is None else records.Owner.decode(data, self.name_of(OWNER)), tag
        return None, tag

    def take(self, owner: records.Owner, tag: str | None) -> None:
        """Takes over the stream, if the owner object still has this tag. Raises ProducerFenced if it does not."""
        self.owner = owner
        # A request whose response was lost may have succeeded.
        if not self.swap(OWNER, owner.encode(), tag) or not self.conditional:
            self.check_owner()

    def check_owner(self) -> None:
        """Raises ProducerFenced if this process no longer owns the stream."""
        found, _ = self.find_owner()
        if found == self.owner:
            return
        why = f"{OWNER} is missing or cannot be read; this producer stops. Start it again, and it continues"
        if found is not None:
            why = f"{found} has taken this stream over; this producer stops. Nothing is lost: the other one continues"
        holder = None if found is None else str(found)
        raise ProducerFenced(f"{self.url}: {why} after the last sealed chunk", directory=self.url, holder=holder)

    def invalid(self, name: str, why: str, chunk: int | None = None) -> StreamInvalid:
        """Returns an error about an object; the name "" means the stream."""
        return StreamInvalid(f"{self.name_of(name)}: {why}", directory=self.url, chunk=chunk)

    def tagged(self, name: str) -> tuple[bytes | None, str | None]:
        """Returns an object and the tag of this version, None and None if there is none."""
        return _if_there(lambda: self.get_tagged(name), (None, None))


def _if_there(call: Callable[[], _T], otherwise: _U) -> _T | _U:
    try:
        return call()
    except FileNotFoundError:
        return otherwise


def next_owner(before: records.Owner | None) -> records.Owner:
    """Returns the owner record of this process, with the epoch after the previous owner's."""
    epoch = before.epoch + 1 if before else 1
    return records.Owner(epoch, secrets.token_hex(8), socket.gethostname() or "unknown", os.getpid(), time.time())


@dataclass(frozen=True, slots=True)
class Found:
    """The stream in the store: manifest, None if there is no stream; chunks not retired; sizes by name; end record."""

    manifest: records.Manifest | None
    listing: Listing
    sizes: Mapping[str, int]
    end: records.End | None

    @property
    def unsealed(self) -> list[str]:
        """Names of data objects and side files without a seal, left by a producer that stopped while publishing."""
        kinds = (self.listing.data, self.listing.arrays)
        return [name for names in kinds for chunk, name in sorted(names.items()) if chunk not in self.listing.seals]


def read_stream(store: StreamStore, samples_per_chunk: int | None) -> Found:
    """Reads the state of a stream. Raises StreamMismatch for another `samples_per_chunk`; None accepts any."""
    url, data = store.url, store.find(MANIFEST)
    manifest = None if data is None else records.Manifest.decode(data, store.name_of(MANIFEST))
    if manifest is not None and samples_per_chunk not in (None, size := manifest.samples_per_chunk):
        what = f"{url}: the stream has {size} samples per chunk, which never changes; got {samples_per_chunk}"
        expected, actual = str(samples_per_chunk), str(size)
        raise StreamMismatch(f"{what}. Use {size}, or another place", directory=url, expected=expected, actual=actual)
    sizes = store.names()
    listing = sort_names(sizes, url)
    if manifest is None and (listing.data or listing.seals):
        raise store.invalid("", f"holds chunk objects but no {MANIFEST}: not made by lazyshard; use another place")
    if manifest is None or not manifest.arrays:
        # An object with the name of a side file does not belong to this stream.
        listing = replace(listing, arrays={})
    # Read after the listing: the watermark is raised before each deletion, so chunks missing above are below it now.
    if manifest is not None and (data := store.find(RETIRED)) is not None:
        retired = records.Retired.decode(data, store.name_of(RETIRED))
        if retired.stream_id == manifest.stream_id:
            listing = listing.starting_at(retired.chunks_before)
    check_gaps(stream_path(url), listing, manifest is not None and manifest.arrays)
    data = store.find(END)
    return Found(manifest, listing, sizes, None if data is None else records.End.decode(data, store.name_of(END)))


class StoreShelf(Shelf):
    """The chunks of a stream in an object store; `directory` is where its consumers' files are read.

    Deletion works as in a directory: first the watermark, then each seal before its data.
    """

    remote = True

    def __init__(self, store: StreamStore, directory: Path, found: Found) -> None:
        super().__init__(directory, store.url)
        self.store, self._manifest = store, found.manifest
        self._marked = found.listing.first
        # Eight bytes per chunk, so 8 MB for a million chunks. 0 for retired chunks.
        self._sizes = array("Q", [0] * self._marked)
        for chunk in range(self._marked, found.listing.sealed):
            self._sizes.append(sum(found.sizes.get(name, 0) for name in names_of(chunk, arrays=True)))
        self._leftovers = [*found.listing.leftovers]  # names below the watermark that are still to be deleted

    def first(self) -> int:
        """Returns the number of the oldest chunk that is not retired."""
        return self._marked

    def stock(self, first: int, stop: int, *, exact: bool) -> Stock:
        """Returns the sizes of the chunks [first, stop), always exact."""
        sizes = self._sizes[first:stop]
        return Stock(first, stop, sum(sizes), largest=max(sizes, default=0))

    def chunk_size(self, chunk: int) -> int:
        """Returns the bytes of a chunk; of a retired chunk, those it had before."""
        return sum(self._sizes[chunk : chunk + 1])

    def used_bytes(self, published: int) -> int:
        """Returns the bytes of the stream, in the store and pending."""
        return sum(self._sizes[self._marked : published])

    def add(self, size: int) -> None:
        """Adds the bytes of the next chunk."""
        self._sizes.append(size)

    def announce(self, published: int) -> None:
        """Does a part of the pending deletions."""
        self.delete()

    def retire(self, chunks_before: int, published: int, check: Callable[[], Path | None]) -> None:
        """Deletes the chunks of [0, chunks_before) that no consumer needs, never the newest, in parts."""
        # The consumers are read again right before.
        done = min((consumer.chunks_before for consumer in list_consumers(self.directory, published)), default=0)
        self.mark(min(chunks_before, published - 1, done))
        self.delete()

    def mark(self, chunks_before: int) -> None:
        """Raises the watermark, if it is below: the chunks before it may be deleted."""
        if chunks_before > self._marked and self._manifest is not None:
            self.store.replace(RETIRED, records.Retired(self._manifest.stream_id, chunks_before, time.time()).encode())
            for chunk in range(self._marked, chunks_before):
                self._leftovers += names_of(chunk, arrays=self._manifest.arrays)
            self._marked = chunks_before

    def delete(self) -> None:
        """Deletes some of the objects below the watermark."""
        left, self._leftovers = self._leftovers[:_AT_ONCE], self._leftovers[_AT_ONCE:]
        self.store.remove(*left)


class Spool:
    """A spool, locked until `close`. `folder` is the spool itself, `stream` the directory in which the run publishes.

    Raises ProducerFenced if another process of this machine holds the lock.
    """

    def __init__(self, root: Path, url: str) -> None:
        # A readable name, made unique by a hash.
        readable = re.sub(r"[^A-Za-z0-9]+", "-", url.partition("://")[2]).strip("-")[:60]
        self.folder: Final = root.absolute() / f"{readable}-{xxhash.xxh3_64_hexdigest(url.rstrip('/').encode())}"
        self.stream: Final = self.folder / "stream"
        self._journals, self._owners = self.folder / "journals", self.folder / "owners.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self.folder / "lock", timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except filelock.Timeout as cause:
            holder = "a process of this machine"
            why = f"already produces into this stream (it holds {self._lock.lock_file}); stop it, or use another place"
            raise ProducerFenced(f"{url}: {holder} {why}", directory=url, holder=holder) from cause

    def close(self) -> None:
        """Releases the lock. May be called twice."""
        self._lock.release()

    def tokens(self) -> tuple[str, ...]:
        """Returns the tokens under which this spool may own the stream in the store; empty if unknown."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            tokens = orjson.loads(self._owners.read_bytes())["tokens"]
            if all(isinstance(token, str) for token in tokens):
                return tuple(tokens)
        return ()

    def note_tokens(self, *tokens: str) -> None:
        """Durably replaces the list of tokens."""
        _write(self._owners, orjson.dumps({"tokens": tokens}, option=orjson.OPT_APPEND_NEWLINE))

    def clear(self) -> None:
        """Deletes the spooled stream. The tokens go first, so the remains of an interrupted call are not used."""
        remove(self._owners)
        sync_directory(self.folder)
        for name in ("stream", "journals", "restoring"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder / name)
        sync_directory(self.folder)

    def restore(self, store: StreamStore, found: Found) -> None:
        """Rebuilds the stream's directory from the store; raises as the function `restore`."""
        made = self.folder / "restoring"
        restore(store, found, made)
        sync_directory(made)
        rename(made, self.stream)
        sync_directory(self.folder)

    def keep_journals(self) -> None:
        """Keeps the stream's current journals until `drop_journals`, because the run may delete them at any time."""
        for path in list_journals(self.stream / DIRECTORY):
            self._journals.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(path, self._journals / path.name)

    def journals(self) -> list[Path]:
        """Returns the kept journals, sorted by name."""
        return sorted(list_journals(self._journals))

    def drop_journals(self) -> list[str]:
        """Deletes kept journals that the stream no longer has, and returns their names in the store."""
        gone = {path.name for path in self.journals()} - {path.name for path in list_journals(self.stream / DIRECTORY)}
        for name in gone:
            remove(self._journals / name)
        return [f"{DIRECTORY}/{name}" for name in sorted(gone)]

    @property
    def ended(self) -> bool:
        """Whether the spooled stream has ended."""
        return os.path.lexists(self.stream / END)


def restore(store: StreamStore, found: Found, folder: Path, *, ended: bool = False) -> None:
    """Fills a new folder with the newest chunk and the records of a stream in the store.

    After an error the folder may be incomplete. With `ended`, copies the head and no rows: enough to show the end.
    """
    assert found.manifest is not None
    folder.mkdir()
    last = found.listing.sealed - 1
    newest = [] if last < 0 else names_of(last, arrays=found.manifest.arrays)[: 1 if ended else None]
    journals = [f"{DIRECTORY}/{name}" for name in store.names(DIRECTORY) if is_journal_name(name)]
    if journals:
        (folder / DIRECTORY).mkdir()
    for name in (*newest, MANIFEST, END, QUARANTINE, *([HEAD] if ended else []), *journals):
        data = store.find(name)
        if data is not None:
            _write(folder / name, data)
        elif name in newest:
            url = store.name_of(name)
            raise ChunkMissing(f"{url}: was deleted just now; restore it from a copy", file=url, chunk=last)
    if last > 0:
        _write(folder / RETIRED, records.Retired(found.manifest.stream_id, last, time.time()).encode())


def _write(path: Path, data: bytes) -> None:
    publish_bytes(data, path, path.with_name(f".{path.name}.new"))
