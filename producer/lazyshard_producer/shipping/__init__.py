"""The place where a run publishes: a directory, or a local spool that a thread uploads to an object store.

At the start, a run into a store locks the spool, reads owner and stream, replaces the owner with its own token by a
conditional put, and reads again what was published meanwhile. An invalid spool is rebuilt from the store. From then on
the run publishes into the spool's directory. docs/object-storage-producer.md has the order of steps.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from lazyshard.errors import LazyShardError
from lazyshard.format.records import HEAD, MANIFEST, Head, Manifest, seal_name
from lazyshard.store.files import UrlPath, is_url, read_file, stream_name
from lazyshard.stream import ChunkWriter
from lazyshard.stream.listing import list_kept
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import load_extra
from lazyshard_producer.following.journal import DIRECTORY, named_journals
from lazyshard_producer.limits import Shelf
from lazyshard_producer.shipping.sequenced import StoreWriter
from lazyshard_producer.shipping.shipper import Shipper, is_same_chunk
from lazyshard_producer.shipping.store import Found, Spool, StreamStore, next_owner, read_stream, restore
from lazyshard_producer.stop import Stop


@contextlib.contextmanager
def open_shelf(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> Iterator[Shelf]:
    """Yields the shelf of a run, in whose directory it publishes, and releases it afterwards.

    Unless the stream has ended, calls `prepare` before fencing another producer; it raises if the run cannot start.
    """
    if not is_url(settings.out):
        yield Shelf(Path(settings.out))
        return
    # This directory outlives processes and reboots.
    state = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    root = Path(settings.spool or state / "lazyshard" / "spool")
    kept = f"Published chunks that are not uploaded yet are kept in {root}; the same command continues with them"

    store = _open_store(settings.place, settings.store_patience_s, kept, stop.sleep)
    found = read_stream(store, settings.samples_per_chunk)
    if found.end is not None and _is_finished(store, found):
        with _copied(store, found, ended=True) as folder:
            yield Shelf(folder)
        return
    if found.end is None:
        prepare()
    if not store.conditional:
        alone = "a second producer is detected only by reading stream.owner"
        warn(f"{settings.place}: this store does not support conditional puts; {alone}")
    with contextlib.closing(Spool(root, store.url)) as spool:
        token = _take(store, spool, warn)
        found = read_stream(store, settings.samples_per_chunk)
        if not _goes_with(spool, store, found, warn):
            spool.clear()
            spool.note_tokens(token)
            if found.manifest is not None:
                spool.restore(store, found)
        with Shipper(store, spool, found, settings.max_spool, stop, warn) as shelf:
            yield shelf


def open_sequenced(directory: UrlPath, patience_s: float, pause: Callable[[float], bool]) -> ChunkWriter:
    """Returns the writer of a stream of several writers in an object store, for its sequencer; see `StoreWriter`."""
    # It has what a sequencer needs of a `ChunkWriter`.
    return cast(ChunkWriter, StoreWriter(directory, _open_store(directory.url, patience_s, "Nothing is lost", pause)))


@contextlib.contextmanager
def as_directory(place: str, samples_per_chunk: int | None) -> Iterator[str]:
    """Yields a directory with the state of a stream: its own, or a copy of the newest objects in an object store.

    If there is no stream yet, the directory does not exist. `samples_per_chunk` None accepts the manifest's.
    """
    if not is_url(place):
        yield place
        return
    store = _open_store(place, 10.0, "Nothing was changed", threading.Event().wait)
    with _copied(store, read_stream(store, samples_per_chunk)) as folder:
        yield str(folder)


@contextlib.contextmanager
def _copied(store: StreamStore, found: Found, *, ended: bool = False) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lazyshard-") as folder:
        copy = Path(folder, "stream")
        if found.manifest is not None:
            restore(store, found, copy, ended=ended)
        yield copy


def _open_store(place: str, patience_s: float, left_in: str, pause: Callable[[float], bool]) -> StreamStore:
    for package in ("fsspec", "s3fs") if place.lower().startswith(("s3://", "s3a://")) else ("fsspec",):
        load_extra(f"{place}: this store", package, "objects")
    return StreamStore(stream_name(place), patience_s, left_in, pause)


def _take(store: StreamStore, spool: Spool, warn: Callable[[str], None]) -> str:
    """Becomes the owner and returns the new token; clears the spool if another producer was the owner since."""
    before, tag = store.find_owner()
    ours = next_owner(before)
    kept = [before.token] if before is not None and before.token in spool.tokens() else []
    if not kept:
        if spool.stream.is_dir():
            since = f"{before} has taken over the stream since" if before else "the stream is gone from the store"
            warn(f"{spool.folder}: is discarded, because {since}; chunks that were not uploaded are produced again")
        spool.clear()
    # A failed start may or may not have put its token, so any of the recent ones may be in the store.
    spool.note_tokens(*kept, *spool.tokens()[-8:], ours.token)
    store.take(ours, tag)
    return ours.token


def _goes_with(spool: Spool, store: StreamStore, found: Found, warn: Callable[[str], None]) -> bool:
    """Returns whether a spool matches the store, or holds all chunks that follow those in the store."""
    if not spool.stream.is_dir():
        return False
    try:
        manifest, kept = Manifest.decode(read_file(spool.stream / MANIFEST)), list_kept(spool.stream)
    except FileNotFoundError:
        return found.manifest is None
    except (LazyShardError, OSError) as error:
        warn(f"{spool.folder}: is discarded: {error}")
        return False
    if found.manifest is None:
        return kept.first == 0
    last = found.listing.sealed - 1
    fits = found.manifest == manifest and kept.first <= last + 1 <= kept.sealed
    fits &= found.end is None or spool.ended
    if not fits or last < kept.first:
        return fits
    there = store.find(seal_name(last))
    return there is not None and is_same_chunk(there, read_file(spool.stream / seal_name(last)), last)


def _is_finished(store: StreamStore, found: Found) -> bool:
    """Returns whether all steps that follow the end are done."""
    assert found.end is not None
    try:
        head = Head.decode(store.find(HEAD) or b"")
    except LazyShardError:
        return False
    complete = head.ended and head.chunks == found.end.chunks == found.listing.sealed
    journals = set(store.names(DIRECTORY)) - named_journals(found.end.source)
    return complete and not found.listing.leftovers and not found.unsealed and not journals
