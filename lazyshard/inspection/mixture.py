"""The mixture of a stream's sources, as its newest seal tells."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lazyshard.errors import LazyShardError
from lazyshard.format import Seal
from lazyshard.format.mixed import MixedSource, mixed_sources
from lazyshard.inspection.census import Census
from lazyshard.store.files import read_file

_MAX_SEAL_BYTES: Final = 4 << 20
"""A larger seal, of more than about 100,000 rows, is not read: looks every other second shall not burden a share."""


def read_mixture(directory: Path, census: Census) -> tuple[MixedSource, ...]:
    """Returns how the sources are mixed up to the newest chunk, by one small read.

    Returns:
        As `mixed_sources`; none too where the newest chunk is deleted, or its seal cannot be read or is large.
    """
    if not census.native or census.chunks <= census.retired:
        return ()
    newest = census.chunks - 1
    path = directory / census.names(newest)[1]
    try:
        return mixed_sources(Seal.decode(read_file(path, _MAX_SEAL_BYTES), newest, str(path)).source)
    except (LazyShardError, OSError):
        # What is wrong with it is told by whoever looks for damage; the head counted it as published.
        return ()
