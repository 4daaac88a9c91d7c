"""Which rows of the chunks in use are known to be dropped, so that none is read and asked about again and again."""

from __future__ import annotations

from typing import Final

__all__ = ["DroppedRows"]

_ROWS: Final = 1 << 20
"""Rows of which it is known at the most, a byte each."""


class DroppedRows:
    """Samples that are dropped, of the chunks that were looked into last. Each process has its own; threads share it.

    Args:
        samples_per_chunk: of the stream.
    """

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
