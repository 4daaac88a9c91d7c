"""A stream as a band of chunks: what has become of each, as few stretches, and a close-up of where it is read.

    deleted  done  taken  reading  ready  awaited
    |--------|-----|------|========|------|- - -|
                                          ^ published so far

The cost grows with the consumers, never with the chunks: a million chunks are a handful of stretches. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from lazyshard.inspection.census import Census
from lazyshard.inspection.open_window import OpenWindow, open_window
from lazyshard.stream.consumers import Consumer

ChunkState = Literal["deleted", "done", "taken", "reading", "ready", "awaited"]
"""deleted: or being deleted; done: in durable checkpoints of every consumer; taken: every consumer has read on behind
it, but not all have it in a checkpoint; reading: in the open window of a consumer, all of which is published; ready:
published, and some consumer has not come to it, or waits for the rest of its window; awaited: not published, and a
consumer needs it to read on."""

CLOSE_UP: Final = 96
"""Chunks of the close-up: three lines of a laptop's screen, and as many as a phone's holds."""

_BEHIND: Final = 16
"""Chunks of the close-up before those that are read."""

_MAX_WINDOWS: Final = 64
"""Of more consumers, those furthest behind are drawn."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Chunks of the half-open range [first, stop), all in the same state."""

    first: int
    stop: int
    state: ChunkState


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a chunk now.

    Attributes:
        consumer: its name.
        rank: which of its ranks; None where several share the chunk.
    """

    consumer: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A chunk of the close-up."""

    chunk: int
    state: ChunkState
    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """A stream as a band.

    Attributes:
        stop: the band is the chunks of the half-open range [0, stop): those published, and those that are awaited.
        stretches: of all of them, in order; neighbours differ.
        cells: the close-up: `CLOSE_UP` chunks around those that the slowest reader reads, or the newest ones.
        windows: what each consumer reads now, by name, as far as its files tell.
    """

    stop: int
    stretches: tuple[Stretch, ...]
    cells: tuple[Cell, ...]
    windows: dict[str, OpenWindow]


def make_band(census: Census, consumers: Sequence[Consumer], close_up: int = CLOSE_UP) -> Band:
    """Returns a stream as a band.

    Args:
        census: what is published.
        consumers: its consumers.
        close_up: chunks of the close-up at the most.
    """
    windows = {}
    for consumer in sorted(consumers, key=lambda one: (one.chunks_before, one.name))[:_MAX_WINDOWS]:
        window = open_window(consumer, census)
        if window is not None:
            windows[consumer.name] = window
    needs = max((one.reading.needs_chunks for one in consumers if one.reading is not None), default=0)
    stop = census.chunks if census.ended else max(census.chunks, needs)
    stretches = _stretches(census, consumers, windows, stop)
    return Band(stop, stretches, _cells(census, windows, stretches, stop, close_up), windows)


def _stretches(
    census: Census, consumers: Sequence[Consumer], windows: dict[str, OpenWindow], stop: int
) -> tuple[Stretch, ...]:
    done = min((one.chunks_before for one in consumers), default=0)
    taken = min((_come_to(one, windows.get(one.name)) for one in consumers), default=0)
    # One of which chunks are still to come is waited for, on all ranks: none reads in it.
    open_chunks = _joined(window for window in windows.values() if window.stop <= census.chunks)
    cuts = {0, census.retired, done, taken, census.chunks, stop}
    cuts |= {end for one in open_chunks for end in one}
    marks = sorted(cut for cut in cuts if 0 <= cut <= stop)
    found: list[Stretch] = []
    number = 0
    for first, end in pairwise(marks):
        while number < len(open_chunks) and open_chunks[number][1] <= first:
            number += 1
        state: ChunkState
        if first < census.retired:
            state = "deleted"
        elif first >= census.chunks:
            state = "awaited"
        elif number < len(open_chunks) and open_chunks[number][0] <= first:
            state = "reading"
        elif first < done:
            state = "done"
        else:
            state = "taken" if first < taken else "ready"
        if found and found[-1].state == state:
            found[-1] = Stretch(found[-1].first, end, state)
        else:
            found.append(Stretch(first, end, state))
    return tuple(found)


def _come_to(consumer: Consumer, window: OpenWindow | None) -> int:
    """Returns the first chunk that a consumer has not read on behind, as far as is known."""
    return consumer.chunks_before if window is None else max(consumer.chunks_before, window.first)


def _joined(windows: Iterable[OpenWindow]) -> list[tuple[int, int]]:
    """Returns the chunks of any of the windows, as half-open ranges that are sorted and disjoint."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted((window.first, window.stop) for window in windows):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((first, stop))
    return joined


def _cells(
    census: Census, windows: dict[str, OpenWindow], stretches: Sequence[Stretch], stop: int, close_up: int
) -> tuple[Cell, ...]:
    read = min((window.first for window in windows.values()), default=None)
    newest = min(stop, census.chunks + _BEHIND) - close_up
    first = max(0, newest if read is None else min(read - _BEHIND, stop - close_up))
    cells = []
    number = 0
    for chunk in range(first, min(stop, first + close_up)):
        while stretches[number].stop <= chunk:
            number += 1
        readers = tuple(
            Reader(name, window.rank(chunk))
            for name, window in sorted(windows.items())
            if window.first <= chunk < window.stop
        )
        cells.append(Cell(chunk, stretches[number].state, readers))
    return tuple(cells)
