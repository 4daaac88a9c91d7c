"""Feed large-model training from data that is still being produced.

A producer publishes numbered chunk files (`ChunkWriter`). Every data-parallel rank reads its own chunks through a
map-style data set (`LazyShardedDataset`) or an iterable (`LazyShardedStream`), or reads several streams by weights
(`BlendedDataset`). Reading for training needs torch, which is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lazyshard import errors
from lazyshard.errors import LazyShardError
from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.config import check_config
    from lazyshard.data.blended import BlendedDataset
    from lazyshard.data.dataset import LazyShardedDataset
    from lazyshard.data.iterable import LazyShardedIterable, LazyShardedStream
    from lazyshard.data.iterable_shard import streaming_shard
    from lazyshard.data.loading import load
    from lazyshard.data.map_style import Batches
    from lazyshard.data.samples import LateRow, as_tensor
    from lazyshard.data.sequence_forms import Pack, Pad, Split
    from lazyshard.data.sequences import LazyShardedSequences
    from lazyshard.data.settings import BadRows, EncodeCache, Filter, Map, MessageTransform, Order
    from lazyshard.format.arrays import BFLOAT16
    from lazyshard.inspection.row_facts import weights_by_tokens
    from lazyshard.plan.shuffle import window_for_distance
    from lazyshard.stream import ChunkWriter, StreamReader

__all__ = ["BFLOAT16", "BadRows", "Batches", "BlendedDataset", "ChunkWriter", "EncodeCache", "Filter", "LateRow"]
__all__ += ["LazyShardError", "LazyShardedDataset", "LazyShardedIterable", "LazyShardedSequences", "LazyShardedStream"]
__all__ += ["Map", "MessageTransform", "Order", "Pack", "Pad", "Split", "StreamReader", "as_tensor", "check_config"]
__all__ += ["errors", "load", "streaming_shard", "weights_by_tokens", "window_for_distance"]

__version__ = "0.1.0"


_OTHERS: dict[str, tuple[str, ...]] = {"config": ("check_config",), "format.arrays": ("BFLOAT16",)}
_OTHERS |= {"inspection.row_facts": ("weights_by_tokens",), "plan.shuffle": ("window_for_distance",)}
_OTHERS |= {"stream": ("ChunkWriter", "StreamReader")}
_HERE: Final = {"LazyShardError", "errors"}.union(*_OTHERS.values())

_lazily = lazily(__name__, _OTHERS | {"data": tuple(name for name in __all__ if name not in _HERE)})


def __getattr__(name: str) -> Any:
    try:
        return _lazily(name)
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        raise ImportError(f"{name} needs PyTorch: pip install 'lazyshard[torch]'") from cause
