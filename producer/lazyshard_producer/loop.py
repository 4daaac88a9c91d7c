"""The rows of a run: from the sources into the writer, no faster than asked, no further than allowed, until the end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from lazyshard.errors import LazyShardError, RowInvalid
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.batch import CheckedLines, EncodedRow, check_encoded, check_lines, without_array_keys
from lazyshard.format.row import check_row
from lazyshard.stream import ChunkWriter
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.configuration.settings import OPTIONS, Limits, Settings
from lazyshard_producer.display import Display, Metrics, Outcome, Reason, Tally
from lazyshard_producer.holding import Holdback, hint
from lazyshard_producer.out_directory import clear_journals, leftovers
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.rows.reader import Batch
from lazyshard_producer.shipping import Destination
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import count

BURST_S: Final = 1.0  # rows of so many seconds may be made up for after a pause: over a slow publish, no flood


class Pace:
    """Spreads rows evenly, so many a second, from `now` on, which is seconds of a monotonic clock as in its methods."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._start = now
        self._taken = 0

    def delay(self, now: float) -> float:
        """Returns in how many seconds the next row is due; 0 if it is."""
        due = self._start + self._taken / self._rate
        if now - due > BURST_S:
            self._start += now - due - BURST_S
        return max(0.0, due - now)

    def due(self, now: float) -> int:
        """Returns how many rows are due."""
        # At least the one of which `delay` says so, however the division is rounded.
        return 0 if self.delay(now) > 0 else max(1, int((now - self._start) * self._rate) + 1 - self._taken)

    def take(self, rows: int = 1) -> None:
        """Counts rows."""
        self._taken += rows


FIGURES_S: Final = 5.0  # how often consumers and disk are looked at for the metrics: servers ask every 15 s or so
SLICE_S: Final = 0.1  # longest sleep: a signal is answered after that at the latest, sooner than anybody notices
WAIT_BEAT_S: Final = 5.0  # how often readers are told that this producer waits on purpose
MAX_LINES: Final = 1024  # rows checked and written at a time at the most: what a signal may have to wait for


class _SignalCame(Exception):
    """A signal asks to stop."""


@dataclass(eq=False)
class RowLoop:
    """Moves the rows of a run into its writer, `rows` so far, and tells display and metrics of it."""

    settings: Settings  # as the user knows them; they may change while it runs
    inner: Settings  # those that it was begun with, for the directory in which it publishes
    writer: ChunkWriter
    destination: Destination
    display: Display
    metrics: Metrics
    stop: Stop
    load: Callable[[], Settings] | None = None  # reads the settings anew; None where there is no configuration file
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rows: int = 0
    _ending: bool = False
    _bytes: int = 0  # of the open chunk
    _beat: float | None = None

    def __post_init__(self) -> None:
        """Makes what says so where the filesystem, a source or a function does not answer."""
        self._watchdog = Watchdog(self.display.warn)

    def publish(self) -> Outcome:
        """Publishes all rows and closes the writer, unless something raises."""
        writer, display, destination = self.writer, self.display, self.destination
        with contextlib.ExitStack() as sources:
            # What another program left there is no position, and is refused as such.
            committed = (writer.source or {}) if writer.published_chunks else None
            samples, check, watchdog = writer.published_samples, writer.check_owner, self._watchdog
            pipeline = Pipeline(
                self.inner, committed, samples=samples, warn=display.warn, check_owner=check, watchdog=watchdog
            )
            sources.callback(pipeline.close)
            self.begin(pipeline)
            sources.callback(self._watchdog.close)
            display.start(destination.shelf.name, self._tally())
            self._watchdog.start()
            if self.move():
                return self._end()
            tally = self._tally()
            # Before the writer: what was refused is written down while the stream is still ours.
            sources.close()
            writer.close(end=False)
            # The chunk in hand is published by now.
            tally = replace(tally, published=writer.published_samples, chunks=writer.published_chunks)
            destination.settle(writer.published_chunks, display.wait)
            return stopped(self.settings, self.stop, tally)

    def _end(self) -> Outcome:
        """Ends the stream, all rows being in it."""
        out, writer, stats = self.inner.out, self.writer, self._pipeline.stats
        self._watchdog.ask(lambda: f"writing to {out}")
        last = stats.reached()
        if not self.rows and not writer.published_samples:
            # A stream without a row is not to pass for what was asked for.
            stats.refusals.check_empty(stats.rows)
            if stats.rows:
                left_out = f"--where or --transform left out all of {count(stats.rows, 'row')}"
                self.display.warn(f"{left_out}: the stream ends empty")
        writer.close(end=True, source=last.encode(self._pipeline.names, end=True))
        self._watchdog.answered()
        clear_journals(out)
        for note in leftovers(last, [source.path for source in self.inner.sources]):
            self.display.warn(note)
        there = self.destination.settle(writer.published_chunks, self.display.wait)
        tally = self._tally()
        return Outcome("finished", self.settings.out, tally) if there else stopped(self.settings, self.stop, tally)

    def begin(self, pipeline: Pipeline) -> None:
        """Begins to count."""
        self._pipeline = pipeline
        self._started = self._figures_due = self.clock()
        self._show_due = self._started + self.display.every_s
        self._before = self.writer.samples
        self._refused = pipeline.stats.refusals.count
        self._take_settings(self.settings, None)

    def _take_settings(self, new: Settings, old: Settings | None) -> None:
        """Sets the pace, and what is asked before each chunk; None: there is no limit."""
        self.settings, writer = new, self.writer
        if old is None or new.rate != old.rate:
            self._pace = None if new.rate is None else Pace(new.rate, self.clock())
        if old is None or new.limits != old.limits:
            holdback = None
            if new.limits != Limits():
                size, warn = writer.samples_per_chunk, self.display.warn
                holdback = Holdback(new.limits, self.destination.shelf, size, check=writer.check_owner, warn=warn)
            self._gate = self.destination.gate(holdback)
        if old is not None and new.log_every_s != old.log_every_s:
            self.display.log_every(new.log_every_s)
        self._pipeline.stats.refusals.most = new.max_bad_rows

    def _tally(self) -> Tally:
        """Returns how far the run is."""
        stats = self._pipeline.stats
        read, there, blank = stats.mixer.totals()
        return Tally(
            samples=self.writer.samples,
            published=self.writer.published_samples,
            chunks=self.writer.published_chunks,
            new=self.writer.samples - self._before,
            blank_lines=blank,
            duplicate_key_rows=stats.duplicate,
            bytes=read,
            bytes_total=there,
            seconds=self.clock() - self._started,
            refused_rows=stats.refusals.count,
            sources=len(self._pipeline.names),
        )

    def move(self) -> bool:
        """Moves rows until the reader ends (True) or a signal asks to stop (False).

        A chunk's last row is written together with the position after it: that is what a restart goes on from.
        """
        with contextlib.suppress(_SignalCame):
            while True:
                self._look()
                batch = self._pipeline.read()
                if batch is None:
                    return self.stop.requested is None
                if len(batch.lines):
                    self._over()
                    self._write(batch)
                elif reason := self._pipeline.stats.mixer.wait(SLICE_S):
                    size = self.writer.samples_per_chunk
                    if held := size - self.writer.room:
                        reason += f"; {held:,} of the {count(size, 'row')} of the next chunk are there"
                    self._tell("source", reason)
        return False

    def _look(self) -> None:
        """Looks at signals and clock."""
        if self.stop.requested is not None:
            raise _SignalCame
        if self.stop.end_requested and not self._ending:
            self._ending = True
            self._pipeline.stats.mixer.end()
        if self.stop.take_reload():
            self._take_settings(reload_settings(self.settings, self.load, self.display), self.settings)
        self.destination.check()
        self._show()

    def _show(self) -> None:
        """Shows how far it is, where it is time for that."""
        now = self.clock()
        if now >= self._show_due:
            self._show_due = now + self.display.every_s
            self.display.show(self._tally())
        if self.metrics.address is None or now < self._figures_due:
            return
        self._figures_due = now + FIGURES_S
        before, self._refused = self._refused, self._pipeline.stats.refusals.count
        kind: Literal["skipped", "quarantined"] = "skipped" if self.settings.on_bad_row == "skip" else "quarantined"
        self.metrics.refused(kind, self._refused - before)
        # What cannot be had now is left as it was.
        with contextlib.suppress(OSError):
            published = self.writer.published_chunks
            consumers = self.destination.shelf.consumers(published)
            ahead = max(0, published - min(map(hint, consumers))) if consumers else None
            self.metrics.consumers({one.name: max(0, published - one.chunks_before) for one in consumers}, ahead)
            self.metrics.disk(self.destination.shelf.used_bytes(published))

    def _write(self, batch: Batch) -> None:
        at, stop = 0, len(batch.lines)
        while at < stop:
            room = self.writer.room
            if room == self.writer.samples_per_chunk:
                self._wait_for_room()
            due = self._due(min(stop - at, room, MAX_LINES))
            with self._watched():
                at += self._move(batch, at, due)
            self._look()

    def _move(self, batch: Batch, at: int, count: int) -> int:
        """Writes rows of a batch from index `at` on, at most so many; returns how many were dealt with."""
        lines, refused = _sound(batch.lines[at : at + count])
        written = 0
        if lines:
            checked = _checked(lines, arrays=self.writer.arrays)
            for index in checked.duplicates:
                if not batch.checked:
                    self._pipeline.stats.count_duplicate(batch.place(at + index))
            written = len(checked)
            if batch.tokens is not None:
                checked = replace(checked, tokens=np.asarray(batch.tokens[at : at + written], dtype=np.uint32))
            refused = checked.refused or refused
        if written:
            fills, source = written == self.writer.room, None
            if fills:
                source = batch.position(at + written - 1).encode(self._pipeline.stats.mixer.names)
            with contextlib.suppress(RowInvalid):  # that of `refused`
                self.writer.write_lines(checked, source=source)
            self.rows += written
            self._bytes += len(checked.data) + (0 if checked.arrays is None else len(checked.arrays.data))
            self.metrics.taken(batch.place(at).file, written)
            if fills:
                chunks, size = self.writer.published_chunks, self.writer.samples_per_chunk
                self.metrics.published(chunks, size, self._bytes, self.writer.publish_s)
                self._bytes = 0
                if self._gate is not None:
                    self.writer.settle()
                    self._gate.after_publish(self.writer.published_chunks)
        if self._pace is not None:
            self._pace.take(written)
        if refused is None or written == count:
            return written
        batch.refuse(at + written, refused)
        return written + 1

    def _due(self, most: int) -> int:
        """Returns how many of so many rows may be written now, waiting for the first."""
        while (pace := self._pace) is not None:
            if due := pace.due(self.clock()):
                self._over()
                return min(due, most)
            # In slices: the rate may be another one by then.
            self._pause(min(pace.delay(self.clock()), SLICE_S), "rate", "the next row is due by --rate")
        return most

    def _wait_for_room(self) -> None:
        """Waits until the next chunk may be published."""
        alarmed = False
        while self._gate is not None:
            # What is allowed is counted from what is there.
            with self._watched():
                self.writer.settle()
                held = self._gate.before_chunk(self.writer.published_chunks, self.writer.published_samples)
            if held is None:
                break
            if (held.deadlock or held.stalled) and not alarmed:
                alarmed = True
                # It may never end by itself.
                self.display.warn(held.reason)
            self._pause(held.retry_s, "deadlock" if held.deadlock else "limit", held.reason)
        self._over()

    def _pause(self, seconds: float, why: Reason, text: str) -> None:
        due = self.clock() + seconds
        while (left := due - self.clock()) > 0:
            self._look()
            self._tell(why, text)
            self.sleep(min(left, SLICE_S))
        self._look()

    def _tell(self, why: Reason, text: str) -> None:
        now = self.clock()
        if self._beat is None:
            # Short waits are nobody's concern.
            self._beat = now
        elif now - self._beat > (WAIT_BEAT_S if self.writer.state == "waiting" else 2 * SLICE_S):
            with self._watched():
                self.writer.heartbeat("waiting", text)
            self._wait(why, text)
            self._beat = now

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Has the watchdog say so where the filesystem does not answer."""
        self._watchdog.ask(lambda: f"writing to {self.writer.directory}")
        try:
            yield
        finally:
            self._watchdog.answered()

    def _over(self) -> None:
        if self._beat is not None:
            self._beat = None
            if self.writer.state == "waiting":
                self.writer.state = "running"
                self._wait(None, None)

    def _wait(self, why: Reason | None, text: str | None) -> None:
        self.display.wait(text)
        self.metrics.waits(why)


def reload_settings(old: Settings, load: Callable[[], Settings] | None, display: Display) -> Settings:
    """Returns the settings to go on with, and tells what changes. Raises nothing."""
    if load is None:
        display.note("SIGHUP has come, and there is no configuration file to be read again: nothing changes")
        return old
    try:
        new = load()
    except (LazyShardError, OSError) as error:
        display.warn(f"nothing is reloaded: {error}")
        return old
    taken = [option.field for option in OPTIONS if option.reload and option.owner is Settings]
    if new.on_bad_row != old.on_bad_row:  # with another policy its number means something else
        taken.remove("max_bad_rows")
    refused = ["source"] if new.sources != old.sources else []
    refused += [option.name for option in OPTIONS if not option.reload and option.of(old) != option.of(new)]
    for name in refused:
        display.warn(f"{name} cannot change while it runs; stop it and start it again for that")
    settings = replace(old, limits=new.limits, **{name: getattr(new, name) for name in taken})
    changed = [one for one in OPTIONS if one.of(old) != one.of(settings)]
    changes = ", ".join(f"{one.name} from {one.show(old)} to {one.show(settings)}" for one in changed)
    display.note(f"reloaded: {changes or 'nothing has changed'}")
    return settings


def stopped(settings: Settings, stop: Stop, tally: Tally | None = None) -> Outcome:
    """Returns how a run ends that a signal stops, before it has begun if there is no tally."""
    end: Literal["interrupted", "terminated"] = "interrupted" if stop.requested is signal.SIGINT else "terminated"
    return Outcome(end, settings.out, tally or Tally(sources=len(settings.sources)))


def _sound(lines: Sequence[bytes | EncodedRow | RowInvalid]) -> tuple[Sequence[bytes | EncodedRow], RowInvalid | None]:
    """Returns the lines before the first that its source could not give, and why it could not."""
    for index, line in enumerate(lines):
        if isinstance(line, RowInvalid):
            return lines[:index], line  # type: ignore[return-value]
    return lines, None  # type: ignore[return-value]


def _checked(lines: Sequence[bytes | EncodedRow], *, arrays: bool) -> CheckedLines:
    if set(map(type, lines)) == {bytes}:
        plain = check_lines(lines)  # type: ignore[arg-type]
        # The writer would refuse the same ones, but whoever refuses must know how many rows are left.
        return without_array_keys(plain) if arrays else plain
    # Rows of a stream that tells their lengths may come with rows that tell none.
    rows = [EncodedRow(line, b"") if isinstance(line, bytes) else line for line in lines]
    if not arrays:
        return replace(check_encoded(rows), arrays=None)
    refused = _first_without_its_arrays(rows)
    checked = check_encoded(rows if refused is None else rows[: refused.index])
    return checked if refused is None or checked.refused is not None else replace(checked, refused=refused)


def _first_without_its_arrays(rows: Sequence[EncodedRow]) -> RowInvalid | None:
    """Returns why the first row is refused that has none of the arrays that it describes, with its `index`.

    In a stream without arrays, of which it may come, what looks like a description is a value like any other.
    """
    for index, row in enumerate(rows):
        if not row.arrays and may_hold_arrays(row.line):
            try:
                fill_row(check_row(row.line), np.empty(0, np.uint8))
            except RowInvalid as refused:
                refused.index = index
                return refused
    return None
