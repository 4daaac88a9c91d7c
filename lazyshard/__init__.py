"""Feed large-model training from data that is still being produced.

A producer publishes numbered chunk files (`ChunkWriter`); every data-parallel rank reads its own chunks
(`LazyShardedDataset`). `StreamReader` reads a stream outside training. Only the data set needs torch, which is imported
when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazyshard import errors
from lazyshard.errors import LazyShardError
from lazyshard.storage import ChunkWriter, StreamReader

if TYPE_CHECKING:
    from lazyshard.data import LazyShardedDataset

__all__ = ["ChunkWriter", "LazyShardError", "LazyShardedDataset", "StreamReader", "errors"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "LazyShardedDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lazyshard.data import LazyShardedDataset
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        raise ImportError("LazyShardedDataset needs PyTorch: pip install 'lazyshard[torch]'") from cause
    return LazyShardedDataset
