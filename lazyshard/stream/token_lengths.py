"""The lengths of a stream's rows in tokens, as the seals have them: of all, or chunk by chunk while the stream grows.

Of each chunk its seal is read, some 30 bytes a row; every process that asks reads them all.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lazyshard.errors import LengthUnknown
from lazyshard.format.seal import Seal
from lazyshard.store.files import read_seal
from lazyshard.stream.stream import Stream

if TYPE_CHECKING:
    from lazyshard.stream.reader import StreamReader

_Lengths = npt.NDArray[np.uint32]


def read_lengths(stream: Stream, samples: int) -> _Lengths:
    """Returns the tokens of so many published samples, u32. Raises LengthUnknown: not known of a chunk, or deleted."""
    directory = stream.directory

    def seal(chunk: int) -> Seal:
        try:
            return read_seal(directory, chunk)
        except FileNotFoundError:
            if chunk >= stream.retired():
                raise
            what = f"{directory}: chunk {chunk} was deleted by the stream's producer, and its samples' lengths with it"
            raise LengthUnknown(what, directory=str(directory), chunk=chunk) from None

    # In place: of a long stream there is no room for all of them twice.
    lengths = np.zeros(samples, np.uint32)
    for chunk, begin in enumerate(range(0, samples, stream.samples_per_chunk)):
        part = _tokens(directory, seal(chunk))[: samples - begin]
        lengths[begin : begin + len(part)] = part
    return lengths


def _tokens(directory: Path, seal: Seal) -> _Lengths:
    if seal.tokens is None:
        raise lengths_missing(directory, seal.chunk)
    return seal.tokens


class ChunkLengths:
    """Reads lengths chunk by chunk, as somebody needs them. LengthUnknown: the stream is foreign."""

    def __init__(self, reader: StreamReader) -> None:
        if reader.stream_id is None:
            raise lengths_not_ours(reader.directory)
        self._reader = reader
        self._kept: dict[int, _Lengths] = {}

    def of(self, chunk: int) -> _Lengths:
        """Returns u32 of shape (rows,), waiting until the chunk is published; of none behind the end of the stream."""
        if (lengths := self._kept.get(chunk)) is None:
            first, size = chunk * self._reader.samples_per_chunk, self._reader.samples_per_chunk
            rows = min(size, self._reader.wait_for(first + size).samples - first)
            lengths = _tokens(self._reader.directory, self._seal(chunk))[:rows] if rows > 0 else np.zeros(0, np.uint32)
            if len(self._kept) >= 4:
                self._kept.pop(min(self._kept), None)
            self._kept[chunk] = lengths
        return lengths

    def source(self, chunk: int) -> Any:
        """Returns the field `source` of the seal of a published chunk: what its producer says of its own place."""
        return self._seal(chunk).source

    def _seal(self, chunk: int) -> Seal:
        try:
            return read_seal(self._reader.directory, chunk)
        except FileNotFoundError:
            # Waits until its files are to be seen, or says what has become of them.
            self._reader.chunk(chunk)
            return read_seal(self._reader.directory, chunk)


def lengths_missing(directory: Path, chunk: int) -> LengthUnknown:
    """Returns the error for a chunk of which nobody has said how long its rows are."""
    what = f"{directory}: how long the samples of chunk {chunk} are in tokens is not known: its producer did not say so"
    way = "have them sealed while it is produced, by --measure or --encode, or by `ChunkWriter.write(row, tokens=N)`"
    return LengthUnknown(f"{what}. {_how_to_seal(directory)}; or {way}", directory=str(directory), chunk=chunk)


def lengths_not_ours(directory: object) -> LengthUnknown:
    """Returns the error for a directory that another program fills."""
    what = f"{directory}: another program fills it, so nothing says how long its samples are in tokens"
    return LengthUnknown(f"{what}. {_how_to_seal(directory)}", directory=str(directory))


def _how_to_seal(directory: object) -> str:
    command = f"lazyshard-producer run --source {shlex.quote(str(directory))} --out NEW --samples-per-chunk N"
    tokenizer = "the folder of a tokenizer, swift, or MODULE:FUNCTION"
    return f"Make a stream of its rows that does: `{command} --measure TOKENIZER` ({tokenizer})"
