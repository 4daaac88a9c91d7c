"""`RowCosts`: what the rows of a stream cost to train, by their lengths in tokens, wherever these stand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazyshard.errors import RowInvalid
from lazyshard.format import PackedRow, decode_pack, parse_row
from lazyshard.plan.balance import Cost
from lazyshard.stream.stream import Stream
from lazyshard.stream.token_lengths import chunk_tokens

_READ_BYTES: Final = 1 << 20

_Floats = npt.NDArray[np.float64]


class RowCosts:
    """Costs of a stream's rows by their lengths: measured, from the seals, from a field of the rows, or of packs.

    Args:
        stream: the stream.
        field: the field of a row with its length in tokens, where neither a measure nor the seals tell it.

    Attributes:
        sealed: rows whose lengths were told by seals, of those asked for so far.
        measured: rows whose lengths were measured.
        packed: whether rows are packs; known once a chunk was looked at.
    """

    def __init__(self, stream: Stream, field: str) -> None:
        self.sealed = 0
        self.measured = 0
        self.packed = False
        self._stream = stream
        self._field = field

    def are_known(self, chunk: int) -> bool:
        """Whether no row of a chunk has to be read for them; notes whether they are packs, as all of a stream are."""
        with suppress(RowInvalid):  # who reads its rows says where it is
            self.packed = _pack(self._stream.open_chunk(chunk).line(0)) is not None
        return (
            not self.packed
            and self._stream.stream_id is not None
            and chunk_tokens(self._stream.directory, chunk).lengths is not None
        )

    def costs(self, chunk: int, cost: Cost) -> _Floats:
        """Returns what the rows of a chunk cost, shape (rows,)."""
        if not self.packed:
            return cost.of(self._of(chunk))
        lengths = list(self._read_packs(chunk))
        return cost.of_packs([sum(pack) for pack in lengths], [float(sum(map(_square, pack))) for pack in lengths])

    def _of(self, chunk: int) -> npt.NDArray[Any]:
        if self._stream.stream_id is not None:
            found = chunk_tokens(self._stream.directory, chunk)
            if found.lengths is not None:
                if found.measure is None:
                    self.sealed += len(found.lengths)
                else:
                    self.measured += len(found.lengths)
                return found.lengths
        return np.fromiter(self._read(chunk), np.int64)

    def _read_packs(self, number: int) -> Iterator[list[int]]:
        chunk = self._stream.open_chunk(number)
        row = 0
        while row < len(chunk):
            # Without arrays: the lengths stand in the text.
            for line in chunk.lines(row, len(chunk), 1, _READ_BYTES):
                pack = _pack(line)
                if pack is None:
                    raise _no_pack(str(chunk.path), row, chunk.offset(row))
                yield pack.lengths
                row += 1

    def _read(self, number: int) -> Iterator[int]:
        chunk = self._stream.open_chunk(number)
        row = 0
        while row < len(chunk):
            for value in chunk.rows(row, len(chunk), 1, _READ_BYTES):
                length = value.get(self._field)
                # Not a bool. More than 32 bits hold no row has.
                if type(length) is not int or not 0 <= length < 2**32:
                    raise _no_length(str(chunk.path), row, chunk.offset(row), self._field, value)
                yield length
                row += 1


def _pack(line: bytes) -> PackedRow | None:
    return decode_pack(parse_row(line))


def _square(tokens: int) -> int:
    return tokens * tokens


def _no_pack(file: str, row: int, byte: int) -> RowInvalid:
    reason = "expected a pack, as the first row of the stream is one, found a row that is none"
    return RowInvalid(f"{file}: row {row} (byte {byte}): {reason}", reason=reason, file=file, line=row + 1, byte=byte)


def _no_length(file: str, row: int, byte: int, field: str, value: dict[str, Any]) -> RowInvalid:
    found = repr(value[field])[:40] if field in value else f"none among {', '.join(list(value)[:8])[:120] or 'no keys'}"
    reason = (
        f"expected its length in tokens in the field {field!r}, found {found}; name the field with --length-field, or "
        f"measure the stream with `lazyshard measure`"
    )
    return RowInvalid(f"{file}: row {row} (byte {byte}): {reason}", reason=reason, file=file, line=row + 1, byte=byte)
