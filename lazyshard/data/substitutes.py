"""What happens to bad and dropped samples: errors that say where they are, budgets, and what is tried instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from lazyshard.data.settings import BadRows
from lazyshard.data.steps import StepFailed
from lazyshard.errors import BadSample, ChunkCorrupt, RowInvalid
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader

_log = logging.getLogger("lazyshard")


class BadRowCount:
    """Counts bad samples and decides whether to go on; counts those that are dropped, too: `skipped`.

    `instead` is what is done in the place of one, for the log, if that is not what data sets do.
    """

    def __init__(self, rules: BadRows, instead: str | None = None) -> None:
        self.skipped = 0
        self._rules = rules
        self._instead = instead
        self._seen: set[int] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def fresh(self) -> BadRowCount:
        """Returns one with the same settings that has met none."""
        return BadRowCount(self._rules, self._instead)

    def skip(self, where: Callable[[], BadSample]) -> None:
        """Takes note of a drawn sample that is dropped; speaks of the first, tenth, hundredth and so on."""
        self.skipped += 1
        if str(self.skipped).strip("0") == "1":
            instead = self._instead or "another row is used instead"
            _log.warning("%s; %s (skipped by this process: %d)", where(), instead, self.skipped)

    def meet(self, sample: int, where: BadSample, cause: Exception) -> None:
        """Takes note of a bad sample and returns if a substitute is to be trained instead.

        Otherwise raises BadSample, or `where`, unless the cause says by itself where it happened.
        """
        if self._rules.action == "raise":
            if isinstance(cause, (ChunkCorrupt, RowInvalid)):
                raise cause
            raise where from cause
        known = sample in self._seen
        self._seen.add(sample)
        # A known one too: who goes on after the error must not get what it refused.
        limit, count = self._rules.limit, len(self._seen)
        if limit is not None and count > limit:
            text = f"{count} bad samples in this process, their limit is {limit}; the last one: {where}"
            raise BadSample(text, **vars(where), count=count) from cause
        if not known:
            most = "" if limit is None else f" of at most {limit}"
            instead = self._instead or "another row of its chunk is used instead"
            _log.warning("%s; %s (bad sample %d%s)", where, instead, count, most)


def raised_by(cause: Exception) -> Exception:
    """Returns what a step has raised that failed; any other error is that itself."""
    return cause.__cause__ if isinstance(cause, StepFailed) and isinstance(cause.__cause__, Exception) else cause


def where_bad(reader: StreamReader, sample: int, cause: Exception) -> BadSample:
    """Returns the error that says which published sample is bad or dropped, where it stands, and why."""
    number, row = divmod(sample, reader.samples_per_chunk)
    chunk = reader.chunk(number)
    step, raised = cause.step if isinstance(cause, StepFailed) else None, raised_by(cause)
    byte, line, reason = chunk.offset(row), row + 1, f"{type(raised).__name__}: {raised}"
    if step is not None:
        reason = f"{step}: {reason}"
    if isinstance(cause, RowInvalid):
        # It knows of blank lines in foreign files, and where in the row it was.
        byte, line, reason = cause.byte or byte, cause.line or line, cause.reason or reason
    text = f"{chunk.path}: row {row} (line {line}, byte {byte}, sample {sample}): {reason}"
    return BadSample(text, file=str(chunk.path), step=step, sample=sample, chunk=number, row=row, byte=byte)


MOST_BAD: Final = 16
"""Bad substitutes after which a chunk is given up: with half of its rows bad, all fail once in 65,536 times."""

FILL_ROWS: Final = 10_000
"""Rows dropped in a row, in the search for one that takes a place, after which a filter is taken to keep nothing.

Where one row of a thousand is kept, so many are dropped in a row once in 22,000 times.
"""


def substitutes(sample: int, rows: int, samples_per_chunk: int) -> Iterator[int]:
    """Yields the samples to try instead of one that is bad or dropped: all others of its chunk.

    Their order depends on its number alone, so every rank, worker and restart that meets it takes the same substitute.
    """
    first = sample - sample % samples_per_chunk
    seen = {sample - first}
    for attempt in range(min(MOST_BAD, rows - 1)):
        other = mix64(sample, attempt) % rows
        # On to the next one not tried yet, so that a small chunk is tried whole.
        while other in seen:
            other = (other + 1) % rows
        seen.add(other)
        yield first + other
    yield from (first + other for other in _around(mix64(sample, MOST_BAD), rows) if other not in seen)


def of_another_chunk(sample: int, chunk: int, rows: int, samples_per_chunk: int) -> Iterator[int]:
    """Yields the samples of another chunk to try instead of one of whose own chunk every row is dropped."""
    yield from (chunk * samples_per_chunk + row for row in _around(mix64(sample, chunk), rows))


def _around(start: int, rows: int) -> Iterator[int]:
    yield from ((start + row) % rows for row in range(rows))


_ROWS: Final = 1 << 20
"""Rows of which it is known at the most, a byte each."""


class DroppedRows:
    """Samples that are dropped, of the chunks that were looked into last. Each process has its own, for all threads."""

    def __init__(self, samples_per_chunk: int) -> None:
        self._size = samples_per_chunk
        self._most = max(1, _ROWS // samples_per_chunk)
        self._chunks: dict[int, bytearray] = {}

    def add(self, sample: int) -> None:
        """Takes note of a dropped sample."""
        chunk, row = divmod(sample, self._size)
        self._chunks.setdefault(chunk, bytearray(self._size))[row] = 1
        if len(self._chunks) > self._most:
            for old in list(self._chunks)[: -self._most]:
                self._chunks.pop(old, None)

    def __contains__(self, sample: int) -> bool:
        chunk, row = divmod(sample, self._size)
        rows = self._chunks.get(chunk)
        return rows is not None and rows[row] == 1

    def holds(self, chunk: int, rows: int) -> bool:
        """Returns whether all of so many rows of a chunk are known to be dropped."""
        known = self._chunks.get(chunk)
        return known is not None and known.count(1, 0, rows) == rows
