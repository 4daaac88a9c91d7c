"""Data sets for training over streams. The only package of lazyshard that imports torch.

`dataset` is the map-style data set, `iterable` its iterable form, `blended` a weighted blend of several streams,
`sequences` packed, split or padded rows, and `loading` builds all of these from a configuration. Below them,
`index_space` maps indices to samples and reads their lines in each process; `samples` makes samples from lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.data.blended import BlendDraw
    from lazyshard.data.iterable_shard import StreamingShard
    from lazyshard.data.loading import Loaded
    from lazyshard.data.rank import Stats, resolve_rank
    from lazyshard.data.settings import Step

__all__ = ["BlendDraw", "Loaded", "Stats", "Step", "StreamingShard", "resolve_rank"]

# `lazyshard/__init__.py` looks up its own names here as well.
_HOMES: dict[str, tuple[str, ...]] = {}
_HOMES |= {"blended": ("BlendDraw", "BlendedDataset"), "dataset": ("LazyShardedDataset",), "map_style": ("Batches",)}
_HOMES |= {"iterable": ("LazyShardedIterable", "LazyShardedStream"), "loading": ("Loaded", "load")}
_HOMES |= {"iterable_shard": ("StreamingShard", "streaming_shard"), "rank": ("Stats", "resolve_rank")}
_HOMES |= {"samples": ("LateRow", "as_tensor")}
_HOMES |= {"sequence_forms": ("Pack", "Pad", "Split"), "sequences": ("LazyShardedSequences",)}
_HOMES |= {"settings": ("BadRows", "EncodeCache", "Filter", "Map", "MessageTransform", "Order", "Step")}

__getattr__ = lazily(__name__, _HOMES)
