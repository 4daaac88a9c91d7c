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
from lazyshard.format.names import HEAD, MANIFEST, seal_name
from lazyshard.format.records import Head, Manifest
from lazyshard.inspection.disk_use import names_with_arrays
from lazyshard.store.files import read_file
from lazyshard.store.objects import ObjectStore
from lazyshard.store.urls import stream_name
from lazyshard.stream.retire import list_kept
from lazyshard_producer.configuration.quantities import show_bytes
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from lazyshard_producer.holding.holdback import Gate, Hold, Holdback
from lazyshard_producer.holding.shelf import SideFiles, chunk_size
from lazyshard_producer.shipping.destination import Destination
from lazyshard_producer.shipping.retiring import Backlog, ObjectShelf, Retiring
from lazyshard_producer.shipping.shipper import Shipper, is_same_chunk
from lazyshard_producer.shipping.spool import Spool, default_root, restore
from lazyshard_producer.shipping.store import (
    Found,
    FoundOwner,
    Ownership,
    Tries,
    find_owner,
    get,
    look,
    names_in,
    next_owner,
)
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import count

LEAVE_S: Final = 20.0
"""How long a run that was told to stop goes on putting what it has published: most systems kill after 30 s."""

FAILED_S: Final = 5.0
"""The same for one that has failed otherwise."""

_FULL_RETRY_S: Final = 0.2
_SLICE_S: Final = 0.05


class Pause:
    """The pause between two tries: broken off by an event, and while the stream is being opened by a signal."""

    def __init__(self, stop: Stop, giving_up: threading.Event) -> None:
        self.stop = stop
        self.giving_up = giving_up
        self.breakable = True

    def __call__(self, seconds: float) -> bool:
        """Waits; returns whether it is to be given up."""
        return self.giving_up.wait(seconds) or (self.breakable and self.stop.requested is not None)


class ObjectDestination(Destination):
    """A stream in an object store that is ours, with its spool; see `Destination`."""

    def __init__(
        self,
        settings: Settings,
        store: ObjectStore,
        spool: Spool,
        ownership: Ownership,
        found: Found,
        tries: Tries,
        pause: Pause,
        warn: Callable[[str], None],
    ) -> None:
        self.directory = str(spool.stream)
        self._settings = settings
        self._url = settings.out
        self._spool = spool
        self._tries = tries
        self._pause = pause
        self._stop = pause.stop
        self._holdback: Holdback | None = None
        self._warn = warn
        side_files = SideFiles(spool.stream)
        self._backlog = Backlog(
            found.chunks, _sizes(found), lambda chunk: chunk_size(spool.stream, chunk, side_files())
        )
        self._retiring = Retiring(store, tries, ownership.check, spool.stream, self._backlog, found)
        self._shipper = Shipper(store, tries, spool, ownership, self._retiring, self._backlog, found, pause.giving_up)
        self._began = self._settled = False
        self.shelf = ObjectShelf(self._url, spool.stream, self._backlog, self._retiring)

    def begin(self, published_chunks: int) -> None:
        """See `Destination`."""
        # Before the run looks at them for the first time; the thread does not call the store yet.
        self._retiring.pull()
        # From here on a signal is the run's affair.
        self._pause.breakable = False
        self.announce(published_chunks)
        self._began = True
        self._shipper.start()

    def check(self) -> None:
        """See `Destination`."""
        self._shipper.check()

    def gate(self, holdback: Holdback | None) -> Gate:
        """Returns itself: a run is held back too where too much is on its way, and the shipper told of each chunk."""
        self._holdback = holdback
        return self

    def before_chunk(self, published_chunks: int, published_samples: int) -> Hold | None:
        """Returns None if the chunk after the published ones may be published, or why not; see `Gate`."""
        full = self.full()
        if full is not None or self._holdback is None:
            return full
        return self._holdback.before_chunk(published_chunks, published_samples)

    def after_publish(self, published_chunks: int) -> None:
        """Takes notice that so many chunks are published; see `Gate`."""
        self.announce(published_chunks)
        if self._holdback is not None:
            self._holdback.after_publish(published_chunks)

    def announce(self, published_chunks: int) -> None:
        """Notes that so many chunks are published in the spool."""
        if published_chunks > self._backlog.announced:
            self._spool.keep_journals(self._spool.stream / JOURNALS)
        self._backlog.announce(published_chunks)

    def full(self) -> Hold | None:
        """Returns why no other chunk may come now; None if it may.

        Raises:
            LazyShardError, OSError: what the shipper has failed with.
        """
        self.check()
        pending, most = self._backlog.pending_bytes, self._settings.max_spool
        if not pending or pending + self._backlog.largest <= most:
            return None
        trouble = self._tries.trouble
        chunks = count(self._backlog.announced - self._backlog.shipped, "chunk")
        why = trouble or "the store takes them more slowly than rows come"
        return Hold(
            kind="spool",
            reason=f"--max-spool {show_bytes(most)}: {chunks} ({show_bytes(pending)}) wait in {self._spool.folder} to "
            f"be put to {self._url}; {why}",
            retry_s=_FULL_RETRY_S,
            stalled=trouble is not None,
        )

    def settle(self, published_chunks: int, tell: Callable[[str | None], None]) -> bool:
        """See `Destination`."""
        if not self._began:
            self.begin(published_chunks)
        self.announce(published_chunks)
        self._shipper.begin_to_close()
        leaving = self._stop.requested is not None
        try:
            if not self._wait(LEAVE_S if leaving else None, lambda: tell(self._trouble())):
                self._warn_left()
                return False
        finally:
            tell(None)
        self._settled = True
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See `Destination`."""
        try:
            if self._began and not self._settled and isinstance(error, Exception):
                self._leave_after(error)
            if self._settled and self._spool.ended:
                self._spool.clear()
        finally:
            self._shipper.give_up(_SLICE_S)
            self._spool.release()

    def _leave_after(self, error: Exception) -> None:
        """Puts what was published before an error, and the head that tells of it, if that is soon done."""
        try:
            self._shipper.begin_to_close()
            if not self._wait(FAILED_S):
                self._warn_left()
        except (LazyShardError, OSError) as other:
            if other is not error:
                self._warn(str(other))

    def _wait(self, seconds: float | None, tell: Callable[[], None] = lambda: None) -> bool:
        """Waits for the shipper to end, telling now and then; a signal that comes meanwhile leaves it `LEAVE_S`."""
        due = None if seconds is None else time.monotonic() + seconds
        while not self._shipper.is_complete():
            if due is None and self._stop.requested is not None:
                due = time.monotonic() + LEAVE_S
            if due is not None and time.monotonic() > due:
                return False
            tell()
            time.sleep(_SLICE_S)
        return True

    def _trouble(self) -> str | None:
        """Returns why it takes longer to put what is left, in words; None where nothing is wrong."""
        if (trouble := self._tries.trouble) is None:
            return None
        left = count(self._backlog.announced - self._backlog.shipped, "chunk")
        return f"{left} still to be put to {self._url}, and kept in {self._spool.folder}; {trouble}"

    def _warn_left(self) -> None:
        left = self._backlog.announced - self._backlog.shipped
        what = f"{count(left, 'chunk')} of {self._url} {'is' if left == 1 else 'are'}" if left else "the last facts are"
        trouble = f": {self._tries.trouble}" if self._tries.trouble else ""
        self._warn(
            f"{what} still to be put to the store, and kept in {self._spool.folder}{trouble}; the same command here "
            f"goes on with that, one on another machine makes it again"
        )


def _sizes(found: Found) -> list[int]:
    sizes = [0] * found.listing.first
    for chunk in range(found.listing.first, found.chunks):
        sizes.append(sum(found.sizes.get(name, 0) for name in names_with_arrays(chunk)))
    return sizes


_LOOK_PATIENCE_S: Final = 10.0
"""For a store that does not answer somebody who only wants to look."""


class EndedView(Destination):
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
