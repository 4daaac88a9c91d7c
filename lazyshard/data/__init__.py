"""Streams as data sets for training. The only package of lazyshard that imports torch.

`dataset` is the map-style data set, `iterable` the same as an iterable, `blended` several streams as one, `sequences`
packed, split or padded rows, `loading` all of it by a configuration. Below them, `index_space` says which samples the
indices draw, and reads their lines in each process; `samples` makes samples of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.data.blended import BlendDraw, BlendedDataset
    from lazyshard.data.dataset import LazyShardedDataset
    from lazyshard.data.indexed import Batches
    from lazyshard.data.iterable import LazyShardedIterable, LazyShardedStream
    from lazyshard.data.iterable_shard import StreamingShard, streaming_shard
    from lazyshard.data.loading import Loaded, load
    from lazyshard.data.rank import Stats, resolve_rank
    from lazyshard.data.samples import LateRow
    from lazyshard.data.sequence_forms import Pack, Pad, Split
    from lazyshard.data.sequences import LazyShardedSequences
    from lazyshard.data.settings import BadRows, EncodeCache, Order
    from lazyshard.data.steps import Filter, Map, MessageTransform, Step
    from lazyshard.data.tensors import as_tensor

__all__ = ["BadRows", "Batches", "BlendDraw", "BlendedDataset", "EncodeCache", "Filter", "LateRow"]
__all__ += ["LazyShardedDataset", "LazyShardedIterable", "LazyShardedSequences", "LazyShardedStream", "Loaded", "Map"]
__all__ += ["MessageTransform", "Order", "Pack", "Pad", "Split", "Stats", "Step", "StreamingShard", "as_tensor", "load"]
__all__ += ["resolve_rank", "streaming_shard"]

_HOMES: dict[str, tuple[str, ...]] = {}
_HOMES |= {"blended": ("BlendDraw", "BlendedDataset"), "dataset": ("LazyShardedDataset",), "indexed": ("Batches",)}
_HOMES |= {"iterable": ("LazyShardedIterable", "LazyShardedStream"), "loading": ("Loaded", "load")}
_HOMES |= {"iterable_shard": ("StreamingShard", "streaming_shard"), "rank": ("Stats", "resolve_rank")}
_HOMES |= {"samples": ("LateRow",), "sequence_forms": ("Pack", "Pad", "Split"), "sequences": ("LazyShardedSequences",)}
_HOMES |= {"settings": ("BadRows", "EncodeCache", "Order"), "tensors": ("as_tensor",)}
_HOMES |= {"steps": ("Filter", "Map", "MessageTransform", "Step")}

__getattr__ = lazily(__name__, _HOMES)
