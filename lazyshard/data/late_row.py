"""`LateRow`: a row that is parsed where it is looked at, which may be in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyshard.memory import quick_loads
from lazyshard.stream import StreamReader
from lazyshard.stream.chunk import LARGE_ROW_BYTES
from lazyshard.stream.chunk_files import Place, read_place

__all__ = ["LateRow", "LateRows"]

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

    def __init__(self, line: bytes | Place) -> None:
        if not isinstance(line, (bytes, Place)):
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
        return (_row_at, (self._line,)) if isinstance(self._line, Place) else self.__reduce__()


def _row_at(place: Place) -> dict[str, Any]:
    row: dict[str, Any] = _loads(read_place(place))
    return row


ForkingPickler.register(LateRow, LateRow.sent)


class LateRows:
    """Makes rows of lines that were checked to be as their producer has published them.

    Args:
        reader: whose lines.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __call__(self, lines: list[bytes], samples: Sequence[int] | npt.NDArray[np.int64] | None) -> list[LateRow]:
        """Returns the rows of the first of these samples, without their places if it is not known whose they are."""
        if samples is None or max(map(len, lines)) <= LARGE_ROW_BYTES:
            return list(map(LateRow, lines))
        return [LateRow(self._held(line, int(sample))) for line, sample in zip(lines, samples, strict=False)]

    def _held(self, line: bytes, sample: int) -> bytes | Place:
        if len(line) <= LARGE_ROW_BYTES:
            return line
        number, row = divmod(sample, self._reader.samples_per_chunk)
        return self._reader.chunk(number).place(row) or line
