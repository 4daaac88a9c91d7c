"""The lengths of a stream's rows in tokens, as the seals have them: of all, or window by window while the stream grows.

Of each chunk its seal is read, some 30 bytes a row; every process that asks reads them all.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import LengthsMissing
from lazyshard.format.seal import Seal
from lazyshard.store.files import read_seal
from lazyshard.stream.stream import Stream

if TYPE_CHECKING:
    from lazyshard.stream.reader import StreamReader

_KEPT: Final = 4  # windows that are remembered: what is left over of one is needed with the next


def read_lengths(stream: Stream, samples: int) -> npt.NDArray[np.uint32]:
    """Returns the lengths in tokens of so many published samples of a stream of ours: u32 of shape (samples,).

    Raises LengthsMissing: those of a chunk are not known, or deleted.
    """
    directory, size = stream.directory, stream.samples_per_chunk
    lengths = np.zeros(samples, np.uint32)
    for number in range(-(-samples // size)):
        try:
            found = read_seal(directory, number).tokens
        except FileNotFoundError:
            if number >= stream.retired():
                raise
            raise LengthsMissing(
                f"{directory}: chunk {number} was deleted by the stream's producer, and the lengths of its samples "
                f"with it",
                directory=str(directory),
                chunk=number,
            ) from None
        if found is None:
            raise lengths_missing(directory, number)
        start = number * size
        stop = min(start + len(found), samples)
        lengths[start:stop] = found[: stop - start]
    return lengths


class WindowLengths:
    """Reads lengths as somebody needs them, by windows of so many chunks. LengthsMissing: the stream is foreign."""

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
        """Returns u32 of shape (rows,), fewer where the stream ends, waiting until all of a window are published.

        Raises LengthsMissing, ChunkRetired, WaitTimeout, SealInvalid, OSError.
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
            if (found := self._seal(chunk).tokens) is None:
                raise lengths_missing(self._reader.directory, chunk)
            lengths[begin : begin + size] = found
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

    def _seal(self, chunk: int) -> Seal:
        try:
            return read_seal(self._reader.directory, chunk)
        except FileNotFoundError:
            # Waits until its files are to be seen, or says what has become of them.
            self._reader.chunk(chunk)
            return read_seal(self._reader.directory, chunk)


def lengths_missing(directory: Path, chunk: int) -> LengthsMissing:
    """Returns the error for a chunk of which nobody has said how long its rows are."""
    return LengthsMissing(
        f"{directory}: how long the samples of chunk {chunk} are in tokens is not known: its producer did not say so. "
        f"{_how_to_seal(directory)}; or have them sealed while it is produced, by --measure or --encode, or in your "
        f"own code by `ChunkWriter.write(row, tokens=N)`",
        directory=str(directory),
        chunk=chunk,
    )


def lengths_not_ours(directory: object) -> LengthsMissing:
    """Returns the error for a directory that another program fills."""
    return LengthsMissing(
        f"{directory}: another program fills it, so nothing says how long its samples are in tokens. "
        f"{_how_to_seal(directory)}",
        directory=str(directory),
    )


def _how_to_seal(directory: object) -> str:
    return (
        f"Make a stream of its rows that does: `lazyshard-producer run --source {shlex.quote(str(directory))} "
        f"--out NEW --samples-per-chunk N --measure TOKENIZER` (the folder of a tokenizer, swift, or MODULE:FUNCTION)"
    )
