"""The lengths of a stream's rows in tokens, as the seals have them: of all, or window by window while the stream grows.

Of each chunk its seal is read, some 30 bytes a row. Every process that asks reads them all, those of chunks whose rows
it never reads too.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from lazyshard.errors import LengthsMissing
from lazyshard.format.names import seal_name
from lazyshard.format.seal import Seal
from lazyshard.store.files import read_file
from lazyshard.stream.stream import Stream

if TYPE_CHECKING:
    from lazyshard.stream.reader import StreamReader

__all__ = ["WindowLengths", "chunk_seal", "lengths_missing", "lengths_not_ours", "read_lengths"]

_KEPT: Final = 4
"""Windows that are remembered: what is left over of one is needed with the next; 4 bytes a row are not much."""


def chunk_seal(directory: Path, chunk: int) -> Seal:
    """Reads the seal of a published chunk of a stream of ours; its `tokens` are the lengths of the chunk's rows.

    Raises:
        SealInvalid, FileNotFoundError: it cannot be used, or is not there.
        FileRefused, FileUnreadable, OSError: it cannot be read.
    """
    path = directory / seal_name(chunk)
    return Seal.decode(read_file(path), chunk, str(path))


def read_lengths(stream: Stream, samples: int) -> npt.NDArray[np.uint32]:
    """Returns the lengths of a stream's samples in tokens.

    Args:
        stream: the stream, of ours.
        samples: how many samples, all of them published.

    Returns:
        u32 of shape (samples,).

    Raises:
        LengthsMissing: those of a chunk are not known, or deleted.
        Others: as `chunk_seal`.
    """
    directory, size = stream.directory, stream.samples_per_chunk
    lengths = np.zeros(samples, np.uint32)
    for number in range(-(-samples // size)):
        try:
            found = chunk_seal(directory, number).tokens
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
