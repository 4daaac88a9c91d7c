"""What a run tells of itself while it goes on: to the display, and to the metrics if there are any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, Literal

from lazyshard.stream import ChunkWriter
from lazyshard_producer.display.metrics import Metrics
from lazyshard_producer.display.progress import Display
from lazyshard_producer.holding.limits import read_claims
from lazyshard_producer.holding.shelf import Shelf
from lazyshard_producer.loop_interfaces import Reason
from lazyshard_producer.rows.pipeline import Pipeline
from lazyshard_producer.wording import Tally

FIGURES_S: Final = 5.0
"""How often consumers and disk are looked at for the metrics: servers ask every 15 s or so."""


class RunWatch:
    """See `lazyshard_producer.loop_interfaces.Watch`.

    Args:
        pipeline: where the rows come from.
        writer: where they go.
        shelf: where the chunks lie in the end.
        display: shows it.
        metrics: counts it.
        clock: returns seconds of a monotonic clock.
        quarantines: whether refused rows are kept.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        writer: ChunkWriter,
        shelf: Shelf,
        display: Display,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        quarantines: bool,
    ) -> None:
        self._pipeline = pipeline
        self._writer = writer
        self._shelf = shelf
        self._display = display
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._before = writer.samples
        self._quarantines = quarantines
        self._refused = pipeline.book.refusals.count
        self._next_figures = self._started
        self._next_show = self._started + display.every_s

    def tally(self) -> Tally:
        """Returns how far the run is."""
        book = self._pipeline.book
        read, there, blank = book.mixer.totals()
        return Tally(
            samples=self._writer.samples,
            published=self._writer.published_samples,
            chunks=self._writer.published_chunks,
            new=self._writer.samples - self._before,
            blank=blank,
            duplicate=book.duplicate,
            bytes_read=read,
            bytes_total=there,
            seconds=self._clock() - self._started,
            refused=book.refusals.count,
            sources=len(self._pipeline.names),
        )

    @property
    def every_s(self) -> float:
        """How often it wants to look, in seconds."""
        return self._display.every_s if self._metrics.address is None else min(self._display.every_s, FIGURES_S)

    def look(self) -> None:
        """Shows how far it is."""
        tally = self.tally()
        if self._clock() >= self._next_show:
            self._next_show = self._clock() + self._display.every_s
            self._display.show(tally)
        kind: Literal["skipped", "quarantined"] = "quarantined" if self._quarantines else "skipped"
        self._metrics.refused(kind, tally.refused - self._refused)
        self._refused = tally.refused
        if self._metrics.address is not None and self._clock() >= self._next_figures:
            self._next_figures = self._clock() + FIGURES_S
            self._tell_figures()

    def alarm(self, text: str) -> None:
        """Says that a wait has begun which may never end by itself."""
        self._display.warn(text)

    def waiting(self, why: Reason | None, text: str) -> None:
        """Shows what it waits for."""
        self._display.wait(text or None)
        self._metrics.waits(why)
        self._metrics.state("running" if why is None else "waiting")

    def published(self, samples: int, size: int, seconds: float) -> None:
        """Counts a chunk."""
        self._metrics.published(self._writer.published_chunks, samples, size, seconds)
        self._metrics.state("running")

    def taken(self, source: str, rows: int) -> None:
        """Counts rows."""
        self._metrics.taken(source, rows)

    def _tell_figures(self) -> None:
        """Tells the metrics of consumers and disk. What cannot be had now is left as it was."""
        published = self._writer.published_chunks
        with contextlib.suppress(OSError):
            claims = read_claims(self._shelf.consumers(published))
            ahead = max(0, published - min(claim.mark for claim in claims)) if claims else None
            self._metrics.consumers({claim.name: max(0, published - claim.done) for claim in claims}, ahead)
            self._metrics.disk(self._shelf.used_bytes(published))
