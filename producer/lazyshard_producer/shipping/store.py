"""A stream in an object store: what is in it, and who may put to it; and the spool of this machine for it.

`stream.owner` is taken under a condition, and a start always takes the stream over: no lease is waited for or renewed.
The one before finds itself fenced at its next look, and could publish no chunk twice: seals are put where none is.

The spool, a folder of its own for each URL, counts as long as the owner in the store is one of `owners.json`::

    lock          held while a producer of this machine runs on the URL; stays
    owners.json   under which tokens this spool has owned the stream in the store
    stream/       the newest chunks, a directory like any other; those put to the store are deleted from it
    journals/     hard links to journals of followed directories that a chunk still to be put may name
    restoring/    a `stream/` that is being made from what is in the store
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import filelock
import orjson
import xxhash

from lazyshard.errors import ChunkMissing, FileInvalid, ProducerFenced, StreamInvalid, StreamMismatch
from lazyshard.format import records
from lazyshard.format.records import END, HEAD, MANIFEST, OWNER, QUARANTINE, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.store.durable import publish_bytes, remove, rename, sync_directory
from lazyshard.store.files import stream_path
from lazyshard.store.objects import ObjectStore
from lazyshard.stream.listing import Listing, sort_names
from lazyshard.stream.lock import check_gaps
from lazyshard_producer.following.journal import DIRECTORY, is_journal_name
from lazyshard_producer.stop import GivenUp

_T = TypeVar("_T")
_U = TypeVar("_U")

SHOWN_S: Final = 2.0  # a failure that passes sooner is nobody's concern


class StreamStore(ObjectStore):
    """The objects of a stream. `owner` is this process, once it has taken the stream.

    While a call is repeated, `trouble` says since when and why, and `pause` waits; where that returns True the call
    raises GivenUp. `left_in` says what became of the stream where the store has failed for `patience_s`.
    """

    def __init__(self, url: str, patience_s: float, left_in: str, pause: Callable[[float], bool]) -> None:
        super().__init__(url, patience_s=patience_s)
        self.owner: records.Owner | None = None
        self.pause = pause
        self._advice = f"{left_in}; --store-patience-seconds {patience_s:g} says how long to try"
        self._failing: tuple[float, str] | None = None

    @property
    def trouble(self) -> str | None:
        """Why nothing comes through, for how long, in words; None where it does, and in the first moments."""
        if (failing := self._failing) is None or (lasted := time.monotonic() - failing[0]) < SHOWN_S:
            return None
        return f"the store has not answered for {lasted:.0f} s ({failing[1]})"

    def request(self, name: str, doing: str, call: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        """As of `ObjectStore`."""
        found = super().request(name, doing, call, patience_s)
        self._failing = None
        return found

    def _wait(self, pause: float, started: float, most: float, doing: str, words: str) -> None:
        self._failing = started if self._failing is None else self._failing[0], words
        if self.pause(pause):
            raise GivenUp

    def find(self, name: str) -> bytes | None:
        """Returns an object, None where there is none."""
        return _if_there(lambda: self.get(name), None)

    def names(self, folder: str = "") -> dict[str, int]:
        """Returns the names right under a folder with their sizes, nothing where there is none."""
        return _if_there(lambda: self.list(folder), {})

    def remove(self, *names: str) -> None:
        """Deletes objects, if the stream is still ours."""
        if names:
            self.check_owner()
        for name in names:
            self.delete(name)

    def replace(self, name: str, data: bytes) -> bytes | None:
        """Puts an object in place of the one of its name, unless it is the same; returns that one.

        Who is fenced meanwhile cannot overwrite what its successor put: the tag is older than its look at the owner.
        """
        # It is another one than before only if somebody put it in between: not so often in a row.
        for _ in range(10):
            found, tag = self._tagged(name)
            if found == data:
                return None
            self.check_owner()
            if self.put_new(name, data) if tag is None else self.put_matching(name, data, tag):
                return found
        raise self.invalid(name, "somebody else puts this object all the time; find out who, and stop it")

    def find_owner(self) -> tuple[records.Owner | None, str | None]:
        """Looks who the owner is, None where none can be read; with the tag of its object, None where there is none."""
        data, tag = self._tagged(OWNER)
        with contextlib.suppress(FileInvalid):
            return None if data is None else records.Owner.decode(data, self.name_of(OWNER)), tag
        return None, tag

    def take(self, owner: records.Owner, tag: str | None) -> None:
        """Takes the stream from whoever had it when it was looked at."""
        self.owner, data = owner, owner.encode()
        taken = self.put_new(OWNER, data) if tag is None else self.put_matching(OWNER, data, tag)
        # A try whose answer was lost may have done it.
        if not taken or not self.conditional:
            self.check_owner()

    def check_owner(self) -> None:
        """Looks whether the stream is still ours."""
        found, _ = self.find_owner()
        if found == self.owner:
            return
        why = f"{OWNER} is gone or cannot be read; this producer stops: start it again, and it continues"
        if found is not None:
            why = f"{found} has taken this stream over; this producer stops. Nothing is lost: the other one continues"
        holder = None if found is None else str(found)
        raise ProducerFenced(f"{self.url}: {why} after the last sealed chunk", directory=self.url, holder=holder)

    def invalid(self, name: str, why: str, chunk: int | None = None) -> StreamInvalid:
        """Returns the error of an object, "" for the stream."""
        return StreamInvalid(f"{self.name_of(name)}: {why}", directory=self.url, chunk=chunk)

    def _tagged(self, name: str) -> tuple[bytes | None, str | None]:
        return _if_there(lambda: self.get_tagged(name), (None, None))


def _if_there(call: Callable[[], _T], otherwise: _U) -> _T | _U:
    try:
        return call()
    except FileNotFoundError:
        return otherwise


def next_owner(before: records.Owner | None) -> records.Owner:
    """Returns this process as the owner after another one."""
    epoch = before.epoch + 1 if before else 1
    return records.Owner(epoch, secrets.token_hex(8), socket.gethostname() or "unknown", os.getpid(), time.time())


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the store: the manifest if there is one, the chunks that are not retired, sizes by name, the end."""

    manifest: records.Manifest | None
    listing: Listing
    sizes: Mapping[str, int]
    end: records.End | None

    @property
    def unsealed(self) -> list[str]:
        """Names of data objects and side files without a seal: what a producer was about to publish when it stopped."""
        kinds = (self.listing.data, self.listing.arrays)
        return [name for names in kinds for chunk, name in sorted(names.items()) if chunk not in self.listing.seals]


def look(store: StreamStore, samples_per_chunk: int | None) -> Found:
    """Looks at a stream, of which so many samples per chunk are asked for; None takes what the manifest says."""
    url, data = store.url, store.find(MANIFEST)
    manifest = None if data is None else records.Manifest.decode(data, store.name_of(MANIFEST))
    if manifest is not None and samples_per_chunk not in (None, size := manifest.samples_per_chunk):
        what = f"{url}: the stream has {size} samples per chunk, asked for {samples_per_chunk}; that never changes"
        expected, actual = str(samples_per_chunk), str(size)
        raise StreamMismatch(f"{what}. Use {size}, or another place", directory=url, expected=expected, actual=actual)
    sizes = store.names()
    listing = sort_names(sizes, url)
    if manifest is None and (listing.data or listing.seals):
        raise store.invalid("", f"holds chunk objects but no {MANIFEST}, so somebody else made them; use another place")
    if manifest is None or not manifest.arrays:
        # Whatever has the name of a side file here is none of ours.
        listing = replace(listing, arrays={})
    # After the listing: the mark comes before each deletion, so whatever was missing above is below it now.
    if manifest is not None and (data := store.find(RETIRED)) is not None:
        retired = records.Retired.decode(data, store.name_of(RETIRED))
        if retired.stream_id == manifest.stream_id:
            listing = listing.starting_at(retired.chunks_before)
    check_gaps(stream_path(url), listing, manifest is not None and manifest.arrays)
    data = store.find(END)
    return Found(manifest, listing, sizes, None if data is None else records.End.decode(data, store.name_of(END)))


class Spool:
    """A spool, locked until it is let go of. `folder` is its own, `stream` the directory in which the run publishes."""

    def __init__(self, root: Path, url: str) -> None:
        # To be recognised, and unlike all others.
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
        """Lets the next producer in. May be called twice."""
        self._lock.release()

    def tokens(self) -> tuple[str, ...]:
        """Returns the tokens under which this spool may own the stream in the store; none where that is not known."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            tokens = orjson.loads(self._owners.read_bytes())["tokens"]
            if all(isinstance(token, str) for token in tokens):
                return tuple(tokens)
        return ()

    def note_tokens(self, *tokens: str) -> None:
        """Replaces these tokens durably."""
        _write(self._owners, orjson.dumps({"tokens": tokens}, option=orjson.OPT_APPEND_NEWLINE))

    def clear(self) -> None:
        """Throws away all of the stream that is here. What is left by an interrupted call is nobody's: see `tokens`."""
        remove(self._owners)
        sync_directory(self.folder)
        for name in ("stream", "journals", "restoring"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder / name)
        sync_directory(self.folder)

    def restore(self, store: StreamStore, found: Found) -> None:
        """Makes the stream's directory of what is in the store; raises as the function `restore`."""
        made = self.folder / "restoring"
        restore(store, found, made)
        sync_directory(made)
        rename(made, self.stream)
        sync_directory(self.folder)

    def keep_journals(self) -> None:
        """Keeps the journals that the stream has now until `drop_journals`: the run itself deletes them as it likes."""
        for path in _files(self.stream / DIRECTORY):
            self._journals.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(path, self._journals / path.name)

    def journals(self) -> list[Path]:
        """Returns the journals that are kept, by name."""
        return _files(self._journals)

    def drop_journals(self) -> list[str]:
        """Lets go of the kept journals that the stream does not have any more, and returns their names in the store."""
        gone = {path.name for path in self.journals()} - {path.name for path in _files(self.stream / DIRECTORY)}
        for name in gone:
            remove(self._journals / name)
        return [f"{DIRECTORY}/{name}" for name in sorted(gone)]

    @property
    def ended(self) -> bool:
        """Whether the stream has ended here."""
        return os.path.lexists(self.stream / END)


def restore(store: StreamStore, found: Found, folder: Path, *, ended: bool = False) -> None:
    """Fills a new folder from what is in the store, where a stream is. On an error it may be left in part.

    `ended`: it is to show only that the stream has ended: with the head, without rows.
    """
    assert found.manifest is not None
    folder.mkdir()
    last = found.listing.sealed - 1
    names_of = () if last < 0 else (seal_name,) if ended else (chunk_name, arrays_name, seal_name)
    newest = [name_of(last) for name_of in names_of if name_of is not arrays_name or found.manifest.arrays]
    journals = [f"{DIRECTORY}/{name}" for name in store.names(DIRECTORY) if is_journal_name(name)]
    if journals:
        (folder / DIRECTORY).mkdir()
    for name in (*newest, MANIFEST, END, QUARANTINE, *([HEAD] if ended else []), *journals):
        data = store.find(name)
        if data is not None:
            _write(folder / name, data)
        elif name in newest:
            url = store.name_of(name)
            raise ChunkMissing(f"{url}: was deleted a moment ago; restore it from a copy", file=url, chunk=last)
    if last > 0:
        _write(folder / RETIRED, records.Retired(found.manifest.stream_id, last, time.time()).encode())


def _write(path: Path, data: bytes) -> None:
    publish_bytes(data, path, path.with_name(f".{path.name}.new"))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError:
        return []
