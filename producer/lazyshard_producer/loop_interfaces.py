"""What the loop of a run asks and tells: whether it may publish, and what goes on."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

Reason: TypeAlias = Literal["source", "rate", "limit", "deadlock"]
"""What a run can wait for: rows, the time of --rate, room below a limit, and room that will never come."""


class Held(Protocol):
    """Why the next chunk may not be published now; see `lazyshard_producer.holding.holdback.Hold`."""

    @property
    def reason(self) -> str:
        """In words."""

    @property
    def retry_s(self) -> float:
        """Seconds after which to ask again."""

    @property
    def deadlock(self) -> bool:
        """Whether it stays so unless somebody does something."""

    @property
    def stalled(self) -> bool:
        """Whether it may last for ever."""


class Gate(Protocol):
    """Says whether the next chunk may be published; see `lazyshard_producer.holding.holdback.Holdback`."""

    def before_chunk(self, published_chunks: int, published_samples: int) -> Held | None:
        """Returns None if the chunk after the published ones may be published, or why not."""

    def after_publish(self, published_chunks: int) -> None:
        """Takes notice that so many chunks are published, and deletes what may go."""


class Watch(Protocol):
    """Is told what goes on, for the screen, the log and the metrics."""

    def look(self) -> None:
        """Is called now and then."""

    def alarm(self, text: str) -> None:
        """A wait has begun that may never end by itself."""

    def waiting(self, why: Reason | None, text: str) -> None:
        """A wait goes on, and for what, also in words; None: it is over."""

    def published(self, samples: int, size: int, seconds: float) -> None:
        """A chunk is full: its rows, its bytes, and how many seconds the last one took to be published."""

    def taken(self, source: str, rows: int) -> None:
        """Rows of a source went into the stream."""
