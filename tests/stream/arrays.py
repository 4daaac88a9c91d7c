"""Small streams whose rows hold arrays."""

from pathlib import Path
from typing import Any

import numpy as np

from lazyshard import ChunkWriter


def row(number: int) -> dict[str, Any]:
    """A row with two arrays, 16 bytes in all."""
    return {"id": number, "x": np.array([number, -1], np.int32), "n": [np.array(number, np.float16)]}


def values(found: dict[str, Any]) -> list[Any]:
    """What such a row holds, to be compared."""
    return [found["id"], found["x"].tolist(), found["n"][0].tolist()]


def produce(directory: Path, samples: int, per_chunk: int = 2, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, per_chunk, arrays=True)
    for number in range(writer.published_samples, samples):
        writer.write(row(number))
    writer.close(end)
    return directory


def expected(start: int, stop: int) -> list[list[Any]]:
    """The rows [start, stop), as `values` tells them."""
    return [[number, [number, -1], float(number)] for number in range(start, stop)]
