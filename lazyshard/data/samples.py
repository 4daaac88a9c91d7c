"""From lines to samples: parsed, through the steps, encoded, kept for later epochs; another row for one that is bad."""

from __future__ import annotations

import itertools
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.data.rank import Stats
from lazyshard.data.settings import BadRows
from lazyshard.data.steps import RowSteps, failed_step
from lazyshard.errors import (
    BadSample,
    ChunkCorrupt,
    ChunkRetired,
    RowInvalid,
    SkipSample,
)
from lazyshard.format.row import parse_lines
from lazyshard.memory import quick_loads, raise_if_short
from lazyshard.plan.deal import Gaps
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.chunk_files import RowPlace, read_place

_log = logging.getLogger("lazyshard")

MOST_BAD: Final = 16
"""Bad substitutes after which a chunk is given up: with half of its rows bad, all fail once in 65,536 times."""

FILL_ROWS: Final = 10_000
"""Rows dropped in a row, in the search for one that takes a place, after which a filter is taken to keep nothing.

Where one row of a thousand is kept, so many are dropped in a row once in 22,000 times.
"""

_MOST_DROPPED: Final = 1 << 17
"""Rows of which it is known at the most that they are dropped: some 8 MB."""

BUSY: Final = object()
"""Stands for a sample of which nothing is kept yet, and which another process is encoding."""

_COUNTED: Final = Stats._fields[4:]

Samples = Sequence[int] | npt.NDArray[np.int64]
RowsOf = Callable[[list[bytes], Samples | None], list[Any]]
"""Makes rows of checked lines, those of the first of some samples if that is known; nothing if one is bad."""


def parsed_rows(lines: list[bytes], samples: Samples | None) -> list[dict[str, Any]]:
    """Parses lines, as `RowsOf`."""
    return parse_lines(lines)


class BadRowCount:
    """Counts bad samples and decides whether to go on; `skipped` counts those that are dropped.

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


def where_bad(reader: StreamReader, sample: int, cause: Exception) -> BadSample:
    """Returns the error that says which published sample is bad or dropped, where it stands, and why."""
    number, row = divmod(sample, reader.samples_per_chunk)
    chunk, step = reader.chunk(number), None if isinstance(cause, SkipSample) else failed_step(cause)
    byte, line, reason = chunk.offset(row), row + 1, f"{f'{step}: ' if step else ''}{type(cause).__name__}: {cause}"
    if isinstance(cause, RowInvalid) and step is None:
        # It knows of blank lines in foreign files, and where in the row it was.
        byte, line, reason = cause.byte or byte, cause.line or line, cause.reason or reason
    text = f"{chunk.path}: row {row} (line {line}, byte {byte}, sample {sample}): {reason}"
    return BadSample(text, file=str(chunk.path), step=step, sample=sample, chunk=number, row=row, byte=byte)


def substitutes(sample: int, rows: int, samples_per_chunk: int, chunk: int | None = None) -> Iterator[int]:
    """Yields the samples to try instead of one that is bad or dropped: all others of its chunk, or of another one.

    Their order depends on its number alone, so every rank, worker and restart that meets it takes the same substitute.
    """
    own = sample // samples_per_chunk
    first, seen = samples_per_chunk * own, {sample - samples_per_chunk * own}
    if chunk is None:
        for attempt in range(min(MOST_BAD, rows - 1)):
            other = mix64(sample, attempt) % rows
            # On to the next one not tried yet, so that a small chunk is tried whole.
            while other in seen:
                other = (other + 1) % rows
            seen.add(other)
            yield first + other
        start = mix64(sample, MOST_BAD)
    else:
        first, seen, start = chunk * samples_per_chunk, set(), mix64(sample, chunk)
    yield from (first + other for at in range(rows) if (other := (start + at) % rows) not in seen)


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
        # What is not encoded is as quickly read again.
        self._room = self._memory_bytes = memory_bytes if self.encodes else 0
        self._limit = sys.maxsize if limit is None else limit
        self._dropped: set[int] = set()
        self._counts = dict.fromkeys(_COUNTED, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has kept and met."""
        fresh = {"_kept": {}, "_room": self._memory_bytes, "_dropped": set(), "_bad": self._bad.fresh()}
        return self.__dict__ | fresh | {"_counts": dict.fromkeys(_COUNTED, 0)}

    @property
    def stats(self) -> Stats:
        """What this process has met."""
        bad, reader = self._bad, self._reader
        return Stats(len(bad), reader.chunks_opened, reader.waited_s, bad.skipped, *self._counts.values())

    def forget_met(self) -> None:
        """Starts counting anew."""
        self._bad, self._counts = self._bad.fresh(), dict.fromkeys(_COUNTED, 0)

    def of_lines(self, lines: list[bytes], samples: Samples) -> list[Any]:
        """Returns what is made of the checked lines of the first of some samples, or of substitutes.

        Raises as `substitute`.
        """
        rows = None if self.encodes or self.rows_of is None else self.rows_of(lines, samples)
        return rows or [self._of_line(int(sample), line) for sample, line in zip(samples, lines, strict=False)]

    def _of_line(self, sample: int, line: bytes, *, wait: bool = True) -> Any:
        """Returns what is kept of a sample, or made of its line, or what is trained in its place; or `BUSY`."""
        if sample in self._kept:
            return pickle.loads(self._kept[sample])  # noqa: S301 - what this process has pickled
        made, failed = self._made(sample, line, wait=wait)
        if failed is not None:
            return self.substitute(sample, failed)
        if self._room > 0 and made is not BUSY:
            self._remember(sample, made)
        return made

    def _remember(self, sample: int, made: Any) -> None:
        """Keeps a sample in memory if there is room and it can be pickled."""
        try:
            data = pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError):
            # A sample that holds a function or an open file, say: what pickle raises differs from one to the next.
            return
        if len(data) <= self._room and sample not in self._kept:
            self._kept[sample] = data
            self._room -= len(data)

    def _made(self, sample: int, line: bytes, *, wait: bool = True) -> tuple[Any, Exception | None]:
        """Returns what is made of a checked line, or why it cannot be trained."""
        try:
            rows = (self.rows_of and self.rows_of([line], None)) or self._reader.parse([line], sample)
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        try:
            return self._steps(rows[0], sample), None
        except Exception as cause:
            raise_if_short(cause)
            return None, cause

    def _tried(self, sample: int) -> tuple[Any, Exception | None]:
        """Returns what is made of a published sample, or why it cannot be trained."""
        try:
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, line)

    def read(self, sample: int) -> Any:
        """Returns what is made of a published sample, or what is trained in its place."""
        made, failed = self._tried(sample)
        return made if failed is None else self.substitute(sample, failed)

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

    def _search(self, sample: int, cause: Exception) -> Any:
        size = self._reader.samples_per_chunk
        own = sample // size
        dropped, bad, last = int(self._note(sample, cause)), 0, cause
        for chunk, rows in self._chunks(own):
            for other in substitutes(sample, rows, size, None if chunk == own else chunk):
                if dropped >= FILL_ROWS:
                    break
                if other in self.left_out:
                    continue
                if other in self._dropped:
                    dropped += 1
                    continue
                try:
                    made, failed = self._tried(other)
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
            if len(self._dropped) >= _MOST_DROPPED:
                self._dropped = set()
            self._dropped.add(sample)
            return True
        if isinstance(cause, ChunkCorrupt) and cause.row is None:
            raise cause
        self._bad.meet(sample, where_bad(self._reader, sample, cause), cause)
        return False

    def _no_substitute(self, sample: int, cause: Exception) -> BadSample:
        chunk = self._reader.chunk(sample // self._reader.samples_per_chunk)
        text = f"{chunk.path}: no usable substitute for sample {sample}, all rows that were tried are bad too, it by"
        why = f"{type(cause).__name__}: {cause}. Where all fail alike it is the encoder or a step"
        return BadSample(f"{text} {why}", file=str(chunk.path), sample=sample, chunk=chunk.number)

    def _nothing_kept(self, sample: int, dropped: int, last: Exception) -> BadSample:
        text = f"no row takes the place of sample {sample}: {dropped} in a row were dropped, the last because: {last}"
        where = f"{self._reader.directory}: {text}. See whether the filter is right, or filter where rows are produced"
        return BadSample(where, **vars(where_bad(self._reader, sample, last)), count=dropped)


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

    def _parsed(self) -> dict[str, Any]:
        row = self._row
        if row is None:
            row = self._row = _row_of(self._line)
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
        if isinstance(self._line, RowPlace):
            return _row_of, (read_place(self._line),)
        return self.sent()

    def sent(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any]]:
        """As `__reduce__`, for who unpickles it soon and on this machine."""
        return (_row_of, (self._line,)) if self._row is None else (dict, (self._row,))


def _row_of(line: bytes | RowPlace) -> dict[str, Any]:
    row: dict[str, Any] = quick_loads(line if isinstance(line, bytes) else read_place(line))
    return row


ForkingPickler.register(LateRow, LateRow.sent)


def late_rows(reader: StreamReader, lines: list[bytes], samples: Samples | None) -> list[LateRow]:
    """Makes rows of lines that were checked to be as their producer has published them, as `RowsOf`.

    Without their places if it is not known whose they are.
    """
    if samples is None or max(map(len, lines)) <= LARGE_ROW_BYTES:
        return list(map(LateRow, lines))
    made = []
    for line, sample in zip(lines, samples, strict=False):
        number, row = divmod(int(sample), reader.samples_per_chunk)
        place = reader.chunk(number).place(row) if len(line) > LARGE_ROW_BYTES else None
        made.append(LateRow(place or line))
    return made
