"""Where a run publishes: a directory, or a spool on this machine that a thread puts to an object store.

A start into a store locks the spool, looks at the owner and the stream, puts our token as the owner on condition that
that is still so, and looks again at what was published since. A spool that does not count is made anew of the store.
From there on the run is one into a directory, the spool's; docs/object-storage-producer.md has the order of steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lazyshard.errors import LazyShardError
from lazyshard.format.records import HEAD, MANIFEST, Head, Manifest, seal_name
from lazyshard.store.files import is_url, read_file, stream_name
from lazyshard.stream.listing import list_kept
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.following.journal import DIRECTORY, named_journals
from lazyshard_producer.limits import Shelf
from lazyshard_producer.shipping.shipper import Shipper, is_same_chunk
from lazyshard_producer.shipping.store import Found, Spool, StreamStore, look, next_owner, restore
from lazyshard_producer.stop import Stop


@contextlib.contextmanager
def open_shelf(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> Iterator[Shelf]:
    """Yields the shelf of `settings.out`, in whose directory the run publishes, and lets go of all that it holds.

    `prepare` is called before another producer is fenced, unless the stream has ended: raises where the run cannot be.
    """
    if not is_url(settings.out):
        yield Shelf(Path(settings.out))
        return
    # It outlives processes and reboots.
    state = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    root = Path(settings.spool or state / "lazyshard" / "spool")
    kept = f"What was published and is not there yet is kept in {root}; the same command continues with it"

    def pause(seconds: float) -> bool:
        time.sleep(seconds)
        return stop.requested is not None

    store = _open_store(settings.out, settings.store_patience_s, kept, pause)
    found = look(store, settings.samples_per_chunk)
    if found.end is not None and _is_finished(store, found):
        with _copied(store, found, ended=True) as folder:
            yield Shelf(folder)
        return
    if found.end is None:
        prepare()
    if not store.conditional:
        alone = "a second producer is noticed only by looks at stream.owner"
        warn(f"{settings.out}: this store cannot put an object on condition that there is none; {alone}")
    with contextlib.closing(Spool(root, store.url)) as spool:
        token = _take(store, spool, warn)
        found = look(store, settings.samples_per_chunk)
        if not _goes_with(spool, store, found, warn):
            spool.clear()
            spool.note_tokens(token)
            if found.manifest is not None:
                spool.restore(store, found)
        with Shipper(store, spool, found, settings.max_spool, stop, warn) as shelf:
            yield shelf


@contextlib.contextmanager
def as_directory(place: str, samples_per_chunk: int | None) -> Iterator[str]:
    """Yields a directory that tells how far a stream is: its own, or a copy of what is newest in an object store.

    Where no stream is there yet, it does not exist. `samples_per_chunk` None takes what the manifest says.
    """
    if not is_url(place):
        yield place
        return
    store = _open_store(place, 10.0, "Nothing was changed", threading.Event().wait)
    with _copied(store, look(store, samples_per_chunk)) as folder:
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
        if importlib.util.find_spec(package) is None:
            why = f"{place}: {package} is needed and not installed: pip install 'lazyshard[objects]'"
            raise ExtraMissing(why, package=package, extra="objects")
    return StreamStore(stream_name(place), patience_s, left_in, pause)


def _take(store: StreamStore, spool: Spool, warn: Callable[[str], None]) -> str:
    """Becomes the owner, and throws the spool away if somebody else has been it since; returns our token."""
    before, tag = store.find_owner()
    ours = next_owner(before)
    kept = [before.token] if before is not None and before.token in spool.tokens() else []
    if not kept:
        if spool.stream.is_dir():
            since = f"{before} has had the stream since" if before else "the stream is gone from the store"
            warn(f"{spool.folder}: is not continued, as {since}; what was not put to the store is made again")
        spool.clear()
    # A start that fails may have put its token or not: any of the last may be in the store.
    spool.note_tokens(*kept, *spool.tokens()[-8:], ours.token)
    store.take(ours, tag)
    return ours.token


def _goes_with(spool: Spool, store: StreamStore, found: Found, warn: Callable[[str], None]) -> bool:
    """Whether a spool holds what is in the store, or all that continues from there."""
    if not spool.stream.is_dir():
        return False
    try:
        manifest, kept = Manifest.decode(read_file(spool.stream / MANIFEST)), list_kept(spool.stream)
    except FileNotFoundError:
        return found.manifest is None
    except (LazyShardError, OSError) as error:
        warn(f"{spool.folder}: is not continued: {error}")
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
    """Whether nothing is left to be done behind the end."""
    assert found.end is not None
    try:
        head = Head.decode(store.find(HEAD) or b"")
    except LazyShardError:
        return False
    told = head.ended and head.chunks == found.end.chunks == found.listing.sealed
    journals = set(store.names(DIRECTORY)) - named_journals(found.end.source)
    return told and not found.listing.leftovers and not found.unsealed and not journals
