"""From a row to a sample: through the steps, encoded, kept for later epochs; or another row in its place."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from lazyshard.data.bad_samples import MOST_BAD, BadSamples, of_another_chunk, substitutes
from lazyshard.data.cache import SampleCache
from lazyshard.data.dropped_rows import DroppedRows
from lazyshard.data.encode_cache import BUSY, MISSING, CacheCounts, EncodeCache
from lazyshard.data.steps import RowSteps, StepFailed
from lazyshard.errors import BadSample, ChunkCorrupt, ChunkRetired, NothingKept, RowInvalid, SkipSample
from lazyshard.plan import Gaps
from lazyshard.storage import StreamReader

__all__ = ["FILL_ROWS", "Met", "SampleMaker", "where_bad"]

FILL_ROWS: Final = 10_000
"""Rows dropped in a row, in the search for one that takes a place, after which a filter is taken to keep nothing.

Where one row of a thousand is kept, so many are dropped in a row once in 22,000 times.
"""


class Met(NamedTuple):
    """What a process has met.

    Attributes:
        bad: different bad samples.
        dropped: samples drawn whose rows were dropped.
        filled: samples drawn in whose places other rows stand.
        cache: rows encoded and not, where a cache keeps what is made of them.
    """

    bad: int
    dropped: int
    filled: int
    cache: CacheCounts = CacheCounts()


class SampleMaker:
    """Makes samples of rows.

    Args:
        reader: where substitutes are read.
        steps: what is done with a row; none leave rows as they are.
        bad: decides what happens to samples that cannot be read or encoded.
        cache: keeps encoded samples.
        limit: the stream is taken to end there at the latest; None for no bound.
        shared: keeps them for all processes of the node; None if nothing does.
    """

    def __init__(
        self,
        reader: StreamReader,
        steps: RowSteps,
        bad: BadSamples,
        cache: SampleCache,
        limit: int | None,
        shared: EncodeCache | None = None,
    ) -> None:
        self._reader = reader
        self._steps = steps
        self._bad = bad
        self._cache = cache
        self._limit = limit
        self._shared = shared
        self._left_out = Gaps()
        self._dropped = DroppedRows(reader.samples_per_chunk)
        self._filled = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has met and kept."""
        fresh = {"_bad": self._bad.fresh(), "_cache": self._cache.fresh(), "_dropped": self._dropped.fresh()}
        return self.__dict__ | fresh | {"_filled": 0}

    @property
    def encodes(self) -> bool:
        """Whether samples are made of rows; otherwise rows are samples."""
        return bool(self._steps)

    @property
    def takes_lines(self) -> bool:
        """Whether samples are made `of_lines`, which need not be parsed where what was made of them is kept."""
        return self._shared is not None

    @property
    def met(self) -> Met:
        """What this process has met."""
        counts = CacheCounts() if self._shared is None else self._shared.counts
        return Met(len(self._bad), self._bad.skipped, self._filled, counts)

    def forget_met(self) -> None:
        """Starts counting anew."""
        self._bad = self._bad.fresh()
        self._filled = 0
        if self._shared is not None:
            self._shared.forget_counts()

    def leave_out(self, samples: Gaps) -> None:
        """Takes no substitute from among samples that are not to be drawn."""
        self._left_out = samples

    def make(self, sample: int, row: dict[str, Any]) -> Any:
        """Makes a sample of a row unless that was done before; returns a substitute's if it fails or is dropped."""
        kept = self._cache.get(sample)
        if kept is not None:
            return kept
        try:
            encoded = self._steps(row, sample)
        except MemoryError:
            raise
        except Exception as cause:
            return self.substitute(sample, cause)
        self._cache.put(sample, encoded)
        return encoded

    def of_lines(self, lines: list[bytes], samples: Iterable[int]) -> list[Any]:
        """Makes samples of checked lines, or takes what the shared cache has kept; substitutes as `make` does.

        Rows that another process is encoding are left for the end: peers that draw the same batch share the work.

        Raises: as `substitute`.
        """
        numbers = [int(sample) for _, sample in zip(lines, samples, strict=False)]
        made = [self._of_line(sample, line, wait=False) for sample, line in zip(numbers, lines, strict=True)]
        for at, one in enumerate(made):
            if one is BUSY:
                made[at] = self._of_line(numbers[at], lines[at], wait=True)
        return made

    def _of_line(self, sample: int, line: bytes, *, wait: bool) -> Any:
        kept = self._cache.get(sample)
        if kept is not None:
            return kept
        made, failed = self._through_cache(sample, line, wait=wait)
        if failed is not None:
            return self.substitute(sample, failed)
        if made is not BUSY:
            self._cache.put(sample, made)
        return made

    def _through_cache(self, sample: int, line: bytes, *, wait: bool) -> tuple[Any, Exception | None]:
        """Returns what is kept of a sample or made of its line, or why it cannot be trained; `BUSY` as `begin`."""
        shared = self._shared
        assert shared is not None
        try:
            found = shared.begin(sample, line, wait=wait)
        except SkipSample as cause:
            return None, cause
        if found is not MISSING:
            return found, None
        try:
            made, failed = self._made_of(sample, line)
            if failed is None:
                shared.keep(sample, line, made)
            elif isinstance(failed, SkipSample):
                shared.drop(sample, line, failed)
        finally:
            shared.end(sample)
        return made, failed

    def _made_of(self, sample: int, line: bytes) -> tuple[Any, Exception | None]:
        """Returns what is made of a checked line, or why it cannot be trained."""
        try:
            row = self._reader.parse([line], sample)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, row)

    def _made(self, sample: int, row: dict[str, Any]) -> tuple[Any, Exception | None]:
        """Returns what is made of a row, or why it cannot be trained."""
        try:
            return self._steps(row, sample), None
        except MemoryError:
            raise
        except Exception as cause:
            return None, cause

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns what is trained in the place of a sample: another one of its chunk.

        Where no row of its chunk can be, and some are dropped, one of the chunks behind it, which are waited for if
        need be; at the end of the stream, of those before it.

        Raises:
            ChunkCorrupt, RowInvalid, BadSample, TooManyBadSamples: what `on_bad_sample` says; or the rows that were
                looked at are bad too.
            NothingKept: so many rows in a row were dropped.
            WaitTimeout: a later chunk was not published in time.
        """
        if isinstance(cause, SkipSample):
            self._bad.skip(lambda: self._where(sample, cause))
        made = self._search(sample, cause)
        self._filled += 1
        return made

    def _search(self, sample: int, cause: Exception) -> Any:
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
                if other in self._left_out:
                    continue
                if other in self._dropped:
                    dropped += 1
                    continue
                try:
                    made, failed = self._try(other)
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

    def _try(self, sample: int) -> tuple[Any, Exception | None]:
        """Returns what is made of a sample, or why it cannot be trained."""
        try:
            if self._shared is None:
                return self._made(sample, self._reader.read_published(sample, sample + 1)[0])
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._through_cache(sample, line, wait=True)

    def _note(self, sample: int, cause: Exception) -> bool:
        """Returns whether a sample is dropped; if it is bad, only where a substitute is to be tried.

        A chunk that is damaged as a whole has none.
        """
        if isinstance(cause, SkipSample):
            self._dropped.add(sample)
            return True
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        where = self._where(sample, cause)
        raised = cause.__cause__ if isinstance(cause, StepFailed) else cause
        assert isinstance(raised, Exception)
        self._bad.meet(sample, where, raised)
        return False

    def _no_substitute(self, sample: int, cause: Exception) -> BadSample:
        chunk = self._reader.chunk(sample // self._reader.samples_per_chunk)
        raised = cause.__cause__ if isinstance(cause, StepFailed) else cause
        return BadSample(
            f"{chunk.path}: no usable substitute for sample {sample}, all rows that were tried are bad too. It was "
            f"bad by {type(raised).__name__}: {raised}",
            file=str(chunk.path),
            sample=sample,
            chunk=chunk.number,
        )

    def _nothing_kept(self, sample: int, dropped: int, last: Exception) -> NothingKept:
        where = self._where(sample, last)
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

    def _where(self, sample: int, cause: Exception) -> BadSample:
        return where_bad(self._reader, sample, cause)


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
