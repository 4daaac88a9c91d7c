"""Makes samples from lines: parses, applies steps, encodes, keeps, and substitutes other rows for bad ones."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from lazyshard.data.rank import Stats, log
from lazyshard.data.settings import BadRows, RowSteps
from lazyshard.errors import BadSample, ChunkCorrupt, ChunkMissing, ChunkRetired, RowInvalid, SkipSample
from lazyshard.format.arrays import BFLOAT16, fill_row
from lazyshard.format.row import parse_lines
from lazyshard.memory import quick_loads, raise_if_short
from lazyshard.part import Array, Int64Array
from lazyshard.plan.deal import Gaps
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES, RowPlace, read_place

# Bad substitutes after which a chunk is given up: with half of its rows bad, all fail with probability 1 in 65,536.
MOST_BAD: Final = 16
# Consecutively dropped rows, in the search for a substitute, after which the filter is taken to keep nothing. If it
# keeps one row in a thousand, that many are dropped in a row with probability 1 in 22,000.
FILL_ROWS: Final = 10_000
_MOST_DROPPED: Final = 1 << 17  # Maximum number of rows remembered as dropped: some 8 MB
_SHORT: Final = 8  # Up to this many numbers, a list is smaller and faster to read as a list
BUSY: Final = object()  # Marks a sample that is not cached yet and that another process is encoding

Samples: TypeAlias = "Sequence[int] | Int64Array"
RowsOf: TypeAlias = "Callable[[list[bytes], Samples | None], list[Any]]"
"""Makes rows from checked lines, those of the first of some samples if these are known; empty if a line is bad."""


def parsed_rows(lines: list[bytes], samples: Samples | None) -> list[dict[str, Any]]:
    """Parses lines; a `RowsOf`."""
    return parse_lines(lines)


class BadRowCount:
    """Counts bad samples, and dropped ones in `skipped`. `instead` is logged as the consequence."""

    def __init__(self, rules: BadRows, instead: str = "another row is used instead") -> None:
        self.skipped, self.seen, self._rules, self._instead = 0, set[int](), rules, instead

    def fresh(self) -> BadRowCount:
        """Returns a new count with the same settings."""
        return BadRowCount(self._rules, self._instead)

    def skip(self, where: Callable[[], BadSample]) -> None:
        """Counts a drawn sample that is dropped; logs the first, tenth, hundredth and so on."""
        self.skipped += 1
        if str(self.skipped).strip("0") == "1":
            log.warning("%s; %s (skipped by this process: %d)", where(), self._instead, self.skipped)

    def count_bad(self, sample: int, where: Callable[[], BadSample], cause: Exception) -> None:
        """Counts a bad sample, or raises BadSample, or the cause if that already names the place."""
        raises, whole = self._rules.action == "raise", isinstance(cause, ChunkCorrupt) and cause.row is None
        if whole or (raises and isinstance(cause, (ChunkCorrupt, RowInvalid))):
            raise cause
        error = where()
        if raises:
            raise error from cause
        known, limit = sample in self.seen, self._rules.limit
        self.seen.add(sample)
        count = len(self.seen)
        # Also for a known one: after the error, a caller that continues must not get the refused sample.
        if limit is not None and count > limit:
            text = f"{count} bad samples in this process, the limit is {limit}; the last one: {error}"
            raise BadSample(text, **vars(error), count=count) from cause
        if not known:
            most = "" if limit is None else f" of at most {limit}"
            log.warning("%s; %s (bad sample %d%s)", error, self._instead, count, most)


def where_bad(reader: StreamReader, sample: int, cause: Exception) -> BadSample:
    """Returns the error that says which published sample is bad or dropped, where it is stored, and why."""
    chunk, row = reader.locate(sample)
    step = None if isinstance(cause, SkipSample) else vars(cause).get("_lazyshard_step")
    byte, line, reason = chunk.offset(row), row + 1, f"{f'{step}: ' if step else ''}{type(cause).__name__}: {cause}"
    if isinstance(cause, RowInvalid) and step is None:
        # The cause takes blank lines in foreign files into account, and has the byte within the row.
        byte, line, reason = cause.byte or byte, cause.line or line, cause.reason or reason
    text = f"{chunk.path}: row {row} (line {line}, byte {byte}, sample {sample}): {reason}"
    return BadSample(text, file=str(chunk.path), step=step, sample=sample, chunk=chunk.number, row=row, byte=byte)


def substitutes(sample: int, rows: int, samples_per_chunk: int, chunk: int | None = None) -> Iterator[int]:
    """Yields the substitutes to try for a bad or dropped sample: all others of its chunk, or all of another chunk.

    Their order depends only on the sample number, so every rank, worker and restart chooses the same substitute.
    """
    own, row = divmod(sample, samples_per_chunk)
    first, seen, start = samples_per_chunk * own, {row}, mix64(sample, MOST_BAD)
    if chunk is not None:
        first, seen, start = samples_per_chunk * chunk, set(), mix64(sample, chunk)
    for attempt in range(min(MOST_BAD, rows - 1) if chunk is None else 0):
        other = mix64(sample, attempt) % rows
        # Take the next one not tried yet, so that all rows of a small chunk are tried.
        while other in seen:
            other = (other + 1) % rows
        seen.add(other)
        yield first + other
    yield from (first + other for at in range(rows) if (other := (start + at) % rows) not in seen)


class SampleMaker:
    """Makes samples from lines, and keeps the statistics of one process.

    `rows_of` makes rows from lines; None if they are parsed one by one because they hold arrays. `encodes`: whether
    samples are made from rows; otherwise rows are samples. Samples in `left_out` are never used as substitutes.
    """

    def __init__(self, reader: StreamReader, steps: RowSteps, bad: BadRowCount, memory: int, limit: int | None) -> None:
        self.encodes, self.left_out = bool(steps), Gaps()
        self.rows_of: RowsOf | None = None if reader.arrays else parsed_rows
        self._reader, self._steps, self._bad = reader, steps, bad
        # Samples by number, pickled so that callers cannot modify the kept ones. Epochs repeat in order, so the first
        # ones are kept: evicting the least recently used would evict each sample just before its next use.
        self._kept: dict[int, bytes] = {}
        # Rows that are not encoded are read again as quickly.
        self._room = self._memory_bytes = memory if self.encodes else 0
        self._limit, self._dropped = sys.maxsize if limit is None else limit, set[int]()
        self._counts = dict.fromkeys(Stats._fields[4:], 0)

    def __getstate__(self) -> dict[str, Any]:
        """Resets what this process has kept and counted."""
        fresh = {"_kept": {}, "_room": self._memory_bytes, "_dropped": set(), "_bad": self._bad.fresh()}
        return self.__dict__ | fresh | {"_counts": dict.fromkeys(self._counts, 0)}

    @property
    def stats(self) -> tuple[float, ...]:
        """The values of `Stats` for this process; a plain tuple, since it is made for each read."""
        bad, reader = self._bad, self._reader
        return len(bad.seen), reader.chunks_opened, reader.waited_s, bad.skipped, *self._counts.values()

    def reset_counts(self) -> None:
        """Resets the counts."""
        self._bad, self._counts = self._bad.fresh(), dict.fromkeys(self._counts, 0)

    def of_lines(self, lines: list[bytes], samples: Samples) -> list[Any]:
        """Returns the samples of checked lines, or substitutes. The lines are those of the first of some samples.

        Rows that another process is encoding are made last, so peers that draw the same batch share the work.
        """
        if not self.encodes and self.rows_of is not None and (rows := self.rows_of(lines, samples)):
            return rows
        given = [(int(sample), line) for sample, line in zip(samples, lines, strict=False)]
        made = [self._of_line(*one, wait=False) for one in given]
        return [self._of_line(*given[at]) if one is BUSY else one for at, one in enumerate(made)]

    def _of_line(self, sample: int, line: bytes, *, wait: bool = True) -> Any:
        """Returns the sample of a line, kept or made, or its substitute; or `BUSY`."""
        if sample in self._kept:
            return pickle.loads(self._kept[sample])  # noqa: S301 - pickled by this process
        made, failed = self._made(sample, line, wait=wait)
        if failed is not None:
            return self.substitute(sample, failed)
        if self._room > 0 and made is not BUSY:
            # The error of pickle for a function or an open file varies with the object.
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                data = pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL)
                if len(data) <= self._room and sample not in self._kept:
                    self._kept[sample] = data
                    self._room -= len(data)
        return made

    def _made(self, sample: int, line: bytes, *, wait: bool = True) -> tuple[Any, Exception | None]:
        """Returns the sample made from a checked line, or the error if it cannot be trained."""
        try:
            rows = (self.rows_of and self.rows_of([line], None)) or self._reader.parse([line], sample)
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        try:
            return self._steps(rows[0], sample), None
        except Exception as cause:
            raise_if_short(cause)
            return None, cause

    def tried(self, sample: int) -> tuple[Any, Exception | None]:
        """Returns the sample made from a published row, or the error if it cannot be trained."""
        try:
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, line)

    def read(self, sample: int) -> Any:
        """Returns the sample made from a published row, or its substitute."""
        made, failed = self.tried(sample)
        return made if failed is None else self.substitute(sample, failed)

    def dropped(self, samples: Iterable[int]) -> Iterator[int]:
        """Yields those of the published samples that are dropped. Bad ones are counted, or raise as `BadRows` says."""
        for sample in samples:
            if (failed := self.tried(sample)[1]) is not None and self._note(sample, failed):
                yield sample

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns another sample of the chunk to train instead of a bad or dropped one.

        If no row of the chunk can be used and some are dropped, tries the following chunks, waiting for them if needed,
        and after the end of the stream the previous ones. Raises the error of `bad_rows`, BadSample, WaitTimeout.
        """
        if isinstance(cause, SkipSample):
            self._bad.skip(lambda: where_bad(self._reader, sample, cause))
        reader, size = self._reader, self._reader.samples_per_chunk
        own, dropped, bad, last = sample // size, int(self._note(sample, cause)), 0, cause
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
                    made, failed = self.tried(other)
                except ChunkRetired as gone:
                    if chunk > own:
                        raise
                    raise self._nothing_kept(sample, dropped, last) from gone
                if failed is None:
                    self._counts["filled"] += 1
                    return made
                if self._note(other, failed):
                    dropped, last = dropped + 1, failed
                elif (bad := bad + 1) == MOST_BAD:
                    break
            # Check before waiting for the next chunk. If rows are bad, which no filter causes, rows of other chunks are
            # not trained instead.
            if dropped >= FILL_ROWS or not dropped or bad == MOST_BAD:
                break
        if dropped and bad < MOST_BAD:
            raise self._nothing_kept(sample, dropped, last) from last
        path = str(reader.chunk(own).path)
        text = f"no usable substitute for sample {sample}: all rows that were tried are bad too; its own error is"
        why = f"{path}: {text} {type(cause).__name__}: {cause}. If all fail alike, check the encoder and the steps"
        raise BadSample(why, file=path, sample=sample, chunk=own) from cause

    def _chunks(self, own: int) -> Iterator[tuple[int, int]]:
        """Yields the chunks to search and their numbers of rows: the sample's own, later ones, earlier ones."""
        reader, size, limit = self._reader, self._reader.samples_per_chunk, self._limit
        yield own, min(len(reader.chunk(own)), limit - own * size)
        for chunk in itertools.count(own + 1):
            first = chunk * size
            # Not limited to what is published now: the substitute must be the same at any time and in any process.
            total = 0 if first >= limit else min(limit, reader.wait_for(first + 1).samples)
            if first >= total:
                break
            yield chunk, min(size, total - first)
        yield from ((chunk, size) for chunk in reversed(range(own)))

    def _note(self, sample: int, cause: Exception) -> bool:
        """Returns whether a sample is dropped; counts a bad one, or raises as `BadRows` says."""
        if isinstance(cause, SkipSample):
            if len(self._dropped) >= _MOST_DROPPED:
                self._dropped = set()
            self._dropped.add(sample)
            return True
        self._bad.count_bad(sample, lambda: where_bad(self._reader, sample, cause), cause)
        return False

    def _nothing_kept(self, sample: int, dropped: int, last: Exception) -> BadSample:
        text = f"no row can replace sample {sample}: {dropped} in a row were dropped, the last one because: {last}"
        text = f"{self._reader.directory}: {text}. Check the filter, or filter in the producer"
        return BadSample(text, **vars(where_bad(self._reader, sample, last)), count=dropped)


def as_tensor(array: Array) -> torch.Tensor:
    """Returns a tensor that shares the memory of an array from a row.

    A read-only array is copied, as torch has no read-only tensors; lazyshard's readers return none.

    Args:
        array: of any dtype that rows may hold; `lazyshard.BFLOAT16` becomes torch.bfloat16.

    Raises TypeError: this release of torch lacks the dtype, for example uint16, uint32 and uint64 before 2.3.
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_stored(value: Any) -> Any:
    """Converts a value to one that `lazyshard.format.arrays.pack_row` accepts.

    ::

        value     {"input_ids": [1, 2, ..., 9], "length": 9, "pixel_values": tensor(...), "ratio": np.float32(0.5)}
        packed    {"input_ids": array([1, 2, ..., 9]), "length": 9, "pixel_values": {"$tensor": array(...)},
                   "ratio": {"$scalar": array(0.5)}}

    Raises TypeError if a value would not be restored exactly: any type other than dict, list, tuple, str, bool, int,
    float, None, numpy arrays and numbers, and tensors on the CPU that need no gradient; or a dict key that is not a
    str, or is one of the marks above.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": np.array(value)}
    if kind is list:
        array = array_of_list(value) if len(value) > _SHORT else None
        return [to_stored(one) for one in value] if array is None else array
    if kind is dict:
        for name in value:
            if type(name) is not str or name in MARKS:
                raise TypeError(f"the key {name!r:.80}")
        return {name: to_stored(one) for name, one in value.items()}
    if kind is tuple:
        return {"$tuple": [to_stored(one) for one in value]}
    if kind is torch.Tensor:
        # Anything more than numbers in CPU memory would not be restored.
        odd = value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided
        if not (odd or value.is_quantized or vars(value)):
            bits = value.contiguous()
            is_short = bits.dtype is torch.bfloat16
            return {"$tensor": bits.view(torch.int16).numpy().view(BFLOAT16) if is_short else bits.numpy()}
    if kind is np.ndarray and value.dtype.isnative:
        return {"$numpy": value}
    if isinstance(value, np.number | np.bool_):
        return {"$scalar": np.array(value)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def from_stored(value: Any) -> Any:
    """Restores a packed value; arrays and tensors share the memory of the packed ones."""
    kind = type(value)
    if kind is np.ndarray:
        return value.tolist()
    if kind is list:
        return [from_stored(one) for one in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        if mark in MARKS:
            return MARKS[mark](inner)
    return {name: from_stored(one) for name, one in value.items()}


MARKS: dict[str, Callable[[Any], Any]] = {"$tensor": as_tensor, "$numpy": lambda array: array}  # By reserved keys
MARKS |= {"$scalar": lambda array: array[()], "$float": lambda array: array.item()}
MARKS |= {"$tuple": lambda values: tuple(map(from_stored, values))}


def array_of_list(values: list[Any]) -> Array | None:
    """Returns a list of numbers of one type as an array that converts back to the same list; None for other lists."""
    kinds = set(map(type, values))
    if kinds == {int}:
        low, high = min(values), max(values)
        if low >= -(2**31) and high < 2**31:
            return np.array(values, np.int32)
        return np.array(values, np.int64) if low >= -(2**63) and high < 2**63 else None
    if kinds == {float}:
        exact = np.array(values, np.float64)
        with np.errstate(over="ignore"):
            short = exact.astype(np.float32)
        return short if np.array_equal(short.astype(np.float64), exact, equal_nan=True) else exact
    return np.array(values, np.bool_) if kinds == {bool} else None


class LateRow(Mapping[str, Any]):
    """A row that is parsed at the first access: a read-only mapping.

    It is pickled as a plain dict: of the original line until the first access, afterwards of its current contents. Pass
    this class as `encode_fn` to have DataLoader workers return rows that the main process parses (docs/performance.md).
    Of a line, or of arrays and media, above 64 KiB only the place is sent, and the receiver reads it again, with its
    digest: not for filesystems without a page cache. If it cannot, the first access raises ChunkCorrupt, ChunkMissing.

    Args:
        line: a valid JSON object as UTF-8, with optional whitespace around it; or the place where it is stored.
        side: the bytes of its arrays and media in the side file, or their place; None without any.

    Raises TypeError: the line is not bytes; torch's `default_collate` then makes a dict of the batch.
    """

    __slots__ = ("_held",)

    def __init__(self, line: bytes | RowPlace, side: bytes | RowPlace | None = None) -> None:
        if not isinstance(line, (bytes, RowPlace)):
            raise TypeError(f"a line must be bytes or a place, got {type(line).__name__}")
        self._held: tuple[bytes | RowPlace, bytes | RowPlace | None] | dict[str, Any] = line, side

    def _parsed(self) -> dict[str, Any]:
        if not isinstance(held := self._held, dict):
            line, side = held
            row: dict[str, Any] = quick_loads(line if isinstance(line, bytes) else read_place(line).data)
            if side is not None:
                data = read_place(side) if isinstance(side, RowPlace) else np.frombuffer(bytearray(side), np.uint8)
                fill_row(row, data)
            held = self._held = row
        return held

    def __getitem__(self, key: str) -> Any:
        return self._parsed()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._parsed()!r})"

    def __reduce__(self) -> tuple[Callable[..., Mapping[str, Any]], tuple[Any, ...]]:
        made, held = self.sent()
        return made, tuple(read_place(one).tobytes() if isinstance(one, RowPlace) else one for one in held)

    def sent(self) -> tuple[Callable[..., Mapping[str, Any]], tuple[Any, ...]]:
        """As `__reduce__`, for a receiver that unpickles soon and on this machine."""
        return (dict, (self._held,)) if isinstance(self._held, dict) else (_row_of, self._held)


def _row_of(line: bytes | RowPlace, side: bytes | RowPlace | None = None) -> Mapping[str, Any]:
    row = LateRow(line, side)
    # An error here would lose the batch, for which the loader would wait forever. The first access raises it again.
    with contextlib.suppress(ChunkCorrupt, ChunkMissing, OSError):
        return row._parsed()
    return row


ForkingPickler.register(LateRow, LateRow.sent)


def late_rows(reader: StreamReader, lines: list[bytes], samples: Samples | None) -> list[LateRow]:
    """Makes rows from checked lines; a `RowsOf`. Without places and arrays if the samples are not known."""
    if not reader.arrays and (samples is None or max(map(len, lines)) <= LARGE_ROW_BYTES):
        return list(map(LateRow, lines))
    made = []
    # Without samples, or if arrays are bad, the caller reads row by row.
    with contextlib.suppress(ChunkCorrupt, RowInvalid):
        for line, sample in zip(lines, () if samples is None else samples, strict=False):
            chunk, row = reader.locate(int(sample))
            made.append(LateRow(*reader.read_from(chunk, partial(chunk.to_send, line, row))))
    return made
