"""Opens a stream in an object store for a run, or for a look at it.

The order of a start::

    lock the spool of this machine
    look at the owner in the store, and at the stream
    the spool counts?   yes: what is in it and not in the store yet is put first
                        no:  it is thrown away and made anew of what is in the store
    note our token in the spool, then put it as the owner, on condition that the owner is the one looked at
    look at the stream again: what its last owner has published since that look counts too

From there on the run is one into a directory, the spool's.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.format import Head, Manifest
from lazyshard.format.names import HEAD, MANIFEST, seal_name
from lazyshard.store.files import read_file
from lazyshard.store.objects import ObjectStore
from lazyshard.store.urls import stream_name
from lazyshard.stream.retire import list_kept
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from lazyshard_producer.shipping.chunks import is_same_chunk
from lazyshard_producer.shipping.destination import DirectoryDestination
from lazyshard_producer.shipping.found import Found, get, look, names_in
from lazyshard_producer.shipping.object_destination import ObjectDestination, Pause
from lazyshard_producer.shipping.ownership import FoundOwner, Ownership, find_owner, next_owner
from lazyshard_producer.shipping.restoring import restore
from lazyshard_producer.shipping.spool import Spool, default_root
from lazyshard_producer.shipping.tries import Tries
from lazyshard_producer.stop import Stop

_LOOK_PATIENCE_S: Final = 10.0
"""For a store that does not answer somebody who only wants to look."""


class EndedView(DirectoryDestination):
    """A stream in an object store that has ended, all being done: a directory with a copy of what tells so."""

    def __init__(self, folder: tempfile.TemporaryDirectory[str]) -> None:
        super().__init__(os.path.join(folder.name, "stream"))
        self._folder = folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the copy."""
        self._folder.cleanup()


def open_objects(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> ObjectDestination | EndedView:
    """Takes a stream in an object store over, unless it has ended and nothing is left to be done.

    Arguments and errors are those of `open_destination`.
    """
    check_extra(settings.out)
    store = ObjectStore(stream_name(settings.out), patience_s=0)
    root = Path(settings.spool) if settings.spool is not None else default_root()
    kept = f"What was published and is not there yet is kept in {root}; the same command goes on with it"
    pause = Pause(stop, threading.Event())
    tries = Tries(settings.out, settings.store_patience_s, kept, pause=pause)
    return _open(settings, store, root, tries, pause, warn, prepare)


def check_extra(url: str) -> None:
    """Checks that the packages for a URL are installed.

    Raises:
        ExtraMissing: one is not.
    """
    for package in ("fsspec", "s3fs") if url.lower().startswith(("s3://", "s3a://")) else ("fsspec",):
        if importlib.util.find_spec(package) is None:
            raise ExtraMissing(
                f"{url}: {package} is needed for object stores and is not installed: pip install 'lazyshard[objects]'",
                package=package,
                extra="objects",
            )


def copy_newest(url: str, samples_per_chunk: int | None, folder: Path) -> None:
    """Copies what tells how far a stream in an object store is into a new folder, if there is one. Changes nothing.

    Raises:
        LazyShardError, OSError: as `open_objects`.
    """
    check_extra(url)
    store = ObjectStore(stream_name(url), patience_s=0)
    tries = Tries(url, _LOOK_PATIENCE_S, "Nothing was changed", pause=_sleep)
    found = look(store, tries, samples_per_chunk)
    if found.manifest is not None:
        restore(store, tries, found, folder, time.time())


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _open(
    settings: Settings,
    store: ObjectStore,
    root: Path,
    tries: Tries,
    pause: Pause,
    warn: Callable[[str], None],
    prepare: Callable[[], None],
) -> ObjectDestination | EndedView:
    found = look(store, tries, settings.samples_per_chunk)
    if found.end is not None and _is_finished(store, tries, found):
        temporary = tempfile.TemporaryDirectory(prefix="lazyshard-")
        restore(store, tries, found, Path(temporary.name, "stream"), time.time(), ended=True)
        return EndedView(temporary)
    if found.end is None:
        prepare()
    if not store.conditional:
        warn(
            f"{settings.out}: this store cannot put an object on condition that there is none, so a second producer on "
            f"another machine is only kept out as in a shared directory: by looks at stream.owner"
        )
    spool = Spool(root, store.url)
    try:
        before = find_owner(store, tries)
        ownership = Ownership(store, tries, next_owner(before.owner, time.time()))
        kept = before.owner is not None and before.owner.token in spool.tokens()
        if not kept:
            _throw_away(spool, before, warn)
        owners = [before.owner.token] if kept and before.owner is not None else []
        spool.note_tokens([*owners, *spool.tokens()[-_KEPT_TOKENS:], ownership.owner.token])
        ownership.take(before)
        found = look(store, tries, settings.samples_per_chunk)
        if not _goes_with(spool, store, tries, found, warn):
            spool.clear()
            spool.note_tokens([ownership.owner.token])
            if found.manifest is not None:
                folder = spool.folder / "restoring"
                restore(store, tries, found, folder, time.time())
                spool.put_in_place(folder)
        return ObjectDestination(settings, store, spool, ownership, found, tries, pause, warn)
    except BaseException:
        spool.release()
        raise


_KEPT_TOKENS: Final = 8
"""A start that fails may have put its token or not: any of the last ones may be the one in the store later on."""


def _throw_away(spool: Spool, found: FoundOwner, warn: Callable[[str], None]) -> None:
    if spool.stream.is_dir():
        since = f"{found.owner} has had the stream since" if found.owner else "the stream is gone from the store"
        warn(f"{spool.folder}: is not gone on with, as {since}; what was not put to the store is made again")
    spool.clear()


def _goes_with(spool: Spool, store: ObjectStore, tries: Tries, found: Found, warn: Callable[[str], None]) -> bool:
    """Whether a spool holds what is in the store, or all that goes on from there."""
    if not spool.stream.is_dir():
        return False
    try:
        manifest = Manifest.decode(read_file(spool.stream / MANIFEST))
        kept = list_kept(spool.stream)
    except FileNotFoundError:
        return found.manifest is None
    except (LazyShardError, OSError) as error:
        warn(f"{spool.folder}: is not gone on with: {error}")
        return False
    if found.manifest is None:
        return kept.first == 0
    if found.manifest != manifest or not kept.first <= found.chunks <= kept.sealed:
        return False
    if found.end is not None and not spool.ended:
        return False
    last = found.chunks - 1
    if last < kept.first:
        return True
    name = seal_name(last)
    there = get(store, tries, name)
    return there is not None and is_same_chunk(there, read_file(spool.stream / name), last)


def _is_finished(store: ObjectStore, tries: Tries, found: Found) -> bool:
    """Whether nothing is left to be done behind the end."""
    assert found.end is not None
    data = get(store, tries, HEAD)
    try:
        head = None if data is None else Head.decode(data)
    except LazyShardError:
        head = None
    told = head is not None and head.ended and head.chunks == found.end.chunks == found.chunks
    journals = set(names_in(store, tries, JOURNALS)) - named_journals(found.end.source)
    return told and not found.listing.leftovers and not found.unsealed and not journals
