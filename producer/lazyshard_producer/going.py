"""`Going`: a run with its writer open, from its first row to its last."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from lazyshard.stream import ChunkWriter
from lazyshard.stream.watchdog import Watchdog
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display.metrics import Metrics
from lazyshard_producer.display.progress import Display
from lazyshard_producer.ended import clear_journals, leftovers
from lazyshard_producer.loop import RowLoop
from lazyshard_producer.loop_interfaces import Gate
from lazyshard_producer.pace import Pace
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.shipping.destination import Destination, make_holdback
from lazyshard_producer.stop import Stop
from lazyshard_producer.watching import RunWatch
from lazyshard_producer.wording import Outcome, count

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
        self._patience = Watchdog(display.warn)
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
            self._writer.close(end=True, source=last.encode(self._pipeline.names, end=True))
            self._patience.answered()
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
