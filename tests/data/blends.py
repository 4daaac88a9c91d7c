"""Small streams to blend, whose rows say which stream they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset
from tests.data.options import grouped
from tests.data.workers import DEADLINE_S

State = dict[str, Any]


class Stream(NamedTuple):
    """A stream: its letter, rows, and rows of a chunk."""

    letter: str
    samples: int
    per_chunk: int


def write(directory: Path, stream: Stream, *, end: bool = True, size: int = 0) -> Path:
    """Writes rows such as {"id": "a7"}."""
    writer = ChunkWriter(directory / stream.letter, stream.per_chunk)
    for number in range(writer.published_samples, stream.samples):
        writer.write({"id": f"{stream.letter}{number}"} | ({"blob": "x" * size} if size else {}))
    writer.close(end)
    return directory / stream.letter


def blend(
    directory: Path, weights: dict[str, float], rank: int = 0, dp: int = 1, state: State | None = None, **options: Any
) -> BlendedDataset:
    """Blends streams by their letters; options that a data set has are the data sets'."""
    own = {"encode_fn", "shuffle_window", "seed", "unit", "max_total_samples", "bad_rows", "consumer"}
    each = {"max_wait": DEADLINE_S} | {name: options.pop(name) for name in [*options] if name in own | {"max_wait"}}
    blended = BlendedDataset(
        [
            (LazyShardedDataset(directory / letter, dp_rank=rank, dp_size=dp, **grouped(each)), weight)
            for letter, weight in weights.items()
        ],
        **grouped(options),
    )
    if state is not None:
        blended.load_state_dict(state)
    return blended


def take(blended: BlendedDataset, positions: int, batch: int = 1) -> list[str]:
    indices = list(blended.rank_indices[:positions])
    assert len(indices) == positions
    rows = [row for at in range(0, positions, batch) for row in blended.__getitems__(indices[at : at + batch])]
    return [row["id"] for row in rows]
