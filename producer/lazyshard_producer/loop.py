"""The rows of a run: from the sources into the writer, no faster than asked, until they end or a signal comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lazyshard.errors import RowInvalid
from lazyshard.format import parse_row
from lazyshard.storage import ChunkWriter
from lazyshard_producer.duplicates import names_a_key_twice
from lazyshard_producer.jsonl import locate
from lazyshard_producer.pace import Pace
from lazyshard_producer.sequence import SourceSequence
from lazyshard_producer.stop import Stop

SLICE_S: Final = 0.1
"""Longest sleep: a signal is answered after that at the latest, sooner than anybody notices."""

WAIT_BEAT_S: Final = 5.0
"""How often readers are told that this producer waits on purpose."""


class RowLoop:
    """Moves rows.

    Args:
        sources: where they come from.
        writer: where they go.
        pace: when the next one is due; None for no limit.
        stop: whether to go on.
        every_s: how often to call `look`, in seconds.
        look: is called now and then while rows come or are waited for.
        warn: is told what is odd.
        clock: returns seconds of a monotonic clock.
        sleep: waits for so many seconds.

    Attributes:
        rows: rows taken so far.
    """

    def __init__(
        self,
        sources: SourceSequence,
        writer: ChunkWriter,
        pace: Pace | None,
        stop: Stop,
        *,
        every_s: float,
        look: Callable[[], None],
        warn: Callable[[str], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.rows = 0
        self._sources = sources
        self._writer = writer
        self._pace = pace
        self._stop = stop
        self._every_s = every_s
        self._look = look
        self._warn = warn
        self._clock = clock
        self._sleep = sleep
        self._next_look = clock() + every_s

    def run(self) -> bool:
        """Moves rows until the sources end (True) or a signal asks to stop (False).

        A chunk's last row is written together with the position after it: that is what a restart goes on from.

        Raises:
            RowInvalid: a line that is no row, with its place; the rows before it are written.
            SourceRefused, ProducerFenced, WriterFailed: see there.
        """
        read, write, stop, pace = self._sources.read, self._writer.write, self._stop, self._pace
        per_chunk = self._writer.samples_per_chunk
        left = per_chunk
        while stop.requested is None:
            line = read()
            if line is None:
                return stop.requested is None
            if pace is not None and not self._wait(pace):
                return False
            left -= 1
            try:
                if left:
                    if names_a_key_twice(line, write(line)):
                        self._note_duplicate()
                else:
                    # The seal's position counts this row's keys too, so they are looked at before.
                    if names_a_key_twice(line, parse_row(line)):
                        self._note_duplicate()
                    write(line, source=self._sources.encoded())
                    left = per_chunk
            except RowInvalid as error:
                raise locate(error, self._sources.place) from error
            self.rows += 1
            if self._clock() >= self._next_look:
                self._look_now()
        return False

    def _wait(self, pace: Pace) -> bool:
        """Waits until the next row is due and takes it; returns False if a signal came before."""
        now = beat = self._clock()
        while (delay := pace.delay(now)) > 0:
            if self._stop.requested is not None:
                return False
            self._sleep(min(delay, SLICE_S))
            now = self._clock()
            if now - beat > WAIT_BEAT_S:
                self._writer.heartbeat("waiting")
                beat = now
            if now >= self._next_look:
                self._look_now()
        pace.take()
        self._writer.state = "running"
        return self._stop.requested is None

    def _look_now(self) -> None:
        self._next_look = self._clock() + self._every_s
        self._look()

    def _note_duplicate(self) -> None:
        place = self._sources.place
        if self._sources.count_duplicate() == 1:
            self._warn(
                f"{place.file}:{place.line}: a key is named twice in one object (readers keep one of the values); "
                f"further such rows of this file are only counted"
            )
