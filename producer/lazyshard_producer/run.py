"""One run of the command: from the settings to a stream that has ended, or that can be resumed."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from lazyshard.errors import LazyShardError, ProducerFenced, StreamEnded, StreamMissing, WriterFailed
from lazyshard.format.records import End
from lazyshard.store.urls import is_url
from lazyshard.stream import ChunkWriter
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer import out_directory
from lazyshard_producer.configuration.quantities import Amount, show_amount, show_bytes
from lazyshard_producer.configuration.settings import OPTIONS, Limits, Settings
from lazyshard_producer.display.metrics import Metrics
from lazyshard_producer.display.progress import Display
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.holding.holdback import Gate, Holdback
from lazyshard_producer.loop import Pace, RowLoop, RunWatch
from lazyshard_producer.opening import check_not_own, check_sources
from lazyshard_producer.rows.encoding import form_of
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.shipping import Destination, open_destination
from lazyshard_producer.shipping.store import GivenUp
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import Outcome, Tally, count, explain

_FREED_BYTES: Final = 16 << 20  # several times what a batch of rows takes while it is read, checked and written


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of a few batches of rows: else a third of the time of a run goes into new pages.

    When a block that came straight from the kernel is freed, glibc takes twice its size as the limit from which it
    gives memory back (mallopt(3), M_MMAP_THRESHOLD). The block is never touched, so it costs nothing.
    """
    bytes(_FREED_BYTES)


Reload = Callable[[Settings], Settings]
"""Returns the settings as they are to be from now on; says what it has to say by itself."""

_MAY_CHANGE: Final = [option for option in OPTIONS if option.reload]


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """Returns the settings to go on with, and the names of those in which `new` differs and may not."""
    changing = {option.field for option in _MAY_CHANGE if option.owner is Settings} | {"limits"}
    # With another policy its number means something else.
    taken = changing if new.on_bad_row == old.on_bad_row else changing - {"max_bad_rows"}
    names = {"sources": "source"} | {option.field: option.name for option in OPTIONS}
    kept = [one.name for one in fields(Settings) if one.name not in changing]
    refused = [names[name] for name in kept if getattr(old, name) != getattr(new, name)]
    return replace(old, **{name: getattr(new, name) for name in taken}), refused


def reload_settings(
    old: Settings, load: Callable[[], Settings], file: str, note: Callable[[str], None], warn: Callable[[str], None]
) -> Settings:
    """Returns the settings to go on with, read anew from that file; `note` and `warn` are told. Raises nothing."""
    try:
        new = load()
    except (LazyShardError, OSError) as error:
        warn(f"nothing is reloaded: {error}")
        return old
    settings, refused = reloaded(old, new)
    for name in refused:
        warn(f"{file}: {name} cannot change while it runs; stop it and start it again for that")
    note(f"reloaded {file}: {', '.join(_changes(old, settings)) or 'nothing has changed'}")
    return settings


def _changes(old: Settings, new: Settings) -> Iterator[str]:
    for option in _MAY_CHANGE:
        before, after = (getattr(one.limits if option.owner is Limits else one, option.field) for one in (old, new))
        if before != after:
            yield f"{option.name} from {_shown(option.name, before)} to {_shown(option.name, after)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Amount):
        return show_amount(value)
    if value is not None and name.endswith("_disk"):
        return show_bytes(value)
    return "none" if value is None or value == () else str(value)


def named_end(stop: Stop) -> Literal["interrupted", "terminated"]:
    """Returns how a run ends that a signal stops."""
    return "interrupted" if stop.requested is signal.SIGINT else "terminated"


@dataclass
class _Going:
    """A run, `settings.out` being the directory in which it publishes."""

    settings: Settings
    destination: Destination
    display: Display
    stop: Stop
    metrics: Metrics
    reload: Reload
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> Outcome | End:
        """Does the run."""
        settings, out = self.settings, self.settings.out
        end = out_directory.find_end(out, settings.samples_per_chunk)
        if end is None:
            check_sources(settings)
            form = form_of(settings)
            # As many as the system allows: sources that are shuffled or mixed are open at a time.
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            # Where nothing holds it back, the next rows are read while a chunk is published.
            free = settings.rate is None and settings.limits == Limits()
            try:
                writer = ChunkWriter(
                    out, settings.samples_per_chunk, overlap=free, arrays=form.arrays, encoding=form.encoding
                )
            except StreamEnded:
                # A crash had left only the end to be written, which the writer has done.
                end = out_directory.find_end(out, settings.samples_per_chunk)
                if end is None:
                    raise
        if end is not None:
            out_directory.check_made_alike(settings, end, self.display.warn)
            out_directory.complete_end(out, end)
            if not self.destination.settle(end.chunks, self.display.wait):
                return _nothing(settings, self.stop)
            out_directory.check_all_taken(settings, end, self.display.warn, lambda: self.stop.requested is not None)
            return end
        try:
            self.destination.begin(writer.published_chunks)
            return self._publish(writer)
        except Exception as error:
            # Before it is closed: that lets others in.
            fenced = _find_fenced(writer, error)
            writer.close(end=False, state="failed", note=explain(error))
            if isinstance(error, OSError | ProducerFenced) and out_directory.is_gone(out):
                raise StreamMissing(
                    f"{out}: the stream's directory is gone, with what was published in it: it was removed, moved or "
                    f"unmounted meanwhile. Put it back and run the same command again to go on; without it that "
                    f"command begins anew",
                    directory=out,
                ) from error
            if fenced is not None:
                raise fenced from error
            raise
        finally:
            # Does nothing if the run has closed it.
            writer.close(end=False, state="failed")

    def _publish(self, writer: ChunkWriter) -> Outcome:
        """Moves the rows and closes the writer, unless something raises."""
        settings, display, destination = self.settings, self.display, self.destination
        self._writer = writer
        watchdog = Watchdog(display.warn)
        with contextlib.ExitStack() as sources:
            pipeline = self._pipeline = Pipeline(
                settings,
                # What another program left there is no position, and is refused as such.
                (writer.source or {}) if writer.published_chunks else None,
                samples=writer.published_samples,
                warn=display.warn,
                check_owner=writer.check_owner,
                watchdog=watchdog,
            )
            sources.callback(pipeline.close)
            kind: Literal["skipped", "quarantined"] = (
                "quarantined" if settings.on_bad_row == "quarantine" else "skipped"
            )
            watch = RunWatch(pipeline, writer, destination.shelf, display, self.metrics, self.clock, kind)
            self._watch = watch
            self._loop = RowLoop(
                pipeline.reader,
                pipeline.stats,
                writer,
                pace=self._pace(),
                gate=self._gate(),
                stop=self.stop,
                watch=watch,
                watchdog=watchdog,
                reload=self._take_settings,
                check=destination.check,
                clock=self.clock,
                sleep=self.sleep,
            )
            sources.callback(watchdog.close)
            display.start(destination.shelf.name, watch.tally())
            watchdog.start()
            if self._loop.run():
                return self._end(watchdog)
            tally = watch.tally()
            # Before the writer: what was refused is written down while the stream is still ours.
            sources.close()
            writer.close(end=False)
            # The chunk in hand is published by now.
            tally = replace(tally, published=writer.published_samples, chunks=writer.published_chunks)
            destination.settle(writer.published_chunks, display.wait)
            return Outcome(named_end(self.stop), settings.out, tally)

    def _end(self, watchdog: Watchdog) -> Outcome:
        """Ends the stream, all rows being in it."""
        out, pipeline, writer = self.settings.out, self._pipeline, self._writer
        watchdog.ask(lambda: f"writing to {out}")
        last = pipeline.stats.reached()
        if not self._loop.rows and not writer.published_samples:
            # A stream without a row is not to pass for what was asked for.
            rows = pipeline.stats.rows
            pipeline.stats.refusals.check_empty(rows)
            if rows:
                left_out = f"--where or --transform left out all of {count(rows, 'row')}"
                self.display.warn(f"{left_out}: the stream ends empty")
        writer.close(end=True, source=last.encode(pipeline.names, end=True))
        watchdog.answered()
        out_directory.clear_journals(out)
        for note in out_directory.leftovers(last, [source.path for source in self.settings.sources]):
            self.display.warn(note)
        there = self.destination.settle(writer.published_chunks, self.display.wait)
        return Outcome("finished" if there else named_end(self.stop), out, self._watch.tally())

    def _pace(self) -> Pace | None:
        return Pace(self.settings.rate, self.clock()) if self.settings.rate is not None else None

    def _gate(self) -> Gate | None:
        limits, writer, shelf = self.settings.limits, self._writer, self.destination.shelf
        if limits == Limits():
            return self.destination.gate(None)
        size, warn = writer.samples_per_chunk, self.display.warn
        return self.destination.gate(Holdback(limits, shelf, size, check=writer.check_owner, warn=warn))

    def _take_settings(self) -> None:
        before, self.settings = self.settings, self.reload(self.settings)
        if self.settings.rate != before.rate:
            self._loop.pace = self._pace()
        if self.settings.limits != before.limits:
            self._loop.gate = self._gate()
        if self.settings.log_every_s != before.log_every_s:
            self.display.log_every(self.settings.log_every_s)
        self._pipeline.stats.refusals.most = self.settings.max_bad_rows


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

    Nothing is made before the sources were found to be readable. Returns how it came out; the end that was found if the
    stream had ended before.
    """
    with _named(settings.out):
        keep_freed_memory()
        if not is_url(settings.out):
            out_directory.check_out(settings.out)
        check_not_own(settings)
        try:
            opened = open_destination(settings, warn=display.warn, stop=stop, prepare=lambda: check_sources(settings))
            begin_anew = out_directory.telling_how_to_begin_anew(settings.out)
            with opened as destination, _named(destination.directory), begin_anew:
                inner = replace(settings, out=destination.directory, spool=None)

                def reload_inner(now: Settings) -> Settings:
                    taken = reload(replace(now, out=settings.out, spool=settings.spool))
                    return replace(taken, out=inner.out, spool=None)

                going = _Going(inner, destination, display, stop, metrics or Metrics(), reload_inner, clock, sleep)
                result = going.result()
                return replace(result, out=settings.out) if isinstance(result, Outcome) else result
        except GivenUp:
            # A signal has come while an object store was being waited for.
            return _nothing(settings, stop)


def _nothing(settings: Settings, stop: Stop) -> Outcome:
    return Outcome(named_end(stop), settings.out, Tally(sources=len(settings.sources)))


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
