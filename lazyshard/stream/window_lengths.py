"""The lengths of a stream's rows in tokens, window by window, while the stream grows.

Of each chunk its seal is read, some 30 bytes a row. Every process that asks reads them all, those of chunks whose rows
it never reads too.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.format.seal import Seal
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.token_lengths import chunk_seal, lengths_missing, lengths_not_ours

__all__ = ["WindowLengths"]

_KEPT: Final = 4
"""Windows that are remembered: what is left over of one is needed with the next; 4 bytes a row are not much."""


class WindowLengths:
    """Reads lengths as somebody needs them.

    Args:
        reader: the stream, one of ours.
        chunks: how many chunks a window has.

    Raises:
        LengthsMissing: another program fills the directory, so nothing says how long its rows are.
    """

    def __init__(self, reader: StreamReader, chunks: int) -> None:
        if reader.stream_id is None:
            raise lengths_not_ours(reader.directory)
        self._reader = reader
        self._chunks = chunks
        self._kept: dict[int, npt.NDArray[np.uint32]] = {}

    @property
    def rows(self) -> int:
        """Rows of a window, but of the last one of a stream."""
        return self._chunks * self._reader.samples_per_chunk

    def of(self, window: int) -> npt.NDArray[np.uint32]:
        """Returns the lengths of a window's rows, waiting until all are published, or the stream has ended.

        Returns:
            u32 of shape (rows,); fewer where the stream ends within the window, none where it has ended before it.

        Raises:
            LengthsMissing: nobody has said how long the rows of a chunk are.
            ChunkRetired: a chunk was deleted by the producer.
            WaitTimeout: they were not published in time.
            SealInvalid, OSError: a seal cannot be used.
        """
        found = self._kept.get(window)
        if found is not None:
            return found
        first, rows = window * self.rows, self.rows
        published = self._reader.wait_for(first + rows)
        stop = min(first + rows, published.samples)
        size = self._reader.samples_per_chunk
        lengths = np.zeros(max(0, stop - first), np.uint32)
        for chunk in range(first // size, -(-stop // size)):
            begin = chunk * size - first
            lengths[begin : begin + size] = self._of_chunk(chunk)
        if len(self._kept) >= _KEPT:
            self._kept.pop(min(self._kept), None)
        self._kept[window] = lengths
        return lengths

    def source(self, chunk: int) -> Any:
        """Returns the field `source` of the seal of a published chunk: what its producer says of its own place."""
        return self._seal(chunk).source

    def digest(self, first: int, stop: int) -> str:
        """Returns 16 hexadecimal digits of the XXH3 of the lengths of the windows [first, stop); waits as `of` does."""
        digest = xxhash.xxh3_64()
        for window in range(first, stop):
            digest.update(self.of(window).astype("<u4").tobytes())
        return digest.hexdigest()

    def _of_chunk(self, chunk: int) -> npt.NDArray[np.uint32]:
        found = self._seal(chunk).tokens
        if found is None:
            raise lengths_missing(self._reader.directory, chunk)
        return found

    def _seal(self, chunk: int) -> Seal:
        try:
            return chunk_seal(self._reader.directory, chunk)
        except FileNotFoundError:
            # Waits until its files are to be seen, or says what has become of them.
            self._reader.chunk(chunk)
            return chunk_seal(self._reader.directory, chunk)
