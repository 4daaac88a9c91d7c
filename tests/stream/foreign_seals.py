"""Seals as somebody else's producer might make them: right in themselves, of rows that are not."""

import itertools
from pathlib import Path

import numpy as np
import xxhash

from lazyshard.format.records import chunk_name, seal_name
from lazyshard.format.seal import Seal


def seal_rows(directory: Path, chunk: int, *rows: bytes, tokens: list[int] | None = None) -> None:
    """Writes a chunk of these rows, whatever they are, and its seal."""
    (directory / chunk_name(chunk)).write_bytes(b"".join(rows))
    offsets = [0, *itertools.accumulate(map(len, rows))]
    seal = Seal(
        chunk=chunk,
        offsets=np.array(offsets, np.uint64),
        digests=np.array([xxhash.xxh3_64_intdigest(row) for row in rows], np.uint64),
        tokens=None if tokens is None else np.array(tokens, np.uint32),
        sealed_at=1700000000.0,
    )
    (directory / seal_name(chunk)).write_bytes(seal.encode())
