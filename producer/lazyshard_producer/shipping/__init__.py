"""Where a run publishes: a directory, or a spool on this machine that a thread puts to an object store.

The order of a start into an object store::

    lock the spool of this machine
    look at the owner in the store, and at the stream
    the spool counts?   yes: what is in it and not in the store yet is put first
                        no:  it is thrown away and made anew of what is in the store
    note our token in the spool, then put it as the owner, on condition that the owner is the one looked at
    look at the stream again: what its last owner has published since that look counts too

From there on the run is one into a directory, the spool's; docs/object-storage-producer.md has the order of steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.format.names import HEAD, MANIFEST, seal_name
from lazyshard.format.records import Head, Manifest
from lazyshard.store.files import read_file
from lazyshard.store.urls import is_url, stream_name
from lazyshard.stream.retention import list_kept
from lazyshard_producer.configuration.settings import Settings, show_bytes
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from lazyshard_producer.holding import Gate, Hold, Holdback, Shelf
from lazyshard_producer.shipping.shipper import Shipper, is_same_chunk
from lazyshard_producer.shipping.spool import Spool, default_root, restore
from lazyshard_producer.shipping.store import Found, StreamStore, look, next_owner
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import count

LEAVE_S: Final = 20.0  # how long a run that was told to stop goes on putting: most systems kill after 30 s
FAILED_S: Final = 5.0  # the same for one that has failed otherwise
_LOOK_PATIENCE_S: Final = 10.0  # for a store that does not answer somebody who only wants to look
_KEPT_TOKENS: Final = 8  # a start that fails may have put its token or not: any of the last may be in the store
_FULL_RETRY_S: Final = 0.2
_SLICE_S: Final = 0.05


class Destination:
    """A directory in which a run publishes, and its shelf, where the chunks lie in the end."""

    def __init__(self, shelf: Shelf) -> None:
        self.directory = str(shelf.directory)
        self.shelf = shelf

    def begin(self, published_chunks: int) -> None:
        """The run's writer is open, with so many chunks."""

    def check(self) -> None:
        """Is called now and then; raises what has gone wrong behind the run's back."""

    def gate(self, holdback: Holdback | None) -> Gate | None:
        """Returns what is to be asked before each chunk and told after it; `holdback` is what the limits ask for."""
        return holdback

    def settle(self, published_chunks: int, tell: Callable[[str | None], None]) -> bool:
        """Returns when all is where it belongs, the writer being closed with so many chunks; False if it is not yet.

        `tell` is told now and then what is waited for; None for nothing out of the ordinary.
        """
        return True


@contextlib.contextmanager
def open_destination(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> Iterator[Destination]:
    """Yields the destination for `settings.out`, and lets go of all that it holds.

    `prepare` is called before another producer is fenced, unless the stream has ended: raises where the run cannot be.
    Of a stream in an object store that has ended, all being done, it is a directory with a copy of what tells so.
    """
    if not is_url(settings.out):
        yield Destination(Shelf(Path(settings.out)))
        return
    _check_extra(settings.out)
    root = Path(settings.spool) if settings.spool is not None else default_root()
    kept = f"What was published and is not there yet is kept in {root}; the same command goes on with it"

    def pause(seconds: float) -> bool:
        time.sleep(seconds)
        return stop.requested is not None

    store = StreamStore(stream_name(settings.out), settings.store_patience_s, kept, pause=pause)
    found = look(store, settings.samples_per_chunk)
    if found.end is not None and _is_finished(store, found):
        with tempfile.TemporaryDirectory(prefix="lazyshard-") as folder:
            restore(store, found, Path(folder, "stream"), ended=True)
            yield Destination(Shelf(Path(folder, "stream")))
        return
    if found.end is None:
        prepare()
    if not store.objects.conditional:
        alone = "a second producer is only kept out as in a shared directory: by looks at stream.owner"
        warn(f"{settings.out}: this store cannot put an object on condition that there is none, so {alone}")
    spool = Spool(root, store.url)
    try:
        token = _take(store, spool, warn)
        found = look(store, settings.samples_per_chunk)
        if not _goes_with(spool, store, found, warn):
            spool.clear()
            spool.note_tokens(token)
            if found.manifest is not None:
                spool.restore(store, found)
        destination = _ObjectDestination(settings, Shipper(store, spool, found), stop, warn)
        try:
            yield destination
        except Exception as error:
            destination.leave_after(error)
            raise
        finally:
            destination.close()
    finally:
        spool.release()


@contextlib.contextmanager
def as_directory(place: str, samples_per_chunk: int | None) -> Iterator[str]:
    """Yields a directory that tells how far a stream is: its own, or a copy of what is newest in an object store.

    Where no stream is there yet, it does not exist. `samples_per_chunk` None takes what the manifest says.
    """
    if not is_url(place):
        yield place
        return
    _check_extra(place)
    with tempfile.TemporaryDirectory(prefix="lazyshard-") as folder:
        copy = Path(folder, "stream")
        url, patience_s = stream_name(place), _LOOK_PATIENCE_S
        store = StreamStore(url, patience_s, "Nothing was changed", pause=threading.Event().wait)
        found = look(store, samples_per_chunk)
        if found.manifest is not None:
            restore(store, found, copy)
        yield str(copy)


def _check_extra(url: str) -> None:
    for package in ("fsspec", "s3fs") if url.lower().startswith(("s3://", "s3a://")) else ("fsspec",):
        if importlib.util.find_spec(package) is None:
            why = f"{package} is needed for object stores and is not installed: pip install 'lazyshard[objects]'"
            raise ExtraMissing(f"{url}: {why}", package=package, extra="objects")


class _ObjectDestination(Destination):
    """A stream in an object store that is ours, with its spool.

    Its gate is itself: a run is held back too where too much is on its way, and the shipper told of each chunk.
    """

    def __init__(self, settings: Settings, shipper: Shipper, stop: Stop, warn: Callable[[str], None]) -> None:
        super().__init__(shipper)
        self._settings, self._shipper, self._stop, self._warn = settings, shipper, stop, warn
        self._holdback: Holdback | None = None
        self._began = self._settled = False

    def begin(self, published_chunks: int) -> None:
        self._began = True
        self._shipper.start(published_chunks)

    def check(self) -> None:
        self._shipper.check()

    def gate(self, holdback: Holdback | None) -> Gate:
        self._holdback = holdback
        return self

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """As of `Gate`. Raises what the shipper has failed with."""
        self.check()
        pending, most = self._shipper.pending_bytes, self._settings.max_spool
        if pending and pending + self._shipper.largest > most:
            trouble = self._shipper.store.trouble
            waiting = f"{count(self._left(), 'chunk')} ({show_bytes(pending)}) wait in {self._shipper.spool.folder}"
            why = f"to be put to {self._settings.out}; {trouble or 'the store takes them more slowly than rows come'}"
            reason = f"--max-spool {show_bytes(most)}: {waiting} {why}"
            return Hold(reason=reason, retry_s=_FULL_RETRY_S, stalled=trouble is not None)
        return None if self._holdback is None else self._holdback.before_chunk(published_chunks, published_samples)

    def after_publish(self, published_chunks: int) -> None:
        """As of `Gate`."""
        self._shipper.announce(published_chunks)
        if self._holdback is not None:
            self._holdback.after_publish(published_chunks)

    def settle(self, published_chunks: int, tell: Callable[[str | None], None]) -> bool:
        if not self._began:
            self.begin(published_chunks)
        self._shipper.announce(published_chunks)
        self._shipper.begin_to_close()
        try:
            self._settled = self._wait(None if self._stop.requested is None else LEAVE_S, tell)
        finally:
            tell(None)
        return self._settled

    def leave_after(self, error: Exception) -> None:
        """Puts what was published before an error, and the head that tells of it, if that is soon done."""
        if not self._began or self._settled:
            return
        try:
            self._shipper.begin_to_close()
            self._wait(FAILED_S)
        except (LazyShardError, OSError) as other:
            if other is not error:
                self._warn(str(other))

    def close(self) -> None:
        """Stops the shipper, and throws the spool away where all of it is in the store and the stream has ended."""
        try:
            if self._settled and self._shipper.spool.ended:
                self._shipper.spool.clear()
        finally:
            self._shipper.give_up(_SLICE_S)

    def _wait(self, seconds: float | None, tell: Callable[[str | None], None] = lambda text: None) -> bool:
        """Waits for the shipper to end; a signal that comes meanwhile leaves it `LEAVE_S`. Warns where it has not."""
        due = None if seconds is None else time.monotonic() + seconds
        url, folder = self._settings.out, self._shipper.spool.folder
        while not self._shipper.is_complete():
            if due is None and self._stop.requested is not None:
                due = time.monotonic() + LEAVE_S
            trouble, left = self._shipper.store.trouble, self._left()
            if due is not None and time.monotonic() > due:
                what = f"{count(left, 'chunk')} of {url}" if left else "the last facts"
                again = "the same command here goes on with that, one on another machine makes it again"
                why = f": {trouble}" if trouble else ""
                self._warn(f"{what}: still to be put to the store, and kept in {folder}{why}; {again}")
                return False
            where = f"still to be put to {url}, and kept in {folder}"
            tell(f"{count(left, 'chunk')} {where}; {trouble}" if trouble else None)
            time.sleep(_SLICE_S)
        return True

    def _left(self) -> int:
        return self._shipper.announced - self._shipper.shipped


def _take(store: StreamStore, spool: Spool, warn: Callable[[str], None]) -> str:
    """Becomes the owner, and throws the spool away if somebody else has been it since; returns our token."""
    found = store.find_owner()
    before, ours = found.owner, next_owner(found.owner)
    kept = [before.token] if before is not None and before.token in spool.tokens() else []
    if not kept:
        if spool.stream.is_dir():
            since = f"{before} has had the stream since" if before else "the stream is gone from the store"
            warn(f"{spool.folder}: is not gone on with, as {since}; what was not put to the store is made again")
        spool.clear()
    spool.note_tokens(*kept, *spool.tokens()[-_KEPT_TOKENS:], ours.token)
    store.take(ours, found)
    return ours.token


def _goes_with(spool: Spool, store: StreamStore, found: Found, warn: Callable[[str], None]) -> bool:
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
    last = found.chunks - 1
    if found.manifest != manifest or not kept.first <= last + 1 <= kept.sealed:
        return False
    if found.end is not None and not spool.ended:
        return False
    if last < kept.first:
        return True
    there = store.get(seal_name(last))
    return there is not None and is_same_chunk(there, read_file(spool.stream / seal_name(last)), last)


def _is_finished(store: StreamStore, found: Found) -> bool:
    """Whether nothing is left to be done behind the end."""
    assert found.end is not None
    data = store.get(HEAD)
    try:
        head = None if data is None else Head.decode(data)
    except LazyShardError:
        head = None
    told = head is not None and head.ended and head.chunks == found.end.chunks == found.chunks
    journals = set(store.names(JOURNALS)) - named_journals(found.end.source)
    return told and not found.listing.leftovers and not found.unsealed and not journals
