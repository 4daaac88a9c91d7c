"""Several writers of a stream: the limits of their sequencer, and the commands `sequence` and `end`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from lazyshard import errors
from lazyshard.format.records import END, HEAD, MANIFEST, Declared, Head, Manifest
from lazyshard.format.writers import WRITERS, EndRequest
from lazyshard.store.durable import publish_bytes
from lazyshard.store.files import UrlPath, find_record, is_there, stream_path
from lazyshard.stream import ChunkWriter
from lazyshard.stream.head import process_gone
from lazyshard.stream.listing import read_manifest
from lazyshard.stream.lock import Wanted
from lazyshard.stream.members import RETRY_S, read_committed, read_position, writer_names
from lazyshard.stream.sequencer import Sequencer, Sequencing
from lazyshard.stream.share import Share
from lazyshard.stream.stream import NativeStream
from lazyshard.stream.writer import open_sequenced
from lazyshard_producer.configuration.settings import Limits, Settings
from lazyshard_producer.display import Display
from lazyshard_producer.errors import count, one_line
from lazyshard_producer.limits import Holdback, Shelf
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.shipping import open_sequenced as open_stored
from lazyshard_producer.shipping.sequenced import StoreSequencer, StoreWriter
from lazyshard_producer.stop import Stop

ALIVE_S: Final = 60.0  # age of the heartbeat, sent every 5 s, below which a writer elsewhere lives; clocks may differ
# How long requests are retried: a writer then lets another process sequence, the command has nothing else to do
_PATIENCE_S: Final = 10.0
_COMMAND_PATIENCE_S: Final = 600.0


class SharedLimits:
    """The limits of a stream of several writers while this process sequences, see `Sequencer`."""

    def __init__(self, limits: Limits, warn: Callable[[str], None]) -> None:
        self.limits = limits  # may be replaced at any time
        self._warn = warn

    def __call__(self, writer: ChunkWriter) -> SharedLimits:
        """Begins with the stream of the sequencer's writer."""
        size, check = writer.samples_per_chunk, writer.check_owner
        shelf = writer.shelf if isinstance(writer, StoreWriter) else Shelf(writer.directory)
        self._holdback = Holdback(self.limits, shelf, size, check=check, warn=self._warn)
        self.fits, self.after_publish = self._holdback.fits, self._holdback.after_publish
        return self

    def before_chunk(self, published_chunks: int, published_samples: int) -> str | None:
        """As `Holdback.before_chunk`."""
        if self._holdback.limits is not self.limits:
            # Other limits may need other sizes.
            self._holdback.limits, self._holdback.stock, self._holdback.warned = self.limits, None, False
        held = self._holdback.before_chunk(published_chunks, published_samples)
        return held and held.reason


def share_of(settings: Settings, gate: SharedLimits, pause: Callable[[float, str], object]) -> Share:
    """Returns the share of a run's writer in its stream. Raises as `ChunkWriter`."""
    directory, form = stream_path(settings.out), form_of(settings)
    wanted = Wanted(settings.samples_per_chunk, form.arrays, form.encoding)
    given = directory, settings.writer or "", settings.writers, wanted, time.time
    open_stream = partial(_open, directory, _PATIENCE_S, threading.Event().wait)
    return Share(*given, open_stream=open_stream, gate=gate, pause=pause, sequencer=_kind_of(directory))


def _kind_of(directory: Path) -> type[Sequencer]:
    return StoreSequencer if isinstance(directory, UrlPath) else Sequencer


def sequence(directory: Path, limits: Limits, display: Display, stop: Stop) -> bool:
    """Sequences while no other process does, until the stream has ended; returns False if a signal has stopped it."""
    if not is_there(directory / MANIFEST):
        display.note(f"{directory}: there is no stream yet; this process waits for its first writer")
    while not is_there(directory / MANIFEST):
        display.wait("no writer has created the stream yet")
        if stop.sleep(RETRY_S):
            return False
    _manifest(directory)
    gate = SharedLimits(limits, display.warn)
    open_stream = partial(_open, directory, _COMMAND_PATIENCE_S, stop.sleep)
    sequencing, told = Sequencing(directory, open_stream, gate, _kind_of(directory)), ""
    with contextlib.closing(sequencing):
        while not sequencing.ended:
            pause = sequencing.step()
            if (who := _describe(sequencing)) not in ("", told):
                told = who
                display.note(who)
            display.wait((sequencing.sequencer and sequencing.sequencer.hold) or None)
            if stop.sleep(pause):
                break
    return sequencing.ended


def _open(directory: Path, patience_s: float, pause: Callable[[float], bool]) -> ChunkWriter:
    manifest = _manifest(directory)
    if isinstance(directory, UrlPath):
        return open_stored(directory, patience_s, pause)
    return open_sequenced(directory, time.time, manifest.arrays, manifest.encoding)


def _manifest(directory: Path) -> Manifest:
    """Returns the manifest of a stream of several writers. Raises StreamMissing, StreamMismatch."""
    if (manifest := read_manifest(directory, None)) is None:
        raise errors.StreamMissing(f"{directory}: there is no stream here; check the path", directory=str(directory))
    if manifest.writers is None:
        what = f"{directory}: the stream has one producer without a name, which numbers its chunks and ends it"
        way = "use this command for a stream of runs with --writer"
        expected, actual = "several writers, each with a name", "one producer without a name"
        raise errors.StreamMismatch(f"{what}; {way}", directory=str(directory), expected=expected, actual=actual)
    return manifest


def _describe(sequencing: Sequencing) -> str:
    """Returns which process sequences, "" while none does."""
    if sequencing.sequencer is not None:
        return "this process sequences the stream's writers"
    told = read_committed(sequencing.directory)
    if told is None or told.stopped:
        return ""
    who = f"process {told.pid} on {told.host} sequences the stream's writers, with its own limits"
    return f"{who}; this process takes over when it stops"


def end(directory: Path, display: Display, stop: Stop, *, force: bool = False) -> bool:
    """Requests the end of a stream, sequences until it has ended; returns False if a signal has stopped it.

    Raises ProducerFenced: a writer runs, has failed or was killed, or a declared one has not ended, without `force`.
    """
    manifest = _manifest(directory)
    if not force and not is_there(directory / END) and (left := list(_not_ended(directory, manifest.writers))):
        way = "finish each by its command, or give --force to end the stream without the rows that are not published"
        who = one_line("; ".join(left))
        raise errors.ProducerFenced(f"{directory}: {who}; {way}", directory=str(directory), holder=who)
    if not is_there(directory / END):
        folder = directory / WRITERS
        request, target = EndRequest(time.time()).encode(), folder / EndRequest.NAME
        if isinstance(target, UrlPath):
            target.store.put(target.key, request)
        else:
            publish_bytes(request, target, folder / f".{EndRequest.NAME}.{os.getpid()}")
    return sequence(directory, Limits(), display, stop)


def describe_end(directory: Path) -> Iterator[str]:
    """Yields a line for each writer of a stream that has ended: its rows in the stream, and what was left out."""
    taken, told = read_position(directory).taken, read_committed(directory)
    declared, found = _manifest(directory).writers, writer_names(directory)
    for name in sorted({*found, *(declared if isinstance(declared, tuple) else ())}):
        if name not in found:
            yield one_line(f"  {name}: has not begun")
            continue
        rows, folder = taken.get(name, (0, 0))[0], directory / WRITERS / name
        text = f"{name}: {count(rows, 'row')}"
        try:
            manifest = read_manifest(folder, None)
            published = None if manifest is None else NativeStream(folder, manifest).published()
        except (OSError, errors.LazyShardError) as cause:
            yield one_line(f"  {text}; its folder cannot be read: {cause}")
            continue
        if published is not None and (left := published.samples + (published.short or 0) - rows) > 0:
            why = "" if told is None else told.refused.get(name, "")
            text += f"; left out {count(left, 'published row')}{why and f': {why}'}"
        if published is None or not published.ended:
            text += "; it has not ended, and rows that it had not published are left out"
        yield one_line(f"  {text}")


def _not_ended(directory: Path, declared: Declared | None) -> Iterator[str]:
    """Yields why the stream is not complete: its writers that run, or that were to publish more, as far as known."""
    found = writer_names(directory)
    for name in found:
        with contextlib.suppress(OSError, errors.LazyShardError):
            head = find_record(directory / WRITERS / name / HEAD, Head.decode)
            if head is None:
                if declared:
                    yield f"writer {name!r} has published nothing"
                continue
            begun, gone = head.state in ("running", "waiting"), process_gone(head)
            if begun and (gone is False or (gone is None and time.time() - head.updated_at < ALIVE_S)):
                yield f"writer {name!r} still runs (pid {head.pid} on {head.host})"
            elif not head.ended and (declared or head.state != "idle"):
                why = "failed" if head.state == "failed" else "has stopped"
                if begun:
                    why = "was killed" if gone else "is silent"
                yield f"writer {name!r} {why} after {count(head.samples, 'row')}, before its end"
    names = declared if isinstance(declared, tuple) else ()
    yield from (f"writer {name!r} has not begun" for name in names if name not in found)
    if isinstance(declared, int) and (missing := declared - len(found)) > 0:
        yield f"{missing} of {count(declared, 'writer')} not begun"
