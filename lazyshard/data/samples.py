"""From a row to a sample: through the steps, encoded, kept for later epochs; or parsed late, elsewhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshard.data.shared import Stats
from lazyshard.data.steps import RowSteps
from lazyshard.data.substitutes import BadRowCount, SubstituteSearch
from lazyshard.errors import ChunkCorrupt, RowInvalid
from lazyshard.memory import quick_loads, raise_if_short
from lazyshard.plan.deal import Gaps
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.chunk_files import RowPlace, read_place


class SampleMaker:
    """Makes samples of rows.

    Args:
        reader: where substitutes are read.
        steps: what is done with a row; none leave rows as they are.
        bad: decides what happens to samples that cannot be read or encoded.
        cache: keeps encoded samples.
        limit: the stream is taken to end there at the latest; None for no bound.

    Attributes:
        takes_lines: whether samples are made `of_lines`, which need not be parsed where what was made of them is kept.
    """

    takes_lines = False

    def __init__(
        self,
        reader: StreamReader,
        steps: RowSteps,
        bad: BadRowCount,
        cache: SampleCache,
        limit: int | None,
    ) -> None:
        self._reader = reader
        self._steps = steps
        self._cache = cache
        self._substitutes = SubstituteSearch(reader, bad, limit)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what this process has kept."""
        return self.__dict__ | {"_cache": self._cache.fresh()}

    @property
    def encodes(self) -> bool:
        """Whether samples are made of rows; otherwise rows are samples."""
        return bool(self._steps)

    @property
    def stats(self) -> Stats:
        """What this process has met."""
        found, reader = self._substitutes, self._reader
        return Stats(len(found.bad), reader.chunks_opened, reader.waited_s, found.bad.skipped, found.filled)

    def forget_met(self) -> None:
        """Starts counting anew."""
        self._substitutes.forget_met()

    def leave_out(self, samples: Gaps) -> None:
        """Takes no substitute from among samples that are not to be drawn."""
        self._substitutes.left_out = samples

    def make(self, sample: int, row: dict[str, Any]) -> Any:
        """Makes a sample of a row unless that was done before; returns a substitute's if it fails or is dropped."""
        kept = self._cache.get(sample)
        if kept is not None:
            return kept
        try:
            encoded = self._steps(row, sample)
        except Exception as cause:
            raise_if_short(cause)
            return self.substitute(sample, cause)
        self._cache.put(sample, encoded)
        return encoded

    def of_lines(self, lines: list[bytes], samples: Iterable[int]) -> list[Any]:
        """Makes samples of checked lines; substitutes as `make` does. Raises as `substitute`."""
        raise NotImplementedError

    def _made(self, sample: int, row: dict[str, Any]) -> tuple[Any, Exception | None]:
        """Returns what is made of a row, or why it cannot be trained."""
        try:
            return self._steps(row, sample), None
        except Exception as cause:
            raise_if_short(cause)
            return None, cause

    def substitute(self, sample: int, cause: Exception) -> Any:
        """Returns what is trained in the place of a sample: another one of its chunk.

        Where no row of its chunk can be, and some are dropped, one of the chunks behind it, which are waited for if
        need be; at the end of the stream, of those before it.

        Raises:
            ChunkCorrupt, RowInvalid, BadSample, TooManyBadSamples: what `bad_rows` says; or the rows that were
                looked at are bad too.
            NothingKept: so many rows in a row were dropped.
            WaitTimeout: a later chunk was not published in time.
        """
        return self._substitutes.find(sample, cause, self._try)

    def _try(self, sample: int) -> tuple[Any, Exception | None]:
        """Returns what is made of a sample, or why it cannot be trained."""
        try:
            row = self._reader.read_published(sample, sample + 1)[0]
        except (ChunkCorrupt, RowInvalid) as cause:
            return None, cause
        return self._made(sample, row)


class SampleCache:
    """Samples by number, bounded in bytes. The first to come stay; nothing is evicted.

    Epochs go round and round over the data. Where the data is larger than the cache, evicting the least recently
    used sample would evict each one just before it is asked for again; keeping the first ones gives a hit rate of
    cache over data.

    Samples are kept pickled, so their size is exact, and what a caller does to a sample that it got cannot change
    the cached one.

    Args:
        limit: bytes of pickled samples to keep; 0 keeps none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._samples: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Samples kept."""
        return len(self._samples)

    @property
    def size(self) -> int:
        """Bytes kept."""
        return self._size

    def fresh(self) -> SampleCache:
        """Returns an empty one of the same size."""
        return SampleCache(self._limit)

    def get(self, number: int) -> Any:
        """Returns a copy of a sample, None if it is not kept."""
        data = self._samples.get(number)
        return None if data is None else pickle.loads(data)  # noqa: S301 - what `put` of this process has pickled

    def put(self, number: int, sample: Any) -> None:
        """Keeps a sample if there is room and it can be pickled."""
        if self._size >= self._limit or number in self._samples:
            return
        try:
            data = pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError):
            # A sample that holds a function or an open file, say: what pickle raises differs from one to the next.
            return
        if self._size + len(data) <= self._limit:
            self._samples[number] = data
            self._size += len(data)


_loads = quick_loads


class LateRow(Mapping[str, Any]):
    """A row as it lies on disk, parsed at the first look at it.

    In all that one does with a row it is a read-only mapping. Pickled it becomes a plain dict: of what it was made of,
    as long as nobody has looked at it, and else of the row as it is by then, with what was changed deep in it.

    Of a large row only the place is held, and sent between processes of a machine (a `multiprocessing` queue, as a
    DataLoader's): who looks at it, or receives it, reads it again, out of the page cache, with its digest.

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
        """Returns the value of a field. Raises KeyError if there is none of that name."""
        return self._parsed()[key]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the fields."""
        return iter(self._parsed())

    def __len__(self) -> int:
        """Number of fields."""
        return len(self._parsed())

    def __repr__(self) -> str:
        """Shows the row."""
        return f"{type(self).__name__}({self._parsed()!r})"

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any]]:
        """Sends the line to be parsed by who unpickles it."""
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
    """Makes rows of lines that were checked to be as their producer has published them."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __call__(self, lines: list[bytes], samples: Sequence[int] | npt.NDArray[np.int64] | None) -> list[LateRow]:
        """Returns the rows of the first of these samples, without their places if it is not known whose they are."""
        if samples is None or max(map(len, lines)) <= LARGE_ROW_BYTES:
            return list(map(LateRow, lines))
        return [LateRow(self._held(line, int(sample))) for line, sample in zip(lines, samples, strict=False)]

    def _held(self, line: bytes, sample: int) -> bytes | RowPlace:
        if len(line) <= LARGE_ROW_BYTES:
            return line
        number, row = divmod(sample, self._reader.samples_per_chunk)
        return self._reader.chunk(number).place(row) or line
