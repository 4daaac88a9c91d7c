"""One run of the command: from the settings to a stream that has ended, or that can be resumed."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Literal

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamMissing, WriterFailed
from lazyshard.format.records import End
from lazyshard.stream import ChunkWriter
from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer.configuration.problems import is_url
from lazyshard_producer.configuration.settings import Limits, Settings
from lazyshard_producer.display.metrics import Metrics
from lazyshard_producer.display.progress import Display
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.holding.holdback import Gate, Holdback
from lazyshard_producer.loop import Pace, RowLoop, RunWatch
from lazyshard_producer.opening import check_not_own, check_sources
from lazyshard_producer.out_directory import (
    check_all_taken,
    check_made_alike,
    check_out,
    clear_journals,
    complete_end,
    find_end,
    is_gone,
    known_form,
    leftovers,
    telling_how_to_begin_anew,
)
from lazyshard_producer.rows.pipeline import Pipeline, describe
from lazyshard_producer.shipping.destination import Destination, open_destination
from lazyshard_producer.shipping.store import GivenUp
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import Outcome, Tally, count, explain

_FREED_BYTES: Final = 16 << 20
"""Several times what a batch of rows takes while it is read, checked and written."""


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory of a few batches of rows. Call it once, before rows come.

    glibc gives the end of the heap back whenever more than 128 KiB of it are free, and fetches pages again for the next
    batch, each of which the kernel has to clear: a third of the time of a run. When a block that came straight from the
    kernel is freed, glibc takes twice its size as the new limit (mallopt(3), M_MMAP_THRESHOLD). The block is never
    touched, so it costs nothing; other C libraries take no notice.
    """
    bytes(_FREED_BYTES)


Reload = Callable[[Settings], Settings]
"""Returns the settings as they are to be from now on; says what it has to say by itself."""


def named_end(stop: Stop) -> Literal["interrupted", "terminated"]:
    """Returns how a run ends that a signal stops."""
    return "interrupted" if stop.requested is signal.SIGINT else "terminated"


class Going:
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
        self._watchdog = Watchdog(display.warn)
        self._pipeline = Pipeline(
            settings,
            committed,
            samples=writer.published_samples,
            warn=display.warn,
            check_owner=writer.check_owner,
            watchdog=self._watchdog,
        )
        try:
            quarantines = settings.on_bad_row == "quarantine"
            self._watch = RunWatch(
                self._pipeline, writer, destination.shelf, display, metrics, clock, quarantines=quarantines
            )
            self._loop = RowLoop(
                self._pipeline.reader,
                self._pipeline.stats,
                writer,
                pace=self._pace(),
                gate=self._gate(),
                stop=stop,
                watch=self._watch,
                watchdog=self._watchdog,
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
        self._watchdog.start()
        if self._loop.run():
            self._watchdog.ask(lambda: f"writing to {out}")
            last = self._pipeline.stats.reached()
            if not self._loop.rows and not self._writer.published_samples:
                self._check_empty()
            self._writer.close(end=True, source=last.encode(self._pipeline.names, end=True))
            self._watchdog.answered()
            clear_journals(out)
            for note in leftovers(last, [source.path for source in self._settings.sources]):
                self._display.warn(note)
            there = self._destination.settle(self._writer.published_chunks, self._display.wait)
            return Outcome("finished" if there else named_end(self._stop), out, self._watch.tally())
        tally = self._watch.tally()
        # Before the writer: what was refused is written down while the stream is still ours.
        self.close()
        self._writer.close(end=False)
        # The chunk in hand is published by now.
        tally = replace(tally, published=self._writer.published_samples, chunks=self._writer.published_chunks)
        self._destination.settle(self._writer.published_chunks, self._display.wait)
        return Outcome(named_end(self._stop), out, tally)

    def _check_empty(self) -> None:
        """Has a stream without a row not pass for what was asked for. Raises RowInvalid: as `Refusals.check_empty`."""
        rows = self._pipeline.stats.rows
        self._pipeline.stats.refusals.check_empty(rows)
        if rows:
            self._display.warn(f"--where or --transform left out all of {count(rows, 'row')}: the stream ends empty")

    def close(self) -> None:
        """Lets go of the sources."""
        self._watchdog.close()
        self._pipeline.close()

    def _pace(self) -> Pace | None:
        return Pace(self._settings.rate, self._clock()) if self._settings.rate is not None else None

    def _gate(self) -> Gate | None:
        limits, writer = self._settings.limits, self._writer
        if limits == Limits():
            return self._destination.gate(None)
        return self._destination.gate(
            Holdback(
                limits,
                self._destination.shelf,
                writer.samples_per_chunk,
                check=writer.check_owner,
                warn=self._display.warn,
            )
        )

    def _take_settings(self) -> None:
        before, self._settings = self._settings, self._reload(self._settings)
        if self._settings.rate != before.rate:
            self._loop.pace = self._pace()
        if self._settings.limits != before.limits:
            self._loop.gate = self._gate()
        if self._settings.log_every_s != before.log_every_s:
            self._display.log_every(self._settings.log_every_s)
            self._loop.every_s = self._watch.every_s
        self._pipeline.stats.refusals.most = self._settings.max_bad_rows


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
        StreamEnded: the stream had ended before, and there are rows that are not in it.
        StreamMissing: somebody has removed the stream's directory meanwhile.
        LazyShardError, OSError: as `ChunkWriter` raises them.
    """
    with _named(settings.out):
        keep_freed_memory()
        if not is_url(settings.out):
            check_out(settings.out)
        check_not_own(settings)
        try:
            destination = open_destination(
                settings, warn=display.warn, stop=stop, prepare=lambda: check_sources(settings)
            )
            with destination, _named(destination.directory), telling_how_to_begin_anew(settings.out):
                inner = replace(settings, out=destination.directory, spool=None)

                def reload_inner(now: Settings) -> Settings:
                    taken = reload(replace(now, out=settings.out, spool=settings.spool))
                    return replace(taken, out=inner.out, spool=None)

                result = _run(inner, destination, display, stop, metrics or Metrics(), reload_inner, clock, sleep)
                return replace(result, out=settings.out) if isinstance(result, Outcome) else result
        except GivenUp:
            # A signal has come while an object store was being waited for.
            return Outcome(named_end(stop), settings.out, Tally.nothing(len(settings.sources)))


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
    end = find_end(settings.out, settings.samples_per_chunk)
    if end is None:
        check_sources(settings)
    form = known_form(settings, end)
    if end is None:
        assert form is not None
        _raise_open_files()
        try:
            # Where nothing holds it back, the next rows are read while a chunk is published.
            free = settings.rate is None and settings.limits == Limits()
            writer = ChunkWriter(
                settings.out,
                settings.samples_per_chunk,
                overlap=free,
                arrays=form.arrays,
                encoding=form.encoding,
            )
        except StreamEnded:
            # A crash had left only the end to be written, which the writer has done.
            end = find_end(settings.out, settings.samples_per_chunk)
            if end is None:
                raise
    if end is not None:
        check_made_alike(settings.out, end, settings.samples_per_chunk, form, describe(settings), display.warn)
        complete_end(settings.out, end)
        if not destination.settle(end.chunks, display.wait):
            return Outcome(named_end(stop), settings.out, Tally.nothing(len(settings.sources)))
        check_all_taken(settings, end, display.warn, lambda: stop.requested is not None)
        return end
    try:
        destination.begin(writer.published_chunks)
        going = Going(settings, destination, display, stop, writer, metrics, reload, clock, sleep)
        with contextlib.closing(going):
            return going.outcome()
    except Exception as error:
        # Before it is closed: that lets others in.
        fenced = _find_fenced(writer, error)
        writer.close(end=False, state="failed", note=explain(error))
        if isinstance(error, OSError | ProducerFenced) and is_gone(settings.out):
            raise StreamMissing(
                f"{settings.out}: the stream's directory is gone, with what was published in it: it was removed, "
                "moved or unmounted meanwhile. Put it back and run the same command again to go on; without it "
                "that command begins anew",
                directory=settings.out,
            ) from error
        if fenced is not None:
            raise fenced from error
        raise
    finally:
        # Does nothing if the run has closed it.
        writer.close(end=False, state="failed")


def _find_fenced(writer: ChunkWriter, error: Exception) -> ProducerFenced | None:
    """Returns what has ended a run from which another producer has removed a file, None where none has."""
    if isinstance(error, OSError | SourceRefused) and not isinstance(error, WriterFailed):
        try:
            writer.check_owner()
        except ProducerFenced as fenced:
            return fenced
        except OSError:
            pass
    return None


@contextlib.contextmanager
def _named(out: str) -> Iterator[None]:
    """Has errors of the filesystem say which one it is: the stream's, since those of sources are told as such."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, LazyShardError):
            error.filename = out
        raise


def _raise_open_files() -> None:
    """Allows as many open files as the system does: sources that are shuffled or mixed are open at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
