"""A producer, readers and a disk in memory, around a real `Holdback`: who moves when is up to the caller."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.stream.consumers import Consumer
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.holdback import Hold, Holdback
from lazyshard_producer.holding.shelf import Shelf, Stock

STREAM: Final = "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59"
SAMPLES_PER_CHUNK: Final = 10


@dataclass(kw_only=True)
class Reader:
    """Trains chunk after chunk, window by window, and commits a checkpoint every so many chunks.

    `keeps` checkpoints stay resumable: its cursor never passes the oldest of them. Without `marks` it leaves none. Of
    one that is not `alive` only the files are left.
    """

    name: str
    window: int
    every: int
    keeps: int = 1
    marks: bool = True
    alive: bool = True
    at: int = 0
    checkpoints: list[int] = field(default_factory=list)
    needs: int | None = None

    @property
    def cursor(self) -> int | None:
        if not self.checkpoints:
            return None
        return self.checkpoints[-self.keeps :][0] // self.window * self.window

    def step(self, published: int, ended: bool) -> bool:
        if not self.alive:
            return False
        needs = (self.at // self.window + 1) * self.window
        moved = self.marks and self.needs != needs
        if self.marks:
            self.needs = needs
        if published < needs and not (ended and self.at < published):
            return moved
        self.at += 1
        if self.at - (self.checkpoints or [0])[-1] == self.every:
            self.checkpoints.append(self.at)
        return True

    def consumer(self) -> Consumer | None:
        if self.cursor is None and self.needs is None:
            return None
        cursor = None if self.cursor is None else Cursor(self.name, STREAM, self.at, self.cursor, {}, 0.0)
        reading = None if self.needs is None else ReadingMark(self.name, STREAM, 1, 0, self.needs, 0.0)
        return Consumer(self.name, cursor, reading, None)


class World:
    """Everything there is. `sizes` are the chunks that the producer is given; with the last one the stream ends."""

    def __init__(
        self,
        limits: Limits,
        readers: Sequence[Reader],
        sizes: Sequence[int],
        *,
        capacity: int = 0,
        first: int = 0,
        published: int = 0,
    ) -> None:
        self.limits = limits
        self.readers = list(readers)
        self.sizes = sizes
        self.capacity = capacity
        self.now = 1000.0
        self.first = first
        self.published = published
        self.ended = False
        self.hold: Hold | None = None
        self.holds: list[Hold] = []
        self.looks = 0
        with self.patched():
            self.holdback = Holdback(
                limits,
                Shelf(Path("/stream")),
                SAMPLES_PER_CHUNK,
                clock=lambda: self.now,
                wall_clock=lambda: 0.0,
            )

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        replaced: dict[str, Any] = {
            "list_consumers": self.list_consumers,
            "retire": self.retire,
            "read_retired": lambda directory: self.first,
            "measure_stock": self.measure_stock,
            "chunk_size": self.chunk_size,
            "free_bytes": lambda directory: self.capacity - self.used,
        }
        with mock.patch.multiple("lazyshard_producer.holding.shelf", **replaced):
            yield

    @property
    def used(self) -> int:
        return sum(self.sizes[self.first : self.published])

    @property
    def finished(self) -> bool:
        return self.ended and all(reader.at == self.published for reader in self.readers)

    def list_consumers(self, directory: Path, published_chunks: int) -> tuple[Consumer, ...]:
        assert published_chunks == self.published
        self.looks += 1
        found = [consumer for reader in self.readers if (consumer := reader.consumer()) is not None]
        return tuple(sorted(found, key=lambda consumer: consumer.name))

    def retire(self, directory: Path, chunks_before: int, published: int, *, check: Callable[[], None]) -> int:
        assert self.limits.retain != "all"
        assert set(self.limits.consumers) <= {reader.name for reader in self.readers if reader.cursor is not None}
        for reader in self.readers:
            if reader.needs is not None or reader.cursor is not None:
                assert chunks_before <= (reader.cursor or 0)
        kept = self.limits.retain if isinstance(self.limits.retain, int) else 1
        assert chunks_before <= published - kept
        assert self.first < chunks_before
        deleted, self.first = chunks_before - self.first, chunks_before
        return deleted

    def measure_stock(self, directory: Path, first: int, stop: int, *, exact: bool) -> Stock:
        assert (first, stop) == (self.first, self.published)
        return Stock(first=first, stop=stop, size=self.used, largest=max(self.sizes[first:stop], default=0))

    def chunk_size(self, directory: Path, chunk: int, arrays: bool) -> int:
        return self.sizes[chunk] if self.first <= chunk < self.published else 0

    def produce(self) -> bool:
        """One try to publish the next chunk, as late after the last one as it asks for."""
        if self.ended:
            return False
        if self.published == len(self.sizes):
            self.ended = True
            return True
        self.now += 0.01 if self.hold is None else self.hold.retry_s
        self.hold = self.holdback.before_chunk(self.published, self.published * SAMPLES_PER_CHUNK)
        if self.hold is not None:
            self.holds.append(self.hold)
            return False
        assert not any(hold.deadlock for hold in self.holds), "it went on after it had been called a deadlock"
        self.published += 1
        self.holdback.after_publish(self.published)
        self.check_limits()
        return True

    def check_limits(self) -> None:
        """By how much the newest chunk is larger than all before it nobody could know."""
        *before, newest = self.sizes[: self.published]
        excess = max(0, newest - max(before, default=0))
        if self.limits.max_disk is not None:
            assert self.used <= self.limits.max_disk + excess
        if self.limits.min_free_disk is not None:
            assert self.capacity - self.used >= self.limits.min_free_disk - excess

    def move(self, who: int) -> bool:
        """Lets the producer (0) or a reader take one step; returns whether it could."""
        if who == 0:
            return self.produce()
        return self.readers[who - 1].step(self.published, self.ended)

    def run(self, turns: Sequence[int]) -> None:
        """Takes steps in this order, and then in turn until nobody can take one any more."""
        with self.patched():
            for turn in turns:
                self.move(turn % (len(self.readers) + 1))
            stuck = 0
            # What the producer knows of the readers may be a moment old: hence a few rounds.
            while stuck < 4:
                moved = [self.move(who) for who in range(len(self.readers) + 1)]
                stuck = 0 if any(moved) else stuck + 1
