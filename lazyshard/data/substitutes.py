"""What happens to samples that are bad or dropped: errors that say where they are, budgets, and substitutes."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from lazyshard.data.settings import BadRows
from lazyshard.data.steps import StepFailed
from lazyshard.errors import (
    BadSample,
    ChunkCorrupt,
    ChunkRetired,
    NothingKept,
    RowInvalid,
    SkipSample,
    TooManyBadSamples,
)
from lazyshard.plan.deal import Gaps
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader

_log = logging.getLogger("lazyshard")


class BadRowCount:
    """Counts bad samples and decides whether to go on; counts those that are dropped, too.

    Args:
        rules: what is done with them.
        instead: what is done in the place of a bad or dropped sample, for the log; None for what data sets do.
    """

    def __init__(self, rules: BadRows, instead: str | None = None) -> None:
        self._rules = rules
        self._instead = instead
        self._seen: set[int] = set()
        self._skipped = 0

    @property
    def skipped(self) -> int:
        """How often a drawn sample was dropped, by a filter or `SkipSample`, in this process."""
        return self._skipped

    def __len__(self) -> int:
        """Different bad samples met by this process."""
        return len(self._seen)

    def fresh(self) -> BadRowCount:
        """Returns one with the same settings that has met none."""
        return BadRowCount(self._rules, self._instead)

    def skip(self, where: Callable[[], BadSample]) -> None:
        """Takes note of a drawn sample that is dropped; speaks of the first, tenth, hundredth and so on."""
        self._skipped += 1
        if str(self._skipped).strip("0") == "1":
            instead = self._instead or "another row is used instead"
            _log.warning("%s; %s (skipped by this process: %d)", where(), instead, self._skipped)

    def meet(self, sample: int, where: BadSample, cause: Exception) -> None:
        """Takes note of a bad sample and returns if a substitute is to be trained instead.

        Raises:
            ChunkCorrupt, RowInvalid: the cause, where bad samples are to be raised and it says by itself where it
                happened.
            BadSample: `where`, where the encoder failed.
            TooManyBadSamples: the limit is passed.
        """
        if self._rules.action == "raise":
            if isinstance(cause, (ChunkCorrupt, RowInvalid)):
                raise cause
            raise where from cause
        known = sample in self._seen
        self._seen.add(sample)
        # A known one too: who goes on after the error must not get what it refused.
        limit = self._rules.limit
        if limit is not None and len(self._seen) > limit:
            raise TooManyBadSamples(
                f"{len(self._seen)} bad samples in this process, their limit is {limit}; the last one: {where}",
                file=where.file,
                step=where.step,
                sample=sample,
                chunk=where.chunk,
                row=where.row,
                byte=where.byte,
                count=len(self._seen),
            ) from cause
        if known:
            return
        most = "" if limit is None else f" of at most {limit}"
        instead = self._instead or "another row of its chunk is used instead"
        _log.warning("%s; %s (bad sample %d%s)", where, instead, len(self), most)


def where_bad(reader: StreamReader, sample: int, cause: Exception) -> BadSample:
    """Returns the error that says which sample is bad or dropped, where it stands, and why.

    Args:
        reader: the stream.
        sample: its number; it is published.
        cause: what reading, encoding or a step has raised.
    """
    number, row = divmod(sample, reader.samples_per_chunk)
    chunk = reader.chunk(number)
    step, raised = (cause.step, cause.__cause__) if isinstance(cause, StepFailed) else (None, cause)
    byte, line, reason = chunk.offset(row), row + 1, f"{type(raised).__name__}: {raised}"
    if step is not None:
        reason = f"{step}: {reason}"
    if isinstance(cause, RowInvalid):
        # It knows of blank lines in foreign files, and where in the row it was.
        byte, line, reason = cause.byte or byte, cause.line or line, cause.reason or reason
    return BadSample(
        f"{chunk.path}: row {row} (line {line}, byte {byte}, sample {sample}): {reason}",
        file=str(chunk.path),
        step=step,
        sample=sample,
        chunk=number,
        row=row,
        byte=byte,
    )


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
    row = sample - first
    seen = {row}
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


class SubstituteSearch:
    """Looks for what is trained in the places of samples, and counts what one process has met on the way.

    Args:
        reader: where substitutes are read.
        bad: decides what happens to samples that cannot be read or encoded.
        limit: the stream is taken to end there at the latest; None for no bound.

    Attributes:
        bad: as given.
        filled: samples drawn in whose places other rows stand.
        left_out: samples that are not to be drawn, among which none is taken.
    """

    def __init__(self, reader: StreamReader, bad: BadRowCount, limit: int | None) -> None:
        self.bad = bad
        self.filled = 0
        self.left_out = Gaps()
        self._reader = reader
        self._limit = limit
        self._dropped = DroppedRows(reader.samples_per_chunk)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has met."""
        return self.__dict__ | {"bad": self.bad.fresh(), "filled": 0, "_dropped": self._dropped.fresh()}

    def forget_met(self) -> None:
        """Starts counting anew."""
        self.bad = self.bad.fresh()
        self.filled = 0

    def find(self, sample: int, cause: Exception, make: Callable[[int], tuple[Any, Exception | None]]) -> Any:
        """Returns what is trained in the place of a sample.

        Raises: as `SampleMaker.substitute`.
        """
        if isinstance(cause, SkipSample):
            self.bad.skip(lambda: where_bad(self._reader, sample, cause))
        made = self._search(sample, cause, make)
        self.filled += 1
        return made

    def _search(self, sample: int, cause: Exception, make: Callable[[int], tuple[Any, Exception | None]]) -> Any:
        size = self._reader.samples_per_chunk
        own = sample // size
        dropped, bad, last = int(self._note(sample, cause)), 0, cause
        for chunk, rows in self._chunks(own):
            others = substitutes(sample, rows, size) if chunk == own else of_another_chunk(sample, chunk, rows, size)
            if self._dropped.holds(chunk, rows):
                dropped += rows - (chunk == own)
                others = iter(())
            for other in others:
                if dropped >= FILL_ROWS:
                    break
                if other in self.left_out:
                    continue
                if other in self._dropped:
                    dropped += 1
                    continue
                try:
                    made, failed = make(other)
                except ChunkRetired as gone:
                    if chunk > own:
                        raise
                    raise self._nothing_kept(sample, dropped, last) from gone
                if failed is None:
                    return made
                if self._note(other, failed):
                    dropped, last = dropped + 1, failed
                    continue
                bad += 1
                if bad == MOST_BAD:
                    raise self._no_substitute(sample, cause) from cause
            # Before the next chunk, which may have to be waited for. Where rows are bad, which is no filter's doing,
            # those of others are not trained in their stead.
            if dropped >= FILL_ROWS or not dropped:
                break
        if dropped:
            raise self._nothing_kept(sample, dropped, last) from last
        raise self._no_substitute(sample, cause) from cause

    def _chunks(self, own: int) -> Iterator[tuple[int, int]]:
        """Yields the chunks to look into and how many rows they have: the sample's own, later ones, earlier ones."""
        reader, size = self._reader, self._reader.samples_per_chunk
        limit = sys.maxsize if self._limit is None else self._limit
        yield own, min(len(reader.chunk(own)), limit - own * size)
        for chunk in itertools.count(own + 1):
            first = chunk * size
            # Not whatever is published by now: it has to be the same one whenever and wherever it is looked for.
            total = 0 if first >= limit else min(limit, reader.wait_for(first + 1).samples)
            if first >= total:
                break
            yield chunk, min(size, total - first)
        yield from ((chunk, size) for chunk in reversed(range(own)))

    def _note(self, sample: int, cause: Exception) -> bool:
        """Returns whether a sample is dropped; if it is bad, only where a substitute is to be tried.

        A chunk that is damaged as a whole has none.
        """
        if isinstance(cause, SkipSample):
            self._dropped.add(sample)
            return True
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        where = where_bad(self._reader, sample, cause)
        raised = cause.__cause__ if isinstance(cause, StepFailed) else cause
        assert isinstance(raised, Exception)
        self.bad.meet(sample, where, raised)
        return False

    def _no_substitute(self, sample: int, cause: Exception) -> BadSample:
        chunk = self._reader.chunk(sample // self._reader.samples_per_chunk)
        raised = cause.__cause__ if isinstance(cause, StepFailed) else cause
        return BadSample(
            f"{chunk.path}: no usable substitute for sample {sample}, all rows that were tried are bad too. It was "
            f"bad by {type(raised).__name__}: {raised}. Where all fail alike it is the encoder or a step, not the rows",
            file=str(chunk.path),
            sample=sample,
            chunk=chunk.number,
        )

    def _nothing_kept(self, sample: int, dropped: int, last: Exception) -> NothingKept:
        where = where_bad(self._reader, sample, last)
        return NothingKept(
            f"{self._reader.directory}: no row takes the place of sample {sample}: {dropped} in a row were dropped, "
            f"the last one because: {last}. See whether the filter is right; what keeps nothing for long stretches "
            f"belongs to where the stream is produced",
            file=where.file,
            sample=sample,
            chunk=where.chunk,
            row=where.row,
            byte=where.byte,
            count=dropped,
        )


_ROWS: Final = 1 << 20
"""Rows of which it is known at the most, a byte each."""


class DroppedRows:
    """Samples that are dropped, of the chunks that were looked into last. Each process has its own, for all threads."""

    def __init__(self, samples_per_chunk: int) -> None:
        self._size = samples_per_chunk
        self._most = max(1, _ROWS // samples_per_chunk)
        self._chunks: dict[int, bytearray] = {}

    def fresh(self) -> DroppedRows:
        """Returns one that knows of none."""
        return DroppedRows(self._size)

    def add(self, sample: int) -> None:
        """Takes note of a dropped sample."""
        chunk, row = divmod(sample, self._size)
        self._chunks.setdefault(chunk, bytearray(self._size))[row] = 1
        if len(self._chunks) > self._most:
            for old in list(self._chunks)[: -self._most]:
                self._chunks.pop(old, None)

    def __contains__(self, sample: int) -> bool:
        """Returns whether a sample is known to be dropped."""
        chunk, row = divmod(sample, self._size)
        rows = self._chunks.get(chunk)
        return rows is not None and rows[row] == 1

    def holds(self, chunk: int, rows: int) -> bool:
        """Returns whether all of so many rows of a chunk are known to be dropped."""
        known = self._chunks.get(chunk)
        return known is not None and known.count(1, 0, rows) == rows
