"""Streams whose rows have lengths in tokens in their seals."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lazyshard import ChunkWriter
from lazyshard.format.records import seal_name
from lazyshard.store.files import read_seal
from lazyshard.stream.stream import open_now, read_lengths


def sealed(directory: Path, lengths: list[int], per_chunk: int = 2, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    for number, length in enumerate(lengths):
        writer.write({"id": number}, tokens=length)
    writer.close(end)
    return directory


def put_lengths(directory: Path, *lengths: list[int], first: int = 0) -> Path:
    """Puts lengths into seals that are there, as no producer would."""
    for chunk, values in enumerate(lengths, first):
        seal = replace(read_seal(directory, chunk), tokens=np.array(values, np.uint32))
        (directory / seal_name(chunk)).write_bytes(seal.encode())
    return directory


def lengths_of(directory: Path) -> list[int]:
    stream = open_now(directory)
    return [int(length) for length in read_lengths(stream, stream.published().samples)]
