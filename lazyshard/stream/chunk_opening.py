"""Opens published chunks: those with a seal, their copies, and those of directories that another program fills."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lazyshard.format import Seal
from lazyshard.format.dealt import DealtByCost
from lazyshard.format.names import arrays_name
from lazyshard.store.files import OpenFile, again_if_stale, open_file, open_unread
from lazyshard.stream.chunk import Chunk
from lazyshard.stream.chunk_arrays import ChunkArrays
from lazyshard.stream.foreign_rows import find_rows


def open_sealed(path: Path, seal: Seal, *, read: bool = True) -> Chunk:
    """Opens a chunk that has a seal; `read`: not only to look at its size. Raises as `open_file` and `Chunk` do."""
    how = open_file if read else open_unread
    if seal.arrays is None:
        return open_copy(how(path), seal)
    # The rows first: who looks for what is missing asks for them first, too.
    file = how(path)
    return open_copy(file, seal, how(path.parent / arrays_name(seal.chunk)))


def open_copy(file: OpenFile, seal: Seal, arrays: OpenFile | None = None) -> Chunk:
    """Returns a chunk whose files are open already: that of its rows, and the side file if it has one.

    Raises as `Chunk` and `ChunkArrays` do.
    """
    digests = seal.digests.astype(">u8").tobytes()
    side = None
    if seal.arrays is not None:
        assert arrays is not None
        side = ChunkArrays(arrays, seal.chunk, seal.arrays)
    return Chunk(file, seal.chunk, _numbers(seal.offsets), digests, side, DealtByCost.read(seal.source))


def open_foreign(path: Path, number: int) -> Chunk:
    """Opens a chunk with an empty marker: finds its rows by one scan of the file, in bounded memory.

    Blank lines count as part of the row before them, in front of all rows as part of the first. A byte order mark at
    the start is passed over. The last line may lack its newline. A file without rows gives a chunk of none.

    Raises:
        FileNotFoundError, FileRefused, FileUnreadable, OSError: as `open_file`.
        ChunkCorrupt: the file has grown or shrunk meanwhile, or a line in it has no end.
    """

    def opened() -> Chunk:
        file = open_file(path)
        return Chunk(file, number, find_rows(file, number), None)

    return again_if_stale(opened)


def _numbers(values: npt.NDArray[np.uint64]) -> array[int]:
    # array indexes to plain ints three times faster than numpy.
    return array("Q", values.astype("=u8").tobytes())
