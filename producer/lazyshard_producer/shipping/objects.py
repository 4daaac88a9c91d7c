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

import contextlib
import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.format.names import HEAD, MANIFEST, seal_name
from lazyshard.format.records import Head, Manifest, Owner
from lazyshard.store.files import read_file
from lazyshard.store.urls import stream_name
from lazyshard.stream.retention import list_kept
from lazyshard_producer.configuration.quantities import show_bytes
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from lazyshard_producer.holding import Gate, Hold, Holdback
from lazyshard_producer.shipping import Destination
from lazyshard_producer.shipping.object_shelf import ObjectShelf
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


class ObjectDestination(Destination):
    """A stream in an object store that is ours, with its spool.

    Its gate is itself: a run is held back too where too much is on its way, and the shipper told of each chunk.
    """

    def __init__(
        self,
        settings: Settings,
        store: StreamStore,
        spool: Spool,
        found: Found,
        stop: Stop,
        began: threading.Event,
        giving_up: threading.Event,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(str(spool.stream))
        self._max_spool = settings.max_spool
        self._url = settings.out
        self._spool = spool
        self._store = store
        self._stop = stop
        self._began = began
        self._holdback: Holdback | None = None
        self._warn = warn
        self._objects = self.shelf = ObjectShelf(store, spool.stream, found)
        self._shipper = Shipper(store, spool, self._objects, found, giving_up)
        self._settled = False

    def begin(self, published_chunks: int) -> None:
        """See `Destination`."""
        # Before the run looks at them for the first time; the thread does not call the store yet.
        self._objects.pull()
        self._announce(published_chunks)
        # From here on a signal is the run's affair.
        self._began.set()
        self._shipper.start()

    def check(self) -> None:
        """See `Destination`."""
        self._shipper.check()

    def gate(self, holdback: Holdback | None) -> Gate:
        """See `Destination`."""
        self._holdback = holdback
        return self

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """See `Gate`. Raises what the shipper has failed with."""
        full = self._full()
        if full is not None or self._holdback is None:
            return full
        return self._holdback.before_chunk(published_chunks, published_samples)

    def after_publish(self, published_chunks: int) -> None:
        """See `Gate`."""
        self._announce(published_chunks)
        if self._holdback is not None:
            self._holdback.after_publish(published_chunks)

    def settle(self, published_chunks: int, tell: Callable[[str | None], None]) -> bool:
        """See `Destination`."""
        if not self._began.is_set():
            self.begin(published_chunks)
        self._announce(published_chunks)
        self._shipper.begin_to_close()
        try:
            seconds = None if self._stop.requested is None else LEAVE_S
            self._settled = self._wait(seconds, tell)
        finally:
            tell(None)
        return self._settled

    def leave_after(self, error: Exception) -> None:
        """Puts what was published before an error, and the head that tells of it, if that is soon done."""
        if not self._began.is_set() or self._settled:
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
            if self._settled and self._spool.ended:
                self._spool.clear()
        finally:
            self._shipper.give_up(_SLICE_S)

    def _announce(self, published_chunks: int) -> None:
        if published_chunks > self._objects.announced:
            self._spool.keep_journals()
        self._objects.announce(published_chunks)

    def _full(self) -> Hold | None:
        """Returns why no other chunk may come now; None if it may."""
        self.check()
        pending = self._objects.pending_bytes
        if not pending or pending + self._objects.largest <= self._max_spool:
            return None
        trouble = self._store.trouble
        why = trouble or "the store takes them more slowly than rows come"
        return Hold(
            reason=f"--max-spool {show_bytes(self._max_spool)}: {count(self._left(), 'chunk')} ({show_bytes(pending)}) "
            f"wait in {self._spool.folder} to be put to {self._url}; {why}",
            retry_s=_FULL_RETRY_S,
            stalled=trouble is not None,
        )

    def _wait(self, seconds: float | None, tell: Callable[[str | None], None] = lambda text: None) -> bool:
        """Waits for the shipper to end; a signal that comes meanwhile leaves it `LEAVE_S`. Warns where it has not."""
        due = None if seconds is None else time.monotonic() + seconds
        while not self._shipper.is_complete():
            if due is None and self._stop.requested is not None:
                due = time.monotonic() + LEAVE_S
            trouble, left = self._store.trouble, self._left()
            if due is not None and time.monotonic() > due:
                are = "is" if left == 1 else "are"
                what = f"{count(left, 'chunk')} of {self._url} {are}" if left else "the last facts are"
                why = f": {trouble}" if trouble else ""
                self._warn(
                    f"{what} still to be put to the store, and kept in {self._spool.folder}{why}; the same command "
                    f"here goes on with that, one on another machine makes it again"
                )
                return False
            where = f"still to be put to {self._url}, and kept in {self._spool.folder}"
            tell(f"{count(left, 'chunk')} {where}; {trouble}" if trouble else None)
            time.sleep(_SLICE_S)
        return True

    def _left(self) -> int:
        return self._objects.announced - self._objects.shipped


def check_extra(url: str) -> None:
    """Checks that the packages for a URL are installed; raises ExtraMissing."""
    for package in ("fsspec", "s3fs") if url.lower().startswith(("s3://", "s3a://")) else ("fsspec",):
        if importlib.util.find_spec(package) is None:
            raise ExtraMissing(
                f"{url}: {package} is needed for object stores and is not installed: pip install 'lazyshard[objects]'",
                package=package,
                extra="objects",
            )


def copy_newest(url: str, samples_per_chunk: int | None, folder: Path) -> None:
    """Copies what tells how far a stream in an object store is into a new folder, if there is one. Changes nothing."""
    check_extra(url)

    def pause(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    store = StreamStore(stream_name(url), _LOOK_PATIENCE_S, "Nothing was changed", pause=pause)
    found = look(store, samples_per_chunk)
    if found.manifest is not None:
        restore(store, found, folder)


@contextlib.contextmanager
def open_objects(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> Iterator[Destination]:
    """Takes a stream in an object store over; see `open_destination`.

    Of one that has ended, all being done, it yields a directory with a copy of what tells so.
    """
    check_extra(settings.out)
    root = Path(settings.spool) if settings.spool is not None else default_root()
    kept = f"What was published and is not there yet is kept in {root}; the same command goes on with it"
    began, giving_up = threading.Event(), threading.Event()

    def pause(seconds: float) -> bool:
        # A signal breaks it off only while the stream is being opened.
        return giving_up.wait(seconds) or (stop.requested is not None and not began.is_set())

    store = StreamStore(stream_name(settings.out), settings.store_patience_s, kept, pause=pause)
    found = look(store, settings.samples_per_chunk)
    if found.end is not None and _is_finished(store, found):
        with tempfile.TemporaryDirectory(prefix="lazyshard-") as folder:
            restore(store, found, Path(folder, "stream"), ended=True)
            yield Destination(os.path.join(folder, "stream"))
        return
    if found.end is None:
        prepare()
    if not store.objects.conditional:
        warn(
            f"{settings.out}: this store cannot put an object on condition that there is none, so a second producer on "
            f"another machine is only kept out as in a shared directory: by looks at stream.owner"
        )
    spool = Spool(root, store.url)
    try:
        owner = _take(store, spool, warn)
        found = look(store, settings.samples_per_chunk)
        if not _goes_with(spool, store, found, warn):
            spool.clear()
            spool.note_tokens([owner.token])
            if found.manifest is not None:
                spool.restore(store, found)
        destination = ObjectDestination(settings, store, spool, found, stop, began, giving_up, warn)
        try:
            yield destination
        except Exception as error:
            destination.leave_after(error)
            raise
        finally:
            destination.close()
    finally:
        spool.release()


def _take(store: StreamStore, spool: Spool, warn: Callable[[str], None]) -> Owner:
    """Becomes the owner, and throws the spool away if somebody else has been it since."""
    found = store.find_owner()
    before, ours = found.owner, next_owner(found.owner)
    kept = [before.token] if before is not None and before.token in spool.tokens() else []
    if not kept:
        if spool.stream.is_dir():
            since = f"{before} has had the stream since" if before else "the stream is gone from the store"
            warn(f"{spool.folder}: is not gone on with, as {since}; what was not put to the store is made again")
        spool.clear()
    spool.note_tokens([*kept, *spool.tokens()[-_KEPT_TOKENS:], ours.token])
    store.take(ours, found)
    return ours


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
    if found.manifest != manifest or not kept.first <= found.chunks <= kept.sealed:
        return False
    if found.end is not None and not spool.ended:
        return False
    last = found.chunks - 1
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
