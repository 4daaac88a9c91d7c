"""The rows of a run: from the reader into the writer, no faster than asked, no further than allowed, until the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row, may_hold_arrays
from lazyshard.format.batch import CheckedLines, EncodedRow, check_encoded, check_lines, without_array_keys
from lazyshard.format.row import check_row
from lazyshard.stream import ChunkWriter
from lazyshard.stream.waiting import Watchdog
from lazyshard_producer.display.metrics import Metrics, Reason
from lazyshard_producer.display.progress import Display
from lazyshard_producer.holding.holdback import Gate, Shelf
from lazyshard_producer.holding.limits import mark
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.rows.reader import Batch, Reader, RowStats
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import Tally, held_rows

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
        if self.delay(now) > 0:
            return 0
        # At least the one of which `delay` says so, however the division is rounded.
        return max(1, int((now - self._start) * self._rate) + 1 - self._taken)

    def take(self, rows: int = 1) -> None:
        """Counts rows."""
        self._taken += rows


FIGURES_S: Final = 5.0  # how often consumers and disk are looked at for the metrics: servers ask every 15 s or so


@dataclass(eq=False)
class RunWatch:
    """Tells the screen, the log and the metrics what goes on. `kind` is what becomes of refused rows."""

    pipeline: Pipeline
    writer: ChunkWriter
    shelf: Shelf
    display: Display
    metrics: Metrics
    clock: Callable[[], float]
    kind: Literal["skipped", "quarantined"]

    def __post_init__(self) -> None:
        """Begins to count."""
        self._started = self._next_figures = self.clock()
        self._before = self.writer.samples
        self._refused = self.pipeline.stats.refusals.count
        self._next_show = self._started + self.display.every_s
        self._look_due = self._started + self._every_s()

    def tally(self) -> Tally:
        """Returns how far the run is."""
        stats = self.pipeline.stats
        read, there, blank = stats.mixer.totals()
        return Tally(
            samples=self.writer.samples,
            published=self.writer.published_samples,
            chunks=self.writer.published_chunks,
            new=self.writer.samples - self._before,
            blank=blank,
            duplicate=stats.duplicate,
            bytes_read=read,
            bytes_total=there,
            seconds=self.clock() - self._started,
            refused=stats.refusals.count,
            sources=len(self.pipeline.names),
        )

    def _every_s(self) -> float:
        return self.display.every_s if self.metrics.address is None else min(self.display.every_s, FIGURES_S)

    def look(self) -> None:
        """Shows how far it is, if it is time for that."""
        now = self.clock()
        if now < self._look_due:
            return
        self._look_due = now + self._every_s()
        tally = self.tally()
        if now >= self._next_show:
            self._next_show = now + self.display.every_s
            self.display.show(tally)
        self.metrics.refused(self.kind, tally.refused - self._refused)
        self._refused = tally.refused
        if self.metrics.address is not None and now >= self._next_figures:
            self._next_figures = now + FIGURES_S
            # What cannot be had now is left as it was.
            with contextlib.suppress(OSError):
                self._tell_figures(self.writer.published_chunks)

    def waiting(self, why: Reason | None, text: str) -> None:
        """Shows what it waits for."""
        self.display.wait(text or None)
        self.metrics.waits(why)
        self.metrics.state("running" if why is None else "waiting")

    def _tell_figures(self, published: int) -> None:
        consumers = self.shelf.consumers(published)
        ahead = max(0, published - min(map(mark, consumers))) if consumers else None
        self.metrics.consumers({one.name: max(0, published - one.chunks_before) for one in consumers}, ahead)
        self.metrics.disk(self.shelf.used_bytes(published))


SLICE_S: Final = 0.1  # longest sleep: a signal is answered after that at the latest, sooner than anybody notices
WAIT_BEAT_S: Final = 5.0  # how often readers are told that this producer waits on purpose
MAX_LINES: Final = 1024  # rows checked and written at a time at the most: what a signal may have to wait for


@dataclass(eq=False)
class RowLoop:
    """Moves rows from the reader into the writer: `rows` so far."""

    reader: Reader
    stats: RowStats
    writer: ChunkWriter
    pace: Pace | None  # None for no limit; this and the next may be replaced while it runs
    gate: Gate | None  # None: the next chunk may always be published
    stop: Stop
    watch: RunWatch
    watchdog: Watchdog
    reload: Callable[[], None]  # is called when the settings are to be read again
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    check: Callable[[], None] = lambda: None  # is called now and then; what it raises ends the run
    rows: int = 0
    _ending: bool = False
    _bytes: int = 0  # of the open chunk
    _beat: float | None = None

    def run(self) -> bool:
        """Moves rows until the reader ends (True) or a signal asks to stop (False).

        A chunk's last row is written together with the position after it: that is what a restart goes on from.
        """
        while self._goes_on():
            batch = self.reader.read()
            if batch is None:
                return self.stop.requested is None
            if len(batch.lines):
                self._over()
                if not self._write(batch):
                    return False
            elif reason := self.stats.mixer.wait(SLICE_S):
                size = self.writer.samples_per_chunk
                self._tell("source", reason + held_rows(size - self.writer.room, size))
        return False

    def _goes_on(self) -> bool:
        """Looks at signals and clock; returns whether to go on."""
        if self.stop.requested is not None:
            return False
        if self.stop.end_requested and not self._ending:
            self._ending = True
            self.stats.mixer.end()
        if self.stop.take_reload():
            self.reload()
        self.check()
        self.watch.look()
        return True

    def _write(self, batch: Batch) -> bool:
        """Writes the rows of a batch; returns False if a signal came before the last one."""
        at, count = 0, len(batch.lines)
        while at < count:
            room = self.writer.room
            if room == self.writer.samples_per_chunk and not self._may_publish():
                return False
            due = self._due(min(count - at, room, MAX_LINES))
            if not due:
                return False
            with self._watched():
                at += self._move(batch, at, due)
            if not self._goes_on():
                return False
        return True

    def _move(self, batch: Batch, at: int, count: int) -> int:
        """Writes rows of a batch from index `at` on, at most so many; returns how many were dealt with."""
        lines, refused = _sound(batch.lines[at : at + count])
        written = 0
        if lines:
            checked = _checked(lines, arrays=self.writer.arrays)
            for index in checked.duplicates:
                if not batch.checked:
                    self.stats.count_duplicate(batch.place(at + index))
            written = len(checked)
            if batch.tokens is not None:
                checked = replace(checked, tokens=np.asarray(batch.tokens[at : at + written], dtype=np.uint32))
            refused = checked.refused or refused
            fills = written == self.writer.room
            source: Any = None
            if fills:
                source = batch.position(at + written - 1).encode(self.stats.mixer.names)
            if written:
                with contextlib.suppress(RowInvalid):  # that of `refused`
                    self.writer.write_lines(checked, source=source)
                self.rows += written
                self._bytes += len(checked.data) + (0 if checked.arrays is None else len(checked.arrays.data))
                self.watch.metrics.taken(batch.place(at).file, written)
            if fills:
                size, seconds = self.writer.samples_per_chunk, self.writer.publish_s
                self.watch.metrics.published(self.writer.published_chunks, size, self._bytes, seconds)
                self.watch.metrics.state("running")
                self._bytes = 0
                if self.gate is not None:
                    self.writer.settle()
                    self.gate.after_publish(self.writer.published_chunks)
        if self.pace is not None:
            self.pace.take(written)
        if refused is None or written == count:
            return written
        batch.refuse(at + written, refused)
        return written + 1

    def _due(self, count: int) -> int:
        """Returns how many of so many rows may be written now, waiting for the first; 0 if a signal came."""
        while (pace := self.pace) is not None:
            if due := pace.due(self.clock()):
                self._over()
                return min(due, count)
            # In slices: the rate may be another one by then.
            if not self._pause(min(pace.delay(self.clock()), SLICE_S), "rate", "the next row is due by --rate"):
                return 0
        return count

    def _may_publish(self) -> bool:
        """Waits until the next chunk may be published; returns False if a signal came before."""
        alarmed = False
        while self.gate is not None:
            # What is allowed is counted from what is there.
            with self._watched():
                self.writer.settle()
                held = self.gate.before_chunk(self.writer.published_chunks, self.writer.published_samples)
            if held is None:
                break
            if (held.deadlock or held.stalled) and not alarmed:
                alarmed = True
                # It may never end by itself.
                self.watch.display.warn(held.reason)
            if not self._pause(held.retry_s, "deadlock" if held.deadlock else "limit", held.reason):
                return False
        self._over()
        return True

    def _pause(self, seconds: float, why: Reason, text: str) -> bool:
        """Waits on purpose; returns False if a signal came."""
        due = self.clock() + seconds
        while (left := due - self.clock()) > 0:
            if not self._goes_on():
                return False
            self._tell(why, text)
            self.sleep(min(left, SLICE_S))
        return self._goes_on()

    def _tell(self, why: Reason, text: str) -> None:
        now = self.clock()
        if self._beat is None:
            # Short waits are nobody's concern.
            self._beat = now
        elif now - self._beat > (WAIT_BEAT_S if self.writer.state == "waiting" else 2 * SLICE_S):
            with self._watched():
                self.writer.heartbeat("waiting", text)
            self.watch.waiting(why, text)
            self._beat = now

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Has the watchdog say so where the filesystem does not answer."""
        self.watchdog.ask(lambda: f"writing to {self.writer.directory}")
        try:
            yield
        finally:
            self.watchdog.answered()

    def _over(self) -> None:
        if self._beat is not None:
            self._beat = None
            if self.writer.state == "waiting":
                self.writer.state = "running"
                self.watch.waiting(None, "")


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
