"""The lengths of a stream's rows in tokens, as the seals have them."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lazyshard.errors import LengthsMissing
from lazyshard.format.names import seal_name
from lazyshard.format.seal import Seal
from lazyshard.store.files import read_file
from lazyshard.stream.stream import Stream

__all__ = ["chunk_seal", "lengths_missing", "lengths_not_ours", "read_lengths"]


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
