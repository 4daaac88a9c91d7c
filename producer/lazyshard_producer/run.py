"""One run of the command: from the settings to a stream that has ended, or that can be resumed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamInvalid, StreamMissing
from lazyshard.format import End
from lazyshard.storage import ChunkWriter
from lazyshard.storage.patience import Patience
from lazyshard_producer.configuration.problems import is_url
from lazyshard_producer.configuration.settings import Limits, Settings
from lazyshard_producer.configuration.source_problems import MAX_NAME_BYTES, is_live
from lazyshard_producer.display.metrics import Metrics, NoMetrics
from lazyshard_producer.display.progress import Display
from lazyshard_producer.ended import (
    check_made_alike,
    clear_journals,
    complete_end,
    find_end,
    leftovers,
    notes_on_end,
    telling_how_to_begin_anew,
)
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.loop import Gate, RowLoop
from lazyshard_producer.opening import check_sources
from lazyshard_producer.pace import Pace
from lazyshard_producer.rows.encoding import encoding_of
from lazyshard_producer.rows.pipeline import Pipeline, describe
from lazyshard_producer.shipping.destination import Destination, make_holdback, open_destination
from lazyshard_producer.shipping.tries import GivenUp
from lazyshard_producer.sources.allocator import keep_freed_memory
from lazyshard_producer.stop import Stop
from lazyshard_producer.watching import RunWatch
from lazyshard_producer.wording import Outcome, Tally, count, explain

Reload = Callable[[Settings], Settings]
"""Returns the settings as they are to be from now on; says what it has to say by itself."""


def run(
    settings: Settings,
    display: Display,
    stop: Stop,
    *,
    metrics: Metrics | None = None,
    reload: Reload = lambda settings: settings,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome | End:
    """Publishes the sources as a stream, from where the last run came to, and ends it.

    Whatever happens, what is published stays published, and the same settings go on from there. Nothing is made before
    the sources were found to be readable.

    Args:
        settings: what to do.
        display: shows it.
        stop: the signals that have come.
        metrics: counts it; None for nobody.
        reload: is called when a signal asks for it.
        clock: returns seconds of a monotonic clock.
        sleep: waits for so many seconds.

    Returns:
        How it came out; the end that was found if the stream had ended before.

    Raises:
        SettingInvalid, SourceRefused, RowInvalid, WorkerFailed: see there.
        StreamMissing: somebody has removed the stream's directory meanwhile.
        LazyShardError, OSError: as `ChunkWriter` raises them.
    """
    with _named(settings.out):
        keep_freed_memory()
        if not is_url(settings.out):
            check_out(settings.out)
        try:
            destination = open_destination(
                settings, warn=display.warn, stop=stop, prepare=lambda: check_sources(settings)
            )
            with destination, _named(destination.directory), telling_how_to_begin_anew(settings.out):
                inner = replace(settings, out=destination.directory, spool=None)

                def reload_inner(now: Settings) -> Settings:
                    taken = reload(replace(now, out=settings.out, spool=settings.spool))
                    return replace(taken, out=inner.out, spool=None)

                result = _run(inner, destination, display, stop, metrics or NoMetrics(), reload_inner, clock, sleep)
                return replace(result, out=settings.out) if isinstance(result, Outcome) else result
        except GivenUp:
            # A signal has come while an object store was being waited for.
            return Outcome(_named_end(stop), settings.out, Tally.nothing(len(settings.sources)))


def _run(
    settings: Settings,
    destination: Destination,
    display: Display,
    stop: Stop,
    metrics: Metrics,
    reload: Reload,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Outcome | End:
    """Does the run, `settings.out` being the directory in which it publishes."""
    paths = [source.path for source in settings.sources]
    end = find_end(settings.out, settings.samples_per_chunk)
    if end is None:
        check_sources(settings)
    encoding = encoding_of(settings.encoding)
    if end is None:
        _raise_open_files()
        try:
            # Where nothing holds it back, the next rows are read while a chunk is published.
            free = settings.rate is None and settings.limits == Limits()
            writer = ChunkWriter(
                settings.out,
                settings.samples_per_chunk,
                overlap=free,
                arrays=encoding is not None,
                encoding=encoding,
            )
        except StreamEnded:
            # A crash had left only the end to be written, which the writer has done.
            end = find_end(settings.out, settings.samples_per_chunk)
            if end is None:
                raise
    if end is not None:
        check_made_alike(settings.out, end, settings.samples_per_chunk, encoding, describe(settings), display.warn)
        complete_end(settings.out, end)
        for note in notes_on_end(settings.out, end, paths):
            display.warn(note)
        for source in settings.sources:
            if is_live(source):
                display.warn(f"{source.path}: not read; nothing can be added to a stream that has ended")
        if not destination.settle(end.chunks, display.wait):
            return Outcome(_named_end(stop), settings.out, Tally.nothing(len(settings.sources)))
        return end
    try:
        destination.begin(writer.published_chunks)
        going = _Run(settings, destination, display, stop, writer, metrics, reload, clock, sleep)
        with contextlib.closing(going):
            return going.outcome()
    except Exception as error:
        writer.close(end=False, state="failed", note=explain(error))
        if isinstance(error, OSError | ProducerFenced) and _is_gone(settings.out):
            raise StreamMissing(
                f"{settings.out}: the stream's directory is gone, with what was published in it: it was removed, "
                "moved or unmounted meanwhile. Put it back and run the same command again to go on; without it "
                "that command begins anew",
                directory=settings.out,
            ) from error
        raise
    finally:
        # Does nothing if the run has closed it.
        writer.close(end=False, state="failed")


def _named_end(stop: Stop) -> Literal["interrupted", "terminated"]:
    return "interrupted" if stop.requested is signal.SIGINT else "terminated"


@contextlib.contextmanager
def _named(out: str) -> Iterator[None]:
    """Has errors of the filesystem say which one it is: the stream's, since those of sources are told as such."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, LazyShardError):
            error.filename = out
        raise


def check_out(out: str) -> None:
    """Checks that a directory can have this name, or has it.

    Raises:
        SettingInvalid: no file can have this name.
        StreamInvalid: something else than a directory has it.
        OSError: the filesystem failed.
    """
    try:
        mode = os.stat(out).st_mode
    except FileNotFoundError:
        if os.path.islink(out):
            raise StreamInvalid(f"{out}: expected a directory, found a link to nothing", directory=out) from None
        # The filesystem says so only once the directories above it are there, that is after some were made.
        for part in Path(out).parts:
            if len(os.fsencode(part)) > MAX_NAME_BYTES:
                raise _too_long(part) from None
        return
    except OSError as cause:
        if cause.errno == errno.ENAMETOOLONG:
            raise _too_long(out) from None
        if cause.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StreamInvalid(f"{out}: cannot be a directory: {cause.strerror}", directory=out) from None
        raise
    if not stat.S_ISDIR(mode):
        raise StreamInvalid(f"{out}: expected a directory (or nothing yet), found a file", directory=out)


def _is_gone(out: str) -> bool:
    # No answer, or no permission, is none.
    try:
        os.stat(out)
    except OSError as cause:
        return cause.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _too_long(name: str) -> SettingInvalid:
    return SettingInvalid(f"--out: a name of {len(name)} characters is too long: {name[:40]}...", option="--out")


def _raise_open_files() -> None:
    """Allows as many open files as the system does: sources that are shuffled or mixed are open at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Run:
    """A run with its writer open."""

    def __init__(
        self,
        settings: Settings,
        destination: Destination,
        display: Display,
        stop: Stop,
        writer: ChunkWriter,
        metrics: Metrics,
        reload: Reload,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._settings = settings
        self._destination = destination
        self._display = display
        self._stop = stop
        self._writer = writer
        self._reload = reload
        self._clock = clock
        # What another program left there is no position, and is refused as such.
        committed = (writer.source or {}) if writer.published_chunks else None
        self._patience = Patience(display.warn)
        self._pipeline = Pipeline(
            settings,
            committed,
            samples=writer.published_samples,
            warn=display.warn,
            check_owner=writer.check_owner,
            patience=self._patience,
        )
        try:
            quarantines = settings.on_bad_row == "quarantine"
            self._watch = RunWatch(
                self._pipeline, writer, destination.shelf, display, metrics, clock, quarantines=quarantines
            )
            self._loop = RowLoop(
                self._pipeline.feed,
                self._pipeline.book,
                writer,
                pace=self._pace(),
                gate=self._gate(),
                stop=stop,
                watch=self._watch,
                patience=self._patience,
                reload=self._take_settings,
                check=destination.check,
                every_s=self._watch.every_s,
                clock=clock,
                sleep=sleep,
            )
        except BaseException:
            self._pipeline.close()
            raise

    def outcome(self) -> Outcome:
        """Does the run and closes the writer, unless something raises."""
        out = self._settings.out
        self._display.start(self._destination.shelf.name, self._watch.tally())
        self._patience.start()
        if self._loop.run():
            self._patience.ask(lambda: f"writing to {out}")
            last = self._pipeline.here()
            if not self._loop.rows and not self._writer.published_samples:
                self._check_empty()
            self._writer.close(end=True, source=last.encode(self._pipeline.names))
            self._patience.answered()
            clear_journals(out)
            for note in leftovers(last, [source.path for source in self._settings.sources]):
                self._display.warn(note)
            there = self._destination.settle(self._writer.published_chunks, self._display.wait)
            return Outcome("finished" if there else _named_end(self._stop), out, self._watch.tally())
        tally = self._watch.tally()
        # Before the writer: what was refused is written down while the stream is still ours.
        self.close()
        self._writer.close(end=False)
        # The chunk in hand is published by now.
        tally = replace(tally, published=self._writer.published_samples, chunks=self._writer.published_chunks)
        self._destination.settle(self._writer.published_chunks, self._display.wait)
        return Outcome(_named_end(self._stop), out, tally)

    def _check_empty(self) -> None:
        """Has a stream without a row not pass for what was asked for. Raises RowInvalid: as `Refusals.check_empty`."""
        rows = self._pipeline.book.rows
        self._pipeline.book.refusals.check_empty(rows)
        if rows:
            self._display.warn(f"--where or --transform left out all of {count(rows, 'row')}: the stream ends empty")

    def close(self) -> None:
        """Lets go of the sources."""
        self._patience.close()
        self._pipeline.close()

    def _pace(self) -> Pace | None:
        return Pace(self._settings.rate, self._clock()) if self._settings.rate is not None else None

    def _gate(self) -> Gate | None:
        holdback = make_holdback(
            self._settings.limits,
            self._destination,
            self._writer.samples_per_chunk,
            check=self._writer.check_owner,
            warn=self._display.warn,
        )
        return self._destination.gate(holdback)

    def _take_settings(self) -> None:
        before, self._settings = self._settings, self._reload(self._settings)
        if self._settings.rate != before.rate:
            self._loop.pace = self._pace()
        if self._settings.limits != before.limits:
            self._loop.gate = self._gate()
        if self._settings.log_every_s != before.log_every_s:
            self._display.log_every(self._settings.log_every_s)
            self._loop.every_s = self._watch.every_s
        self._pipeline.book.refusals.most = self._settings.max_bad_rows
