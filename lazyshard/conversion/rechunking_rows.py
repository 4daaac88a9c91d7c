"""The rows of a stream that is rechunked, as they are written again."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash

from lazyshard.errors import ChunkCorrupt, ChunkMissing, FileRefused, RowInvalid, SealInvalid, StreamInvalid
from lazyshard.format import CheckedArrays, CheckedLines
from lazyshard.stream.reader import StreamReader
from lazyshard.stream.retire import read_retired
from lazyshard.stream.token_lengths import ChunkTokens, chunk_tokens

DAMAGE: Final = (ChunkCorrupt, RowInvalid, SealInvalid, StreamInvalid, ChunkMissing, FileRefused)
"""What `SourceRows.take` raises of rows that nobody will ever read there, unless somebody mends the files."""

_BLANKS: Final = b" \t\r"


class SourceRows:
    """Reads rows of a stream in order. Memory: what `StreamReader` takes, and the seal and lengths of one chunk."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader
        self._found: ChunkTokens | None = None

    def take(self, first: int, stop: int) -> CheckedLines:
        """Returns rows of the half-open range [first, stop) from the first on: at least one, of one chunk.

        Raises:
            LazyShardError: row `first` is bad or lost; see `DAMAGE`.
            ChunkRetired, OSError: its chunk was deleted, or cannot be read now.
        """
        if self.reader.arrays:
            stop = self.reader.stop_for_arrays(first, stop)
        lines = self.reader.lines_published(first, stop)
        number, row = divmod(first, self.reader.samples_per_chunk)
        if self.reader.stream_id is None:
            lines = [plain_line(line) for line in lines]
            ends = np.cumsum([len(line) for line in lines], dtype=np.uint64)
            digests = np.array([xxhash.xxh3_64_intdigest(line) for line in lines], np.uint64)
            return CheckedLines(b"".join(lines), ends, digests)
        # The reader has compared the lines with these digests.
        found = self._tokens_of(number)
        seal = found.seal
        lines, arrays = self._with_arrays(first, lines)
        after = row + len(lines)
        return CheckedLines(
            data=b"".join(lines),
            ends=seal.offsets[row + 1 : after + 1] - seal.offsets[row],
            digests=seal.digests[row:after],
            tokens=None if found.lengths is None else found.lengths[row:after],
            arrays=arrays,
        )

    def _with_arrays(self, first: int, lines: list[bytes]) -> tuple[list[bytes], CheckedArrays | None]:
        """Returns the lines up to the first whose arrays are bad, and their arrays; raises if that is the first."""
        if not self.reader.arrays:
            return lines, None
        try:
            return lines, self.reader.arrays_published(first, first + len(lines))
        except ChunkCorrupt as error:
            good = 0 if error.row is None else error.row - first % self.reader.samples_per_chunk
            if not good:
                raise
        return lines[:good], self.reader.arrays_published(first, first + good)

    def digest(self, sample: int) -> int:
        """Returns the digest of a row. Raises as `take` does."""
        return int(self.take(sample, sample + 1).digests[0])

    def retired(self) -> int:
        """Returns which chunks are deleted: those of the half-open range [0, n). Raises as `read_retired` does."""
        return 0 if self.reader.stream_id is None else read_retired(self.reader.directory, self.reader.stream_id)

    def is_deleted(self, sample: int) -> bool:
        """Returns whether the chunk of a sample is deleted. Raises as `read_retired` does."""
        return sample // self.reader.samples_per_chunk < self.retired()

    def _tokens_of(self, number: int) -> ChunkTokens:
        if self._found is None or self._found.seal.chunk != number:
            self._found = chunk_tokens(self.reader.directory, number)
        return self._found


def plain_line(line: bytes) -> bytes:
    r"""Returns a row of a foreign chunk as a stream of ours holds it, without the blank lines around it.

    >>> plain_line(b' \n{"id": 1} \r\n\n'), plain_line(b'{"id": 2}')
    (b'{"id": 1}\n', b'{"id": 2}\n')
    """
    return next(part for part in line.split(b"\n") if part.strip(_BLANKS)).rstrip(_BLANKS) + b"\n"
