"""One run of the command: from the settings to a stream that has ended, or that can be resumed."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamMissing, WriterFailed
from lazyshard.format import End
from lazyshard.stream import ChunkWriter
from lazyshard_producer.configuration.problems import is_url
from lazyshard_producer.configuration.settings import Limits, Settings
from lazyshard_producer.display.metrics import Metrics, NoMetrics
from lazyshard_producer.display.progress import Display
from lazyshard_producer.ended import (
    check_all_taken,
    check_made_alike,
    complete_end,
    find_end,
    known_form,
    telling_how_to_begin_anew,
)
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.going import Going, Reload, named_end
from lazyshard_producer.opening import check_not_own, check_sources
from lazyshard_producer.out_directory import check_out, is_gone
from lazyshard_producer.rows.pipeline import describe
from lazyshard_producer.shipping.destination import Destination, open_destination
from lazyshard_producer.shipping.tries import GivenUp
from lazyshard_producer.sources.allocator import keep_freed_memory
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import Outcome, Tally, explain


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

                result = _run(inner, destination, display, stop, metrics or NoMetrics(), reload_inner, clock, sleep)
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
