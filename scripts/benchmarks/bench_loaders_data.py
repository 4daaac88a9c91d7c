"""The rows that `scripts/bench_loaders` reads: two streams, always the same ones, and where their rows begin."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from lazyshard import ChunkWriter
from lazyshard.format import Seal
from lazyshard.format.names import chunk_name, seal_name
from scripts.benchmarks.bench_read import SAMPLES_PER_CHUNK, make_stream

CHUNKS_B: Final = 8
PAYLOAD_BYTES: Final = 750_000
"""As base64 text 1 MB."""


@dataclass(frozen=True)
class Data:
    """One of the two.

    Attributes:
        which: A (text of about 2 KB in the mean) or B (images of about 1 MB in base64).
        directory: the stream.
        offsets: file of where each row begins.
        rows: how many; row i has the id i.
        samples_per_chunk: rows of each chunk file.
    """

    which: str
    directory: Path
    offsets: Path
    rows: int
    samples_per_chunk: int

    @property
    def bytes(self) -> int:
        """Size of the chunk files together."""
        return sum(path.stat().st_size for path in self.directory.glob("chunk_*.jsonl"))

    @property
    def chunks(self) -> int:
        """Number of chunk files."""
        return self.rows // self.samples_per_chunk

    def row(self, number: int) -> str:
        """Returns a row as text with sorted keys, as the processes report it."""
        chunk, line = divmod(number, self.samples_per_chunk)
        with (self.directory / chunk_name(chunk)).open("rb") as file:
            found = next(text for at, text in enumerate(file) if at == line)
        return orjson.dumps(orjson.loads(found), option=orjson.OPT_SORT_KEYS).decode()


def make_images(directory: Path, rows: int) -> None:
    """Writes rows with random bytes as base64 and a line of text."""
    rng = random.Random(0)
    with ChunkWriter(directory, rows // CHUNKS_B) as writer:
        for number in range(rows):
            image = base64.b64encode(rng.randbytes(PAYLOAD_BYTES)).decode("ascii")
            writer.write({"id": number, "text": f"What does image {number} show?", "image": image})


def make_data(place: Path, which: str, rows: int) -> Data:
    """Makes A or B below a directory.

    Args:
        place: where to.
        which: A or B.
        rows: of A a multiple of 1,000; of B one of 8.
    """
    directory, offsets = place / which, place / f"{which}.offsets"
    if which == "A":
        make_stream(directory, rows, "prose")
    else:
        make_images(directory, rows)
    samples_per_chunk = SAMPLES_PER_CHUNK if which == "A" else rows // CHUNKS_B
    with offsets.open("wb") as file:
        for chunk in range(rows // samples_per_chunk):
            seal = Seal.decode((directory / seal_name(chunk)).read_bytes(), chunk)
            file.write(seal.offsets.astype("=u8").tobytes())
    return Data(which, directory, offsets, rows, samples_per_chunk)
