"""Which chunks of a stream are looked at, in which order and portions. Decisions only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lazyshard.format.names import SEAL_SUFFIX, arrays_name, chunk_name, seal_name
from lazyshard.inspection.verification_chunks import ChunkBatch, ChunkFiles
from lazyshard.inspection.verification_names import ChunkNames, Extent

BATCH_ROWS: Final = 4096
"""Rows that are looked at before a word is said: at 2 KB a row some 8 MB, a few hundredths of a second."""

BATCH_CHUNKS: Final = 64

LAGGING: Final = 64
"""So many of the newest chunks are looked for by name even if they are not listed: on network filesystems it lags."""


def plan_batches(
    directory: Path, names: ChunkNames, extent: Extent, per_chunk: int | None, *, quick: bool
) -> list[ChunkBatch]:
    """Returns what is to be looked at: every chunk of which there is a file, in order.

    Args:
        directory: the stream's directory.
        names: the chunk files in it.
        extent: which chunks are to be there.
        per_chunk: rows in a chunk, None where that is not known.
        quick: whether to leave the rows unread.
    """
    files = list(_native(names, extent) if extent.native else _foreign(names))
    size = BATCH_CHUNKS if quick else max(1, min(BATCH_CHUNKS, BATCH_ROWS // (per_chunk or BATCH_ROWS)))
    return [ChunkBatch(directory, tuple(files[at : at + size]), quick) for at in range(0, len(files), size)]


def unmarked_chunks(names: ChunkNames, extent: Extent) -> dict[int, str]:
    """Returns the chunks of a foreign directory that lack their marker, with the name that it should have.

    Opening cannot tell: what a marker says is never looked at.
    """
    if extent.native:
        return {}
    unmarked = (chunk for chunk in names.data if chunk < extent.stop and chunk not in names.seals)
    return {chunk: names.data[chunk] + SEAL_SUFFIX for chunk in unmarked}


def _native(names: ChunkNames, extent: Extent) -> Iterator[ChunkFiles]:
    newest = range(max(extent.first, extent.stop - LAGGING), extent.stop)
    for chunk in sorted(names.data.keys() | names.seals.keys() | set(newest)):
        if extent.first <= chunk < extent.stop:
            data = names.data.get(chunk) or chunk_name(chunk)
            seal = names.seals.get(chunk) or seal_name(chunk)
            side = arrays_name(chunk) if extent.arrays else None
            yield ChunkFiles(chunk, data, seal, side, chunk in names.tokens)


def _foreign(names: ChunkNames) -> Iterator[ChunkFiles]:
    for chunk, marker in sorted(names.seals.items()):
        yield ChunkFiles(chunk, names.data.get(chunk) or marker.removesuffix(SEAL_SUFFIX), None)
