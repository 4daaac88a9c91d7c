"""An object store as the destination of a run: its spool in hand, its shipper at work. See `object_opening`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.inspection.disk_use import names_with_arrays
from lazyshard.store.objects import ObjectStore
from lazyshard_producer.configuration.quantities import show_bytes
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.holding.holdback import Gate, Held, Holdback
from lazyshard_producer.holding.shelf import Shelf, SideFiles, chunk_size
from lazyshard_producer.shipping.backlog import Backlog
from lazyshard_producer.shipping.found import Found
from lazyshard_producer.shipping.object_shelf import ObjectShelf
from lazyshard_producer.shipping.ownership import Ownership
from lazyshard_producer.shipping.retiring import Retiring
from lazyshard_producer.shipping.shipper import Shipper
from lazyshard_producer.shipping.spool import Spool
from lazyshard_producer.shipping.tries import Tries
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


class SpoolGate:
    """Holds a run back where too much is on its way, and tells the shipper of each chunk."""

    def __init__(self, destination: ObjectDestination, holdback: Holdback | None) -> None:
        self._destination = destination
        self._holdback = holdback

    def before_chunk(self, published_chunks: int, published_samples: int) -> Held | None:
        """See `Gate`."""
        full = self._destination.full()
        if full is not None or self._holdback is None:
            return full
        return self._holdback.before_chunk(published_chunks, published_samples)

    def after_publish(self, published_chunks: int) -> None:
        """See `Gate`."""
        self._destination.announce(published_chunks)
        if self._holdback is not None:
            self._holdback.after_publish(published_chunks)


class ObjectDestination:
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
        self._warn = warn
        side_files = SideFiles(spool.stream)
        self._backlog = Backlog(
            found.chunks, _sizes(found), lambda chunk: chunk_size(spool.stream, chunk, side_files())
        )
        self._retiring = Retiring(store, tries, ownership.check, spool.stream, self._backlog, found)
        self._shipper = Shipper(store, tries, spool, ownership, self._retiring, self._backlog, found, pause.giving_up)
        self._began = self._settled = False
        self.shelf: Shelf = ObjectShelf(self._url, spool.stream, self._backlog, self._retiring)

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
        """See `Destination`."""
        return SpoolGate(self, holdback)

    def announce(self, published_chunks: int) -> None:
        """Notes that so many chunks are published in the spool."""
        if published_chunks > self._backlog.announced:
            self._spool.keep_journals(self._spool.stream / JOURNALS)
        self._backlog.announce(published_chunks)

    def full(self) -> Held | None:
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
        return Held(
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

    def __enter__(self) -> ObjectDestination:
        """See `Destination`."""
        return self

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
