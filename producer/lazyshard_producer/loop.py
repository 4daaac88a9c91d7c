"""The main loop of a run: moves rows from the sources into the writer within the rate and the limits, until the end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard.errors import LazyShardError, RowInvalid
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.batch import CheckedLines, EncodedRow, check_encoded, check_lines, without_array_keys
from lazyshard.format.row import check_row
from lazyshard.stream import ChunkWriter
from lazyshard.stream.members import read_committed
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import OPTIONS, Limits, Settings
from lazyshard_producer.display import Display, Outcome, Reason, Tally
from lazyshard_producer.errors import count
from lazyshard_producer.following.journal import clear_journals
from lazyshard_producer.limits import Holdback, Shelf, hint
from lazyshard_producer.position import plain_name
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.rows.reader import Batch
from lazyshard_producer.sources.source import file_size
from lazyshard_producer.stop import GivenUp, Stop
from lazyshard_producer.writers import SharedLimits

BURST_S: Final = 1.0  # after a pause, rows of this time are caught up: enough for a slow publish, no flood


class Pace:
    """Spreads rows evenly, `rate` per second, starting at `now`; all times are seconds of a monotonic clock."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._start, self._taken = rate, now, 0

    def delay(self, now: float) -> float:
        """Returns the number of seconds until the next row is due; 0 if it is due now."""
        due = self._start + self._taken / self._rate
        if now - due > BURST_S:
            self._start += now - due - BURST_S
        return max(0.0, due - now)

    def due(self, now: float) -> int:
        """Returns how many rows are due."""
        # At least the row that `delay` reports as due, however the division is rounded.
        return 0 if self.delay(now) > 0 else max(1, int((now - self._start) * self._rate) + 1 - self._taken)

    def take(self, rows: int = 1) -> None:
        """Counts rows."""
        self._taken += rows


SLICE_S: Final = 0.1  # longest sleep, so signals are handled within this time, which users do not notice
WAIT_BEAT_S: Final = 5.0  # interval at which the heartbeat tells readers that this producer waits on purpose


Load = Callable[[], Settings]
"""Reloads the settings; there is none without a configuration file."""


@dataclass(eq=False)
class RowLoop:
    """Moves the rows of a run into its writer, and reports to display and metrics."""

    settings: Settings  # with the user's own --out; they may change during the run
    writer: ChunkWriter
    shelf: Shelf
    display: Display
    stop: Stop
    load: Load | None = None
    gate: SharedLimits | None = None  # of a named writer
    clock: Callable[[], float] = field(default=time.monotonic, init=False)
    sleep: Callable[[float], None] = field(default=time.sleep, init=False)
    _bytes: int = 0  # of the open chunk
    _beat: float | None = None

    def publish(self) -> Outcome:
        """Publishes all rows and closes the writer, unless something raises."""
        writer, display, settings = self.writer, self.display, self.settings
        inner = replace(settings, out=str(writer.directory), spool=None)
        # If another program wrote the stream, this is no position and is refused.
        committed = (writer.source or {}) if writer.published_chunks else None
        samples, check = writer.published_samples, writer.check_owner
        pipeline = self._pipeline = Pipeline(inner, committed, samples=samples, warn=display.warn, check_owner=check)
        with contextlib.closing(pipeline), contextlib.closing(pipeline.watchdog):
            self._started = self._figures_due = self.clock()
            self._show_due = self._started + display.every_s
            self._before, self._refused = writer.samples, pipeline.mixer.refusals.count
            # Keys that no row has had so far, of rows that keep theirs.
            self._unseen = set() if settings.encode or settings.split else {*settings.embed}
            self._take_settings(settings, None)
            display.start(self.shelf.name, self._tally())
            pipeline.watchdog.start()
            if self.move() and (outcome := self._end()) is not None:
                return outcome
        # After closing the pipeline, which writes refused rows: it must do so while this producer holds the lock.
        writer.close(end=False)
        # The current chunk is published by now.
        self.shelf.settle(writer.published_chunks, display.wait)
        return stopped(self.settings, self.stop, self._tally())

    def _end(self) -> Outcome | None:
        """Ends the stream after its last row; returns None if a signal arrives while the writer waits for that."""
        writer, mixer = self.writer, self._pipeline.mixer
        with self._watched():
            last = mixer.position(mixer.here(mixer.counts()))
        if not writer.samples:
            # A stream without rows must not pass as a success if all rows were refused.
            mixer.refusals.check_empty(mixer.rows)
            if mixer.rows:
                left_out = f"--where or --transform left out all of {count(mixer.rows, 'row')}"
                self.display.warn(f"{left_out}: the stream ends empty")
        if self._unseen and writer.samples > self._before:
            self.display.warn(f"--embed {','.join(sorted(self._unseen))}: no new row has this key: is it misspelled?")
        try:
            # A named writer may wait for the stream's limits here, which is no fault of the filesystem.
            with self._watched() if self.gate is None else contextlib.nullcontext():
                writer.close(end=True, source=last.encode(self._pipeline.mixer.names, end=True))
        except GivenUp:
            return None
        self.display.wait(None)
        clear_journals(writer.directory)
        since = "since its end was read; they are not in the stream"
        for entry, one in zip(last.sources, self.settings.sources, strict=False):
            if entry and entry["kind"] == "jsonl" and (more := file_size(one.path) - entry["offset"]) > 0:
                self.display.warn(f"{plain_name(one.path)}: has grown by {count(more, 'byte')} {since}")
        there = self.shelf.settle(writer.published_chunks, self.display.wait)
        tally = self._tally()
        return Outcome("finished", self.settings.place, tally) if there else stopped(self.settings, self.stop, tally)

    def _take_settings(self, new: Settings, old: Settings | None) -> None:
        """Sets rate and limits, where they differ from `old`, which is None at the start."""
        self.settings = new
        if old is None or new.rate != old.rate:
            self._pace = None if new.rate is None else Pace(new.rate, self.clock())
        if old is None or new.limits != old.limits:
            self._holdback: Holdback | None = None
            limits = new.limits
            if self.gate is not None:
                # They are those of the stream. Only the upload of this writer's chunks may hold it back itself.
                self.gate.limits, limits = limits, Limits()
            if limits != Limits() or self.shelf.remote:
                size, check, warn = self.writer.samples_per_chunk, self.writer.check_owner, self.display.warn
                self._holdback = Holdback(limits, self.shelf, size, check=check, warn=warn)
        if old is not None and new.log_every_s != old.log_every_s:
            self.display.log_every(new.log_every_s)
        self._pipeline.mixer.refusals.most = new.max_bad_rows

    def _tally(self) -> Tally:
        """Returns the progress of the run."""
        writer = self.writer
        return Tally(
            samples=writer.samples,
            published=writer.published_samples,
            chunks=writer.published_chunks,
            new=writer.samples - self._before,
            seconds=self.clock() - self._started,
            **self._pipeline.mixer.totals(),
        )

    def move(self) -> bool:
        """Moves rows until the reader ends (True) or a signal asks to stop (False)."""
        with contextlib.suppress(GivenUp):
            while True:
                self._look()
                batch = self._pipeline.read()
                if batch is None:
                    return self.stop.requested is None
                if len(batch.lines):
                    self._tell(None)
                    self._write(batch)
                elif reason := self._pipeline.mixer.wait(SLICE_S):
                    size = self.writer.samples_per_chunk
                    if held := size - self.writer.room:
                        reason += f"; {held:,} of the {count(size, 'row')} of the next chunk are there"
                    self._tell("source", reason)
        return False

    def _look(self) -> None:
        """Checks signals and the clock, and shows progress if it is due. Raises GivenUp after SIGINT or SIGTERM."""
        if self.stop.requested is not None:
            raise GivenUp
        if self.stop.end_requested:
            self.stop.end_requested = False
            self._pipeline.mixer.end()
        if self.stop.reload_requested:
            # Cleared before the reload: a signal that arrives during the reload causes another one.
            self.stop.reload_requested = False
            self._take_settings(reload_settings(self.settings, self.load, self.display), self.settings)
        self.shelf.check()
        now = self.clock()
        if now >= self._show_due:
            self._show_due = now + self.display.every_s
            self.display.show(self._tally())
        if self.display.metrics.address is None or now < self._figures_due:
            return
        # Prometheus servers typically scrape every 15 s.
        self._figures_due, metrics = now + 5.0, self.display.metrics
        before, self._refused = self._refused, self._pipeline.mixer.refusals.count
        metrics.refused("skipped" if self.settings.on_bad_row == "skip" else "quarantined", self._refused - before)
        # On an error the figures keep their last values.
        with contextlib.suppress(OSError):
            published = self.writer.published_chunks
            if self.gate is not None:
                if self.shelf.remote:
                    return
                told = read_committed(Path(self.settings.out))
                published = 0 if told is None else told.chunks
            consumers = self.shelf.consumers(published)
            ahead = max(0, published - min(map(hint, consumers))) if consumers else None
            metrics.consumers({one.name: max(0, published - one.chunks_before) for one in consumers}, ahead)
            metrics.disk(self.shelf.used_bytes(published))

    def _write(self, batch: Batch) -> None:
        at, stop = 0, len(batch.lines)
        while at < stop:
            room = self.writer.room
            if room == self.writer.samples_per_chunk:
                self._wait_for_room()
            # At most 1024 rows, so that signals are handled soon.
            due = self._due(min(stop - at, room, 1024))
            with self._watched():
                at += self._move(batch, at, due)
            self._look()

    def _move(self, batch: Batch, at: int, most: int) -> int:
        """Writes at most `most` rows of a batch from index `at` on; returns the number of rows written or refused."""
        checked = _checked(batch.lines[at : at + most], arrays=self.writer.arrays)
        written = len(checked)
        if written:
            for index in () if batch.checked else checked.duplicates:
                self._pipeline.mixer.count_duplicate(batch.place(at + index))
            if batch.tokens is not None:
                sizes = (one[at : at + written] for one in (batch.tokens, batch.patches))
                tokens, patches = (np.asarray(size, dtype=np.uint32) for size in sizes)
                checked = replace(checked, tokens=tokens, patches=patches)
            fills = written == self.writer.room
            source = batch.position(at + written - 1).encode(self._pipeline.mixer.names) if fills else None
            with contextlib.suppress(RowInvalid):  # `checked.refused`, which is handled below
                self.writer.write_lines(checked, source=source)
            self._bytes += len(checked.data) + (0 if checked.arrays is None else len(checked.arrays.data))
            self._unseen = {key for key in self._unseen if f'"{key}":'.encode() not in checked.data}
            self.display.metrics.taken(batch.place(at).file, written)
            if fills:
                chunks, size = self.writer.published_chunks, self.writer.samples_per_chunk
                self.display.metrics.published(chunks, size, self._bytes, self.writer.publish_s)
                self._bytes = 0
                if self._holdback is not None:
                    self.writer.settle()
                    self._holdback.after_publish(self.writer.published_chunks)
        if self._pace is not None:
            self._pace.take(written)
        if checked.refused is None:
            return written
        batch.refuse(at + written, checked.refused)
        return written + 1

    def _due(self, most: int) -> int:
        """Returns how many rows may be written now, at most `most`; waits until one may be."""
        while (pace := self._pace) is not None:
            if due := pace.due(self.clock()):
                self._tell(None)
                return min(due, most)
            # In slices, because a reload may change the rate meanwhile.
            self._pause(min(pace.delay(self.clock()), SLICE_S), "rate", "--rate limits the speed")
        return most

    def _wait_for_room(self) -> None:
        """Waits until the next chunk may be published."""
        # The stream's limits hold a named writer back through the sequencer.
        while self.gate is not None and (reason := self.writer.held()) is not None:
            self._pause(0.005, "limit", reason)
        while self._holdback is not None:
            # The limits count published chunks, so the previous chunk must be published first.
            with self._watched():
                self.writer.settle()
                held = self._holdback.before_chunk(self.writer.published_chunks, self.writer.published_samples)
            if held is None:
                break
            self._pause(held.retry_s, "deadlock" if held.deadlock else "limit", held.reason)
        self._tell(None)

    def _pause(self, seconds: float, why: Reason, text: str) -> None:
        due = self.clock() + seconds
        while (left := due - self.clock()) > 0:
            self._look()
            self._tell(why, text)
            self.sleep(min(left, SLICE_S))
        self._look()

    def _tell(self, why: Reason | None, text: str = "") -> None:
        """Reports that the run waits and why, once the wait has lasted a moment; None: that it continues."""
        waits, now = self.writer.state == "waiting", self.clock()
        self._beat = None if why is None else now if self._beat is None else self._beat
        if self._beat is None:
            if not waits:
                return
            self.writer.state = "running"
        else:
            if now - self._beat <= (WAIT_BEAT_S if waits else 2 * SLICE_S):
                return
            with self._watched():
                self.writer.heartbeat("waiting", text)
            self._beat = now
        self.display.wait(text or None)
        self.display.metrics.waits(why)

    def _watched(self) -> Watchdog:
        """Lets the watchdog warn if the filesystem does not respond within the context."""
        return self._pipeline.watchdog.ask(lambda: f"writing to {self.writer.directory}")


def reload_settings(old: Settings, load: Load | None, display: Display) -> Settings:
    """Returns the settings to continue with, and reports the changes. Raises nothing."""
    if load is None:
        display.note("SIGHUP received, but there is no configuration file to reload: nothing changes")
        return old
    try:
        new = load()
    except (LazyShardError, OSError) as error:
        display.warn(f"nothing is reloaded: {error}")
        return old
    refused = [option.name for option in OPTIONS if not option.reload and option.of(old) != option.of(new)]
    for name in ["source", *refused] if new.sources != old.sources else refused:
        display.warn(f"{name} cannot change during a run; stop the run and start it again to change it")
    # The number of bad rows has another meaning under another policy.
    most = new.max_bad_rows if new.on_bad_row == old.on_bad_row else old.max_bad_rows
    settings = replace(old, limits=new.limits, rate=new.rate, log_every_s=new.log_every_s, max_bad_rows=most)
    changed = [one for one in OPTIONS if one.of(old) != one.of(settings)]
    changes = ", ".join(f"{one.name} from {one.show(old)} to {one.show(settings)}" for one in changed)
    display.note(f"reloaded: {changes or 'nothing has changed'}")
    return settings


def stopped(settings: Settings, stop: Stop, tally: Tally | None = None) -> Outcome:
    """Returns the outcome of a run that a signal stopped; without a tally, before the first row."""
    tally = tally or Tally(sources=len(settings.sources))
    return Outcome("interrupted" if stop.requested is signal.SIGINT else "terminated", settings.place, tally)


def _checked(lines: Sequence[Any], *, arrays: bool) -> CheckedLines:
    """Checks rows up to the first invalid row, or error of a source in place of a row: see `CheckedLines.refused`."""
    sound = next((index for index, line in enumerate(lines) if isinstance(line, RowInvalid)), len(lines))
    if sound < len(lines):
        checked = _checked(lines[:sound], arrays=arrays)
        return checked if checked.refused is not None else replace(checked, refused=lines[sound])
    if set(map(type, lines)) == {bytes}:
        # The writer would refuse the same rows, but `_move` has to know how many rows precede the refused one.
        return without_array_keys(check_lines(lines)) if arrays else check_lines(lines)
    # Rows of a stream source that has token lengths may be mixed with rows without.
    rows = [EncodedRow(line, b"") if isinstance(line, bytes) else line for line in lines]
    if not arrays:
        return replace(check_encoded(rows), arrays=None)
    # Find the first row that describes arrays and has none, and the reason to refuse it. Such a row may come from a
    # stream without arrays, where a value that looks like a description of an array is an ordinary value.
    for index, row in enumerate(rows):
        if not row.arrays and may_hold_arrays(row.line):
            try:
                fill_row(check_row(row.line), np.empty(0, np.uint8))
            except RowInvalid as refused:
                return _checked([*lines[:index], refused], arrays=arrays)
    return check_encoded(rows)
