"""From lines to samples: parsed, through steps, encoded, kept for later epochs, packed; another row for a bad one."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lazyshard.data.rank import Stats, log
from lazyshard.data.settings import BadRows, RowSteps
from lazyshard.errors import BadSample, ChunkCorrupt, ChunkRetired, RowInvalid, SkipSample
from lazyshard.format.arrays import BFLOAT16
from lazyshard.format.row import parse_lines
from lazyshard.memory import quick_loads, raise_if_short
from lazyshard.plan.deal import Gaps
from lazyshard.plan.shuffle import mix64
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES, RowPlace, read_place

# Bad substitutes after which a chunk is given up: with half of its rows bad, all fail once in 65,536 times.
MOST_BAD: Final = 16
# Rows dropped in a row, in the search for one that takes a place, after which a filter is taken to keep nothing: where
# one row of a thousand is kept, so many are dropped in a row once in 22,000 times.
FILL_ROWS: Final = 10_000
_MOST_DROPPED: Final = 1 << 17  # Rows of which it is known at the most that they are dropped: some 8 MB
_SHORT: Final = 8  # Numbers up to which a list is shorter, and read sooner, as it is
BUSY: Final = object()  # Stands for a sample of which nothing is kept yet, and which another process is encoding

Samples = Sequence[int] | npt.NDArray[np.int64]
RowsOf = Callable[[list[bytes], Samples | None], list[Any]]
"""Makes rows of checked lines, those of the first of some samples if that is known; nothing if one is bad."""


def parsed_rows(lines: list[bytes], samples: Samples | None) -> list[dict[str, Any]]:
    """Parses lines, as `RowsOf`."""
    return parse_lines(lines)


class BadRowCount:
    """Counts bad samples, and those that are dropped: `skipped`. `instead` is what the log says is done about one."""

    def __init__(self, rules: BadRows, instead: str = "another row is used instead") -> None:
        self.skipped, self.seen, self._rules, self._instead = 0, set[int](), rules, instead

    def fresh(self) -> BadRowCount:
        """Returns one with the same settings that has met none."""
        return BadRowCount(self._rules, self._instead)

    def skip(self, where: Callable[[], BadSample]) -> None:
        """Takes note of a drawn sample that is dropped; logs the first, tenth, hundredth and so on."""
        self.skipped += 1
        if str(self.skipped).strip("0") == "1":
            log.warning("%s; %s (skipped by this process: %d)", where(), self._instead, self.skipped)

    def meet(self, sample: int, where: Callable[[], BadSample], cause: Exception) -> None:
        """Takes note of a bad sample, or raises: BadSample, or a cause that says by itself where it happened."""
        raises, whole = self._rules.action == "raise", isinstance(cause, ChunkCorrupt) and cause.row is None
        if whole or (raises and isinstance(cause, (ChunkCorrupt, RowInvalid))):
            raise cause
        error = where()
        if raises:
            raise error from cause
        known, limit = sample in self.seen, self._rules.limit
        self.seen.add(sample)
        count = len(self.seen)
        # A known one too: who continues after the error must not get what it refused.
        if limit is not None and count > limit:
            text = f"{count} bad samples in this process, their limit is {limit}; the last one: {error}"
            raise BadSample(text, **vars(error), count=count) from cause
        if not known:
            most = "" if limit is None else f" of at most {limit}"
            log.warning("%s; %s (bad sample %d%s)", error, self._instead, count, most)


def where_bad(reader: StreamReader, sample: int, cause: Exception) -> BadSample:
    """Returns the error that says which published sample is bad or dropped, where it stands, and why."""
    number, row = divmod(sample, reader.samples_per_chunk)
    chunk = reader.chunk(number)
    step = None if isinstance(cause, SkipSample) else vars(cause).get("_lazyshard_step")
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
    own, row = divmod(sample, samples_per_chunk)
    first, seen, start = samples_per_chunk * own, {row}, mix64(sample, MOST_BAD)
    if chunk is not None:
        first, seen, start = samples_per_chunk * chunk, set(), mix64(sample, chunk)
    for attempt in range(min(MOST_BAD, rows - 1) if chunk is None else 0):
        other = mix64(sample, attempt) % rows
        # On to the next one not tried yet, so that a small chunk is tried whole.
        while other in seen:
            other = (other + 1) % rows
        seen.add(other)
        yield first + other
    yield from (first + other for at in range(rows) if (other := (start + at) % rows) not in seen)


class SampleMaker:
    """Makes samples of lines, and counts what one process has met on the way.

    `rows_of` makes rows of lines; None where they are parsed one by one, since they hold arrays. `encodes`: whether
    samples are made of rows; otherwise rows are samples. Among `left_out`, not to be drawn, no substitute is taken.
    """

    def __init__(self, reader: StreamReader, steps: RowSteps, bad: BadRowCount, memory: int, limit: int | None) -> None:
        self.encodes, self.left_out = bool(steps), Gaps()
        self.rows_of: RowsOf | None = None if reader.arrays else parsed_rows
        self._reader, self._steps, self._bad = reader, steps, bad
        # Pickled samples by number, so that what a caller does to one cannot change it. Epochs go round and round, so
        # the first to come stay: to evict the least recently used would evict each just before its turn.
        self._kept: dict[int, bytes] = {}
        # What is not encoded is as quickly read again.
        self._room = self._memory_bytes = memory if self.encodes else 0
        self._limit, self._dropped = sys.maxsize if limit is None else limit, set[int]()
        self._counts = dict.fromkeys(Stats._fields[4:], 0)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has kept and met."""
        fresh = {"_kept": {}, "_room": self._memory_bytes, "_dropped": set(), "_bad": self._bad.fresh()}
        return self.__dict__ | fresh | {"_counts": dict.fromkeys(self._counts, 0)}

    @property
    def stats(self) -> Stats:
        """What this process has met."""
        bad, reader = self._bad, self._reader
        return Stats(len(bad.seen), reader.chunks_opened, reader.waited_s, bad.skipped, *self._counts.values())

    def forget_met(self) -> None:
        """Starts counting anew."""
        self._bad, self._counts = self._bad.fresh(), dict.fromkeys(self._counts, 0)

    def of_lines(self, lines: list[bytes], samples: Samples) -> list[Any]:
        """Returns what is made of the checked lines of the first of some samples, or of substitutes; or raises.

        Rows that another process is encoding come last: peers that draw the same batch share the work.
        """
        if not self.encodes and self.rows_of is not None and (rows := self.rows_of(lines, samples)):
            return rows
        given = [(int(sample), line) for sample, line in zip(samples, lines, strict=False)]
        made = [self._of_line(*one, wait=False) for one in given]
        return [self._of_line(*given[at]) if one is BUSY else one for at, one in enumerate(made)]

    def _of_line(self, sample: int, line: bytes, *, wait: bool = True) -> Any:
        """Returns what is kept of a sample, or made of its line, or what is trained in its place; or `BUSY`."""
        if sample in self._kept:
            return pickle.loads(self._kept[sample])  # noqa: S301 - what this process has pickled
        made, failed = self._made(sample, line, wait=wait)
        if failed is not None:
            return self.substitute(sample, failed)
        if self._room > 0 and made is not BUSY:
            # What pickle raises of a function or an open file differs from one to the next.
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                data = pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL)
                if len(data) <= self._room and sample not in self._kept:
                    self._kept[sample] = data
                    self._room -= len(data)
        return made

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

    def tried(self, sample: int) -> tuple[Any, Exception | None]:
        """Returns what is made of a published sample, or why it cannot be trained."""
        try:
            line = self._reader.lines_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, line)

    def read(self, sample: int) -> Any:
        """Returns what is made of a published sample, or what is trained in its place."""
        made, failed = self.tried(sample)
        return made if failed is None else self.substitute(sample, failed)

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns what is trained in the place of a sample: another one of its chunk.

        Where no row of its chunk can be, and some are dropped, one of the chunks behind it, which are waited for if
        need be; at the end of the stream, of those before it. Raises what `bad_rows` says, BadSample, WaitTimeout.
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
            # Before the next chunk, which may have to be waited for. Where rows are bad, which is no filter's doing,
            # those of others are not trained in their stead.
            if dropped >= FILL_ROWS or not dropped or bad == MOST_BAD:
                break
        if dropped and bad < MOST_BAD:
            raise self._nothing_kept(sample, dropped, last) from last
        path = str(reader.chunk(own).path)
        text = f"no usable substitute for sample {sample}, all rows that were tried are bad too, it by"
        why = f"{path}: {text} {type(cause).__name__}: {cause}. Where all fail alike it is the encoder or a step"
        raise BadSample(why, file=path, sample=sample, chunk=own) from cause

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
        self._bad.meet(sample, lambda: where_bad(self._reader, sample, cause), cause)
        return False

    def _nothing_kept(self, sample: int, dropped: int, last: Exception) -> BadSample:
        text = f"no row takes the place of sample {sample}: {dropped} in a row were dropped, the last because: {last}"
        text = f"{self._reader.directory}: {text}. See whether the filter is right, or filter where rows are produced"
        return BadSample(text, **vars(where_bad(self._reader, sample, last)), count=dropped)


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Returns a tensor of an array that came with a row, which shares its memory.

    Of an array that is read-only, as none is that a reader of ours returns, it is a copy: torch has no such tensors.

    Args:
        array: of any dtype that rows may hold; of `lazyshard.BFLOAT16` it gives a tensor of bfloat16.

    Raises TypeError: this release of torch has no such dtype, as those before 2.3 have no uint16, uint32 and uint64.
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def pack(value: Any) -> Any:
    """Returns a value as one that `lazyshard.format.arrays.pack_row` takes.

    ::

        value     {"input_ids": [1, 2, ..., 9], "length": 9, "pixel_values": tensor(...), "ratio": np.float32(0.5)}
        packed    {"input_ids": array([1, 2, ..., 9]), "length": 9, "pixel_values": {"$tensor": array(...)},
                   "ratio": {"$scalar": array(0.5)}}

    Raises TypeError where a value in it would not come back as it is: of another type than dict, list, tuple, str,
    bool, int, float, None, numpy's arrays and numbers, and tensors on the CPU that need no gradient; or a key that is
    no text, or one of ours.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": np.array(value)}
    if kind is list:
        array = array_of_list(value) if len(value) > _SHORT else None
        return [pack(one) for one in value] if array is None else array
    if kind is dict:
        for name in value:
            if type(name) is not str or name in MARKS:
                raise TypeError(f"the key {name!r:.80}")
        return {name: pack(one) for name, one in value.items()}
    if kind is tuple:
        return {"$tuple": [pack(one) for one in value]}
    if kind is torch.Tensor:
        # More than numbers in memory of the CPU would not come back.
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


def unpack(value: Any) -> Any:
    """Returns the value that was packed; arrays and tensors share the memory of what they were packed into."""
    kind = type(value)
    if kind is np.ndarray:
        return value.tolist()
    if kind is list:
        return [unpack(one) for one in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        if mark in MARKS:
            return MARKS[mark](inner)
    return {name: unpack(one) for name, one in value.items()}


# By keys that no value may have.
MARKS: dict[str, Callable[[Any], Any]] = {"$tensor": as_tensor, "$numpy": lambda array: array}
MARKS |= {"$scalar": lambda array: array[()], "$float": lambda array: array.item()}
MARKS |= {"$tuple": lambda values: tuple(map(unpack, values))}


def array_of_list(values: list[Any]) -> npt.NDArray[Any] | None:
    """Returns a list of numbers of one kind as an array that gives the same list again; None for any other list."""
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
    """A row as it lies on disk, parsed at the first look at it: a read-only mapping.

    Pickled it becomes a plain dict: of what it was made of, as long as nobody has looked at it, and else of the row as
    it is by then. With this class as `encode_fn` DataLoader workers hand out rows that the main process parses
    (docs/performance.md). Not for filesystems without a page cache, nor for streams whose rows hold arrays: of a row
    above 64 KiB only the place crosses, and who looks at it, or receives it, reads it again, with its digest.

    Args:
        line: a JSON object that is known to be one, as UTF-8, whitespace around it is allowed; or where it lies.

    Raises TypeError: the line is not of bytes; torch's `default_collate` then makes a dict of the batch.
    """

    __slots__ = ("_held",)

    def __init__(self, line: bytes | RowPlace) -> None:
        if not isinstance(line, (bytes, RowPlace)):
            raise TypeError(f"a line is bytes or a place, got {type(line).__name__}")
        self._held: bytes | RowPlace | dict[str, Any] = line

    def _parsed(self) -> dict[str, Any]:
        held = self._held
        if not isinstance(held, dict):
            held = self._held = _row_of(held)
        return held

    def __getitem__(self, key: str) -> Any:
        return self._parsed()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._parsed()!r})"

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any]]:
        return (_row_of, (read_place(self._held),)) if isinstance(self._held, RowPlace) else self.sent()

    def sent(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any]]:
        """As `__reduce__`, for who unpickles it soon and on this machine."""
        return (dict if isinstance(self._held, dict) else _row_of), (self._held,)


def _row_of(line: bytes | RowPlace) -> dict[str, Any]:
    row: dict[str, Any] = quick_loads(line if isinstance(line, bytes) else read_place(line))
    return row


ForkingPickler.register(LateRow, LateRow.sent)


def late_rows(reader: StreamReader, lines: list[bytes], samples: Samples | None) -> list[LateRow]:
    """Makes rows of lines that were checked, as `RowsOf`; without their places if it is not known whose they are."""
    if samples is None or max(map(len, lines)) <= LARGE_ROW_BYTES:
        return list(map(LateRow, lines))
    made = []
    for line, sample in zip(lines, samples, strict=False):
        number, row = divmod(int(sample), reader.samples_per_chunk)
        place = reader.chunk(number).place(row) if len(line) > LARGE_ROW_BYTES else None
        made.append(LateRow(place or line))
    return made
