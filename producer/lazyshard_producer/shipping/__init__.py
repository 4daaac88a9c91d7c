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
from typing import Final

from lazyshard.cli import output
from lazyshard.errors import LazyShardError
from lazyshard.format.names import HEAD, MANIFEST, seal_name
from lazyshard.format.records import Head, Manifest
from lazyshard.store.files import read_file
from lazyshard.store.urls import is_url, stream_name
from lazyshard.stream.listing import list_kept
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import ExtraMissing
from lazyshard_producer.following.journal import DIRECTORY as JOURNALS
from lazyshard_producer.following.journal import named_journals
from lazyshard_producer.holding import Gate, Hold, Holdback, Shelf
from lazyshard_producer.shipping.shipper import Shipper, is_same_chunk
from lazyshard_producer.shipping.store import Found, Spool, StreamStore, look, next_owner, restore
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import count

LEAVE_S: Final = 20.0  # how long a run that was told to stop still puts chunks: most systems kill after 30 s
_SLICE_S: Final = 0.05

_Tell = Callable[[str | None], None]


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

    def settle(self, published_chunks: int, tell: _Tell) -> bool:
        """Returns whether all is where it belongs, the writer being closed; `tell` is told what is waited for."""
        return True


@contextlib.contextmanager
def open_destination(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> Iterator[Destination]:
    """Yields the destination for `settings.out`, and lets go of all that it holds.

    `prepare` is called before another producer is fenced, unless the stream has ended: raises where the run cannot be.
    """
    if not is_url(settings.out):
        yield Destination(Shelf(Path(settings.out)))
        return
    # It outlives processes and reboots.
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    root = Path(settings.spool or os.path.join(state, "lazyshard", "spool"))
    kept = f"What was published and is not there yet is kept in {root}; the same command continues with it"

    def pause(seconds: float) -> bool:
        time.sleep(seconds)
        return stop.requested is not None

    store = _open_store(settings.out, settings.store_patience_s, kept, pause)
    found = look(store, settings.samples_per_chunk)
    if found.end is not None and _is_finished(store, found):
        with _copied(store, found, ended=True) as folder:
            yield Destination(Shelf(folder))
        return
    if found.end is None:
        prepare()
    if not store.conditional:
        alone = "a second producer is only kept out as in a shared directory: by looks at stream.owner"
        warn(f"{settings.out}: this store cannot put an object on condition that there is none, so {alone}")
    with contextlib.closing(Spool(root, store.url)) as spool:
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
            why = f"{package} is needed for object stores and is not installed: pip install 'lazyshard[objects]'"
            raise ExtraMissing(f"{place}: {why}", package=package, extra="objects")
    return StreamStore(stream_name(place), patience_s, left_in, pause)


class _ObjectDestination(Destination):
    """A stream in an object store that is ours, with its spool. Its gate is itself."""

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
        shipper, most = self._shipper, self._settings.max_spool
        if (pending := shipper.pending_bytes) and pending + shipper.largest > most:
            trouble = shipper.store.trouble
            left = count(shipper.announced - shipper.shipped, "chunk")
            waiting = f"{left} ({output.size(pending)}) wait in {shipper.spool.folder}"
            why = f"to be put to {self._settings.out}; {trouble or 'the store takes them more slowly than rows come'}"
            reason = f"--max-spool {output.size(most)}: {waiting} {why}"
            return Hold(reason=reason, retry_s=0.2, stalled=trouble is not None)
        return None if self._holdback is None else self._holdback.before_chunk(published_chunks, published_samples)

    def after_publish(self, published_chunks: int) -> None:
        """As of `Gate`."""
        self._shipper.announce(published_chunks)
        if self._holdback is not None:
            self._holdback.after_publish(published_chunks)

    def settle(self, published_chunks: int, tell: _Tell) -> bool:
        if not self._began:
            self.begin(published_chunks)
        self._shipper.announce(published_chunks)
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
            self._wait(LEAVE_S / 4)
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

    def _wait(self, seconds: float | None, tell: _Tell = lambda text: None) -> bool:
        """Waits for the shipper to end; a signal that comes meanwhile leaves it `LEAVE_S`. Warns where it has not."""
        shipper, out = self._shipper, self._settings.out
        shipper.begin_to_close()
        due = None if seconds is None else time.monotonic() + seconds
        while not shipper.is_complete():
            if due is None and self._stop.requested is not None:
                due = time.monotonic() + LEAVE_S
            left, trouble = shipper.announced - shipper.shipped, shipper.store.trouble
            what, folder = count(left, "chunk") if left else "the last facts", shipper.spool.folder
            if due is not None and time.monotonic() > due:
                again = "the same command here puts them, one on another machine makes them again"
                why = f": {trouble}" if trouble else ""
                self._warn(f"{what} of {out}: still to be put to the store, and kept in {folder}{why}; {again}")
                return False
            tell(f"{what} still to be put to {out}, and kept in {folder}; {trouble}" if trouble else None)
            time.sleep(_SLICE_S)
        return True


def _take(store: StreamStore, spool: Spool, warn: Callable[[str], None]) -> str:
    """Becomes the owner, and throws the spool away if somebody else has been it since; returns our token."""
    before, tag = store.find_owner()
    ours = next_owner(before)
    kept = [before.token] if before is not None and before.token in spool.tokens() else []
    if not kept:
        if spool.stream.is_dir():
            since = f"{before} has had the stream since" if before else "the stream is gone from the store"
            warn(f"{spool.folder}: is not gone on with, as {since}; what was not put to the store is made again")
        spool.clear()
    # A start that fails may have put its token or not: any of the last may be in the store.
    spool.note_tokens(*kept, *spool.tokens()[-8:], ours.token)
    store.take(ours, tag)
    return ours.token


def _goes_with(spool: Spool, store: StreamStore, found: Found, warn: Callable[[str], None]) -> bool:
    """Whether a spool holds what is in the store, or all that goes on from there."""
    if not spool.stream.is_dir():
        return False
    try:
        manifest, kept = Manifest.decode(read_file(spool.stream / MANIFEST)), list_kept(spool.stream)
    except FileNotFoundError:
        return found.manifest is None
    except (LazyShardError, OSError) as error:
        warn(f"{spool.folder}: is not gone on with: {error}")
        return False
    if found.manifest is None:
        return kept.first == 0
    last = found.chunks - 1
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
    told = head.ended and head.chunks == found.end.chunks == found.chunks
    journals = set(store.names(JOURNALS)) - named_journals(found.end.source)
    return told and not found.listing.leftovers and not found.unsealed and not journals
