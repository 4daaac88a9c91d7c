"""Feed large-model training from data that is still being produced.

A producer publishes numbered chunk files (`ChunkWriter`); every data-parallel rank reads its own chunks
(`LazyShardedDataset`, `LazyShardedIterable`). `StreamReader` reads a stream outside training. Only the data sets need
torch, which is imported when one is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lazyshard import errors
from lazyshard.errors import LazyShardError
from lazyshard.storage import ChunkWriter, StreamReader

if TYPE_CHECKING:
    from lazyshard.data import LazyShardedDataset, LazyShardedIterable

__all__ = ["ChunkWriter", "LazyShardError", "LazyShardedDataset", "LazyShardedIterable", "StreamReader", "errors"]

__version__ = "0.1.0"


_NEED_TORCH: Final = ("LazyShardedDataset", "LazyShardedIterable")


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lazyshard import data
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        raise ImportError(f"{name} needs PyTorch: pip install 'lazyshard[torch]'") from cause
    return getattr(data, name)
