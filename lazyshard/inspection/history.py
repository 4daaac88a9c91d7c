"""How a stream came to be: when it was published, how long its rows are, which rows were refused.

Told by the seals of at most some hundred evenly spaced chunks, by the cursors, and by `quarantine.jsonl`: no row is
read. Who looks again passes what was found before, of which only what has changed is read anew. Times are seconds
since 1970 by the clocks of those who wrote them.

Refused rows are counted by reason, of a file that other processes append to (docs/format.md). `MOST_TOLD_APART`
reasons, and as many sources of each, are told apart, and unless all is asked for `_MOST_BYTES` of its beginning are
read. A last line that is not complete yet is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from lazyshard.format.names import QUARANTINE
from lazyshard.inspection.inspection import ChunkPoint, Overview, overview
from lazyshard.inspection.survey import tolerate
from lazyshard.memory import loads
from lazyshard.store.files import open_file, read_file, size_of
from lazyshard.store.urls import UrlPath
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.manifest import read_manifest
from lazyshard.stream.stream import open_now

MOST_TRAINED: Final = 20  # Consumers that are told of: those furthest behind
OTHERS: Final = "other reasons"
_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 16 << 20  # A longer line is none that is looked into
MOST_TOLD_APART: Final = 200
_NUMBER: Final = re.compile(r"\d+")
_SHOWN_OF_ROW: Final = 160


class At(NamedTuple):
    """An amount at a time."""

    time: float
    amount: float


class Trained(NamedTuple):
    """A consumer's last checkpoint: its name, when it was saved, and the samples in it."""

    name: str
    time: float
    samples: int


@dataclass(frozen=True, slots=True)
class History:
    """How a stream came to be."""

    found: Overview | None  # what the seals tell; None without `stream.json`, where rows would have to be read
    course: tuple[At, ...] = ()  # how many rows were published when
    trained: tuple[Trained, ...] = ()  # of the consumers that are furthest behind, at most `MOST_TRAINED`
    refusals: RefusedRows | None = None  # None where there is no file of them
    refusals_size: int | None = None  # bytes of that file


def take_history(directory: Path, before: History | None = None) -> History:
    """Looks at how a stream came to be; `before` is what was found last. Raises as `overview` and `read_refusals`."""
    size = None
    with contextlib.suppress(FileNotFoundError):
        size = size_of(directory / QUARANTINE)
    same = before is not None and size == before.refusals_size
    refusals = before.refusals if before is not None and same else read_refusals(directory)
    if read_manifest(directory, None) is None:
        return History(None, refusals=refusals, refusals_size=size)
    stream = open_now(directory)
    published, found = stream.published(), None if before is None else before.found
    state = (published.chunks, published.ended, stream.retired())
    if found is None or state != (found.published.chunks, found.published.ended, found.retired):
        found = overview(directory, rows=False)
    cursors = [one.cursor for one in tolerate(lambda: list_consumers(directory, published.chunks), []) or ()]
    trained = [Trained(one.consumer, one.updated_at, one.consumed) for one in cursors if one is not None]
    trained.sort(key=lambda one: (one.samples, one.name))
    course = published_rows(found.points, found.samples_per_chunk)
    return History(found, tuple(course), tuple(trained[:MOST_TRAINED]), refusals, size)


def published_rows(points: Sequence[ChunkPoint], samples_per_chunk: int) -> list[At]:
    """Returns how many rows were published when, from chunks that were looked at; times that go back are evened out.

    >>> published_rows([ChunkPoint(0, 10, 99, 5.0), ChunkPoint(3, 4, 40, 9.0)], 10)
    [At(time=5.0, amount=10), At(time=9.0, amount=34)]
    """
    times = np.maximum.accumulate([point.sealed_at for point in points]).tolist()
    return [At(time, one.chunk * samples_per_chunk + one.rows) for time, one in zip(times, points, strict=True)]


def rates(course: Sequence[At], most: int) -> list[At]:
    """Returns the mean rate per second in at most so many equal stretches of time, each at the end of its stretch.

    >>> rates([At(0.0, 0), At(10.0, 100), At(20.0, 100)], 2)
    [At(time=10.0, amount=10.0), At(time=20.0, amount=0.0)]
    """
    if len(course) < 2 or course[-1].time <= course[0].time:
        return []
    edges = np.linspace(course[0].time, course[-1].time, min(most, len(course) - 1) + 1)
    amounts = np.interp(edges, [one.time for one in course], [one.amount for one in course])
    found = np.diff(amounts) / np.diff(edges)
    return [At(float(edge), float(rate)) for edge, rate in zip(edges[1:], found, strict=True)]


class RefusedRow(NamedTuple):
    """A refused row: its source, its line there from 1, why, and its beginning (None where it is no text)."""

    source: str
    line: int
    reason: str
    row: str | None


@dataclass(slots=True)
class RefusedFor:
    """Rows refused for reasons that differ by nothing but their numbers, in as many sources as were told apart."""

    reason: str  # that of the first
    first: RefusedRow
    rows: int = 0
    names: set[str] = field(default_factory=set)

    @property
    def sources(self) -> int:
        """In how many sources."""
        return len(self.names)


class RefusedRows(NamedTuple):
    """What is in the file: refused rows that were read, the most frequent reasons first, and lines that are none."""

    rows: int
    reasons: tuple[RefusedFor, ...]
    unreadable: int
    complete: bool  # all of the file was read


def read_refusals(directory: Path, *, whole: bool = False) -> RefusedRows | None:
    """Counts the rows that were refused, of all of the file if `whole`, however large it is; None without such a file.

    Raises:
        FileRefused: it is no plain file, or an object of more than 64 MiB.
        LazyShardError, OSError: it cannot be read.
    """
    path = directory / QUARANTINE
    try:
        if isinstance(path, UrlPath):
            return count_refusals(iter(read_file(path, _MOST_BYTES).splitlines(keepends=True)), complete=True)
        opened = open_file(path)
    except FileNotFoundError:
        return None
    limits = (sys.maxsize, sys.maxsize) if whole else (_MOST_BYTES, _MOST_LINE)
    return count_refusals(_lines(opened.fd, *limits), complete=whole or opened.size <= _MOST_BYTES)


def count_refusals(lines: Iterator[bytes], *, complete: bool) -> RefusedRows:
    """Counts the rows of the file's lines, which hold their ends; `complete` where they are all of it."""
    groups: dict[str, RefusedFor] = {}
    rows = unreadable = 0
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        one = _decode(line)
        if one is None:
            unreadable += 1
            continue
        rows += 1
        # A reason may hold a place or a value of the row.
        key = _NUMBER.sub("0", one.reason)
        if key not in groups and len(groups) >= MOST_TOLD_APART:
            key = OTHERS
        group = groups.get(key) or groups.setdefault(key, RefusedFor(OTHERS if key == OTHERS else one.reason, one))
        group.rows += 1
        if len(group.names) < MOST_TOLD_APART:
            group.names.add(one.source)
    ordered = sorted(groups.values(), key=lambda group: (group.reason == OTHERS, -group.rows, group.reason))
    return RefusedRows(rows, tuple(ordered), unreadable, complete)


def _lines(fd: int, most_bytes: int, most_line: int) -> Iterator[bytes]:
    read = 0
    with os.fdopen(os.dup(fd), "rb") as file:
        while read < most_bytes and (line := file.readline(most_line)):
            read += len(line)
            yield line


def _decode(line: bytes) -> RefusedRow | None:
    try:
        entry: Any = loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    source, number, reason, row = (entry.get(name) for name in ("source", "line", "reason", "row"))
    if not isinstance(source, str) or not isinstance(reason, str) or type(number) is not int:
        return None
    return RefusedRow(source, number, reason, row[:_SHOWN_OF_ROW] if isinstance(row, str) else None)
