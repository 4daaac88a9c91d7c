"""Feed large-model training from data that is still being produced.

A producer publishes numbered chunk files (`ChunkWriter`); every data-parallel rank reads its own chunks
(`LazyShardedDataset`, whose `Batches` count what is trained; as an iterable `LazyShardedStream` and
`LazyShardedIterable`), of several streams by weights
(`BlendedDataset`), each row through steps (`MessageTransform`, `Filter`, `Map`); `LazyShardedSequences` packs (`Pack`),
splits (`Split`) or pads (`Pad`) raw rows while it reads. `load` makes a data set of one file, which `check_config`
looks through. `Order`, `BadRows` and `EncodeCache` are groups of their settings; `LateRow` in the place of an encoder
parses rows in the main process. `StreamReader` reads a stream outside training. `streaming_shard` shards any other
iterable. Rows may hold numpy arrays; `as_tensor` makes tensors of them. What reads for training needs torch, which is
imported when it is first used. `window_for_distance` tells which `shuffle_window` moves neighbours so far apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lazyshard import errors
from lazyshard.errors import LazyShardError
from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.config import check_config
    from lazyshard.data import (
        BadRows,
        Batches,
        BlendedDataset,
        EncodeCache,
        Filter,
        LateRow,
        LazyShardedDataset,
        LazyShardedIterable,
        LazyShardedSequences,
        LazyShardedStream,
        Map,
        MessageTransform,
        Order,
        Pack,
        Pad,
        Split,
        as_tensor,
        load,
        streaming_shard,
    )
    from lazyshard.format.arrays import BFLOAT16
    from lazyshard.inspection.row_facts import weights_by_tokens
    from lazyshard.plan.shuffle import window_for_distance
    from lazyshard.stream import ChunkWriter, StreamReader

__all__ = ["BFLOAT16", "BadRows", "Batches", "BlendedDataset", "ChunkWriter", "EncodeCache", "Filter", "LateRow"]
__all__ += ["LazyShardError", "LazyShardedDataset", "LazyShardedIterable", "LazyShardedSequences", "LazyShardedStream"]
__all__ += ["Map", "MessageTransform", "Order", "Pack", "Pad", "Split", "StreamReader", "as_tensor", "check_config"]
__all__ += ["errors", "load", "streaming_shard", "weights_by_tokens", "window_for_distance"]

__version__ = "0.1.0"


_OTHERS: Final = {
    "config": ("check_config",),
    "format.arrays": ("BFLOAT16",),
    "inspection.row_facts": ("weights_by_tokens",),
    "plan.shuffle": ("window_for_distance",),
    "stream": ("ChunkWriter", "StreamReader"),
}
_HERE: Final = {"LazyShardError", "errors"}.union(*_OTHERS.values())

_lazily = lazily(__name__, _OTHERS | {"data": tuple(name for name in __all__ if name not in _HERE)})


def __getattr__(name: str) -> Any:
    try:
        return _lazily(name)
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        raise ImportError(f"{name} needs PyTorch: pip install 'lazyshard[torch]'") from cause
