"""From lines to samples: parsed, through the steps, encoded, kept for later epochs, substituted; or parsed late."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.data.shared import Stats
from lazyshard.data.steps import RowSteps
from lazyshard.data.substitutes import (
    FILL_ROWS,
    MOST_BAD,
    BadRowCount,
    DroppedRows,
    of_another_chunk,
    raised_by,
    substitutes,
    where_bad,
)
from lazyshard.errors import BadSample, ChunkCorrupt, ChunkRetired, RowInvalid, SkipSample
from lazyshard.format.row import parse_lines
from lazyshard.memory import quick_loads, raise_if_short
from lazyshard.plan.deal import Gaps
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.chunk_files import RowPlace, read_place

Samples = Sequence[int] | npt.NDArray[np.int64]

RowsOf = Callable[[list[bytes], Samples | None], list[Any]]
"""Makes rows of checked lines, those of the first of some samples if that is known; nothing if one is bad."""


def parsed_rows(lines: list[bytes], samples: Samples | None) -> list[dict[str, Any]]:
    """Parses lines, as `RowsOf`."""
    return parse_lines(lines)


_COUNTED: Final = Stats._fields[4:]


class SampleMaker:
    """Makes samples of lines, and counts what one process has met on the way.

    Attributes:
        encodes: whether samples are made of rows; otherwise rows are samples.
        rows_of: makes rows of lines; None where they are parsed one by one, since they hold arrays.
        left_out: samples that are not to be drawn, among which no substitute is taken.
    """

    def __init__(
        self, reader: StreamReader, steps: RowSteps, bad: BadRowCount, memory_bytes: int, limit: int | None
    ) -> None:
        self.encodes = bool(steps)
        self.rows_of: RowsOf | None = None if reader.arrays else parsed_rows
        self.left_out = Gaps()
        self._reader = reader
        self._steps = steps
        self._bad = bad
        # Pickled samples by number, so that what a caller does to one cannot change it. Epochs go round and round, so
        # the first to come stay: to evict the least recently used would evict each just before its turn.
        self._kept: dict[int, bytes] = {}
        self._room = self._memory_bytes = memory_bytes
        self._limit = sys.maxsize if limit is None else limit
        self._dropped = DroppedRows(reader.samples_per_chunk)
        self._counts = dict.fromkeys(_COUNTED, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has kept and met."""
        fresh = {"_kept": {}, "_room": self._memory_bytes, "_bad": self._bad.fresh()}
        counts, dropped = dict.fromkeys(_COUNTED, 0), DroppedRows(self._reader.samples_per_chunk)
        return self.__dict__ | fresh | {"_counts": counts, "_dropped": dropped}

    @property
    def stats(self) -> Stats:
        """What this process has met."""
        bad, reader = self._bad, self._reader
        return Stats(len(bad), reader.chunks_opened, reader.waited_s, bad.skipped, *self._counts.values())

    def forget_met(self) -> None:
        """Starts counting anew."""
        self._bad = self._bad.fresh()
        self._counts = dict.fromkeys(_COUNTED, 0)

    def of_lines(self, lines: list[bytes], samples: Samples) -> list[Any]:
        """Returns what is made of the checked lines of the first of some samples, or of substitutes.

        At least one: where a row is bad, those before it. Raises as `substitute`.
        """
        try:
            rows = (self.rows_of and self.rows_of(lines, samples)) or self._parse(lines, samples)
        except (ChunkCorrupt, RowInvalid) as cause:
            return [self.substitute(int(samples[0]), cause)]
        if not self.encodes:
            return rows
        return [self._of_row(int(sample), row) for sample, row in zip(samples, rows, strict=False)]

    def _parse(self, lines: list[bytes], samples: Samples) -> list[dict[str, Any]]:
        """Parses lines one by one up to the first that is bad, by itself or its arrays; raises if that is the first."""
        rows: list[dict[str, Any]] = []
        for line, sample in zip(lines, samples, strict=False):
            try:
                rows += self._reader.parse([line], int(sample))
            except (ChunkCorrupt, RowInvalid):
                if not rows:
                    raise
                break
        return rows

    def _of_row(self, sample: int, row: dict[str, Any]) -> Any:
        if sample in self._kept:
            return self._recalled(sample)
        try:
            made = self._steps(row, sample)
        except Exception as cause:
            raise_if_short(cause)
            return self.substitute(sample, cause)
        self._remember(sample, made)
        return made

    def _recalled(self, sample: int) -> Any:
        return pickle.loads(self._kept[sample])  # noqa: S301 - what this process has pickled

    def _remember(self, sample: int, made: Any) -> None:
        """Keeps a sample in memory if there is room and it can be pickled."""
        if self._room <= 0 or sample in self._kept:
            return
        try:
            data = pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError):
            # A sample that holds a function or an open file, say: what pickle raises differs from one to the next.
            return
        if len(data) <= self._room:
            self._kept[sample] = data
            self._room -= len(data)

    def _encoded(self, sample: int, row: dict[str, Any]) -> tuple[Any, Exception | None]:
        """Returns what is made of a row, or why it cannot be trained."""
        try:
            return self._steps(row, sample), None
        except Exception as cause:
            raise_if_short(cause)
            return None, cause

    def _made(self, sample: int, line: bytes, *, wait: bool) -> tuple[Any, Exception | None]:
        """Returns what is made of a checked line, or why it cannot be trained."""
        try:
            row = self._reader.parse([line], sample)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._encoded(sample, row)

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns what is trained in the place of a sample: another one of its chunk.

        Where no row of its chunk can be, and some are dropped, one of the chunks behind it, which are waited for if
        need be; at the end of the stream, of those before it. Raises what `bad_rows` says, BadSample, WaitTimeout.
        """
        if isinstance(cause, SkipSample):
            self._bad.skip(lambda: where_bad(self._reader, sample, cause))
        made = self._search(sample, cause)
        self._counts["filled"] += 1
        return made

    def _try(self, sample: int) -> tuple[Any, Exception | None]:
        try:
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, line, wait=True)

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
                if other in self.left_out:
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
        reader, size, limit = self._reader, self._reader.samples_per_chunk, self._limit
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
        """Returns whether a sample is dropped; raises for a bad one, unless a substitute is to be tried."""
        if isinstance(cause, SkipSample):
            self._dropped.add(sample)
            return True
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        self._bad.meet(sample, where_bad(self._reader, sample, cause), raised_by(cause))
        return False

    def _no_substitute(self, sample: int, cause: Exception) -> BadSample:
        chunk, raised = self._reader.chunk(sample // self._reader.samples_per_chunk), raised_by(cause)
        text = (
            f"{chunk.path}: no usable substitute for sample {sample}, all rows that were tried are bad too. It was "
            f"bad by {type(raised).__name__}: {raised}. Where all fail alike it is the encoder or a step, not the rows"
        )
        return BadSample(text, file=str(chunk.path), sample=sample, chunk=chunk.number)

    def _nothing_kept(self, sample: int, dropped: int, last: Exception) -> BadSample:
        text = (
            f"{self._reader.directory}: no row takes the place of sample {sample}: {dropped} in a row were dropped, "
            f"the last one because: {last}. See whether the filter is right; what keeps nothing for long stretches "
            f"belongs to where the stream is produced"
        )
        return BadSample(text, **vars(where_bad(self._reader, sample, last)), count=dropped)


_loads = quick_loads


class LateRow(Mapping[str, Any]):
    """A row as it lies on disk, parsed at the first look at it: a read-only mapping.

    Pickled it becomes a plain dict: of what it was made of, as long as nobody has looked at it, and else of the row as
    it is by then. With this class as `encode_fn` DataLoader workers hand out rows that the main process parses
    (docs/performance.md). Not for filesystems without a page cache, nor for streams whose rows hold arrays: of a row
    above 64 KiB only the place crosses, and who looks at it, or receives it, reads it again, with its digest.

    Args:
        line: a JSON object that is known to be one, as UTF-8, whitespace around it is allowed; or where it lies.

    Raises:
        TypeError: the line is not of bytes; torch's `default_collate` then makes a dict of the batch.
    """

    __slots__ = ("_line", "_row")

    def __init__(self, line: bytes | RowPlace) -> None:
        if not isinstance(line, (bytes, RowPlace)):
            raise TypeError(f"a line is bytes or a place, got {type(line).__name__}")
        self._line = line
        self._row: dict[str, Any] | None = None

    def _read(self) -> bytes:
        return self._line if isinstance(self._line, bytes) else read_place(self._line)

    def _parsed(self) -> dict[str, Any]:
        row = self._row
        if row is None:
            row = self._row = _loads(self._read())
            self._line = b""
        return row

    def __getitem__(self, key: str) -> Any:
        return self._parsed()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._parsed()!r})"

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any]]:
        row = self._row
        return (_loads, (self._read(),)) if row is None else (dict, (row,))

    def sent(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any]]:
        """As `__reduce__`, for who unpickles it soon and on this machine."""
        return (_row_at, (self._line,)) if isinstance(self._line, RowPlace) else self.__reduce__()


def _row_at(place: RowPlace) -> dict[str, Any]:
    row: dict[str, Any] = _loads(read_place(place))
    return row


ForkingPickler.register(LateRow, LateRow.sent)


class LateRows:
    """Makes rows of lines that were checked to be as their producer has published them, as `RowsOf`."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __call__(self, lines: list[bytes], samples: Samples | None) -> list[LateRow]:
        """Returns the rows, without their places if it is not known whose they are."""
        if samples is None or max(map(len, lines)) <= LARGE_ROW_BYTES:
            return list(map(LateRow, lines))
        return [LateRow(self._held(line, int(sample))) for line, sample in zip(lines, samples, strict=False)]

    def _held(self, line: bytes, sample: int) -> bytes | RowPlace:
        if len(line) <= LARGE_ROW_BYTES:
            return line
        number, row = divmod(sample, self._reader.samples_per_chunk)
        return self._reader.chunk(number).place(row) or line
