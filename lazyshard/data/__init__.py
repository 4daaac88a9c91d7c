"""Streams as data sets for training. The only place of lazyshard that imports torch.

- `dataset`: the data set; `batches`: its micro batches, counted, for a training loop; `iterable`: the same as an
  iterable, by `lane_passes`, with `stream_states`; `node`: as a source of torchdata.nodes
- `index_space`, one an epoch (`epoch_spaces`): what its indices mean, by `order` and `rank`; `auto_unit`: what is dealt
- `run_states`: where a run stands; `state_checks`: whether the stream still holds what it needs to go on
- `reading_marks`, `commits`: what the producer is told of that
- `lane_reader`: reads the rows of indices; `late_row`: one that is parsed where it is looked at
- `samples`: from a row to a sample, by `steps`, `encode` and `cache`; `bad_samples`: what happens where that fails;
  `substitutes`: which row takes its place, but for `dropped_rows`
- `encode_cache`: what was made of rows, kept for all processes of a node, opened by `encode_cache_opening`;
  `exact_values`: as what
- `shared`: what a data set's processes tell each other; `worker_parent`: for whom a worker works
- `blended`: several streams as one data set, as `blend_settings` allows, read by `blend_reader`; `blend_space`, one an
  epoch (`blend_spaces`): what its indices mean; `blend_states`: where a run stands, its streams with it (`blend_run`)
- `tensors`: a row's array as a tensor; `streaming_shard`: one shard of any other iterable
- `index_lengths`: how long samples are in tokens, by index
- `sequences`: rows packed, split or padded while training reads, as `sequence_forms` and `sequence_settings` say: by
  `sequence_planner`, made by `sequence_maker`, handed out by `sequence_passes`; `sequence_checks`: whether that can be
  done; `sequence_states`: where a run stands; `sequence_counts`: after so many sequences
- `loading`: all of it as one configuration says; `tokenized`: samples of tokens, and batches of them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.data.batches import Batches
    from lazyshard.data.blended import BlendDraw, BlendedDataset
    from lazyshard.data.dataset import LazyShardedDataset
    from lazyshard.data.iterable import LazyShardedIterable, LazyShardedStream
    from lazyshard.data.loading import Loaded, load
    from lazyshard.data.rank import resolve_rank
    from lazyshard.data.samples import LateRow
    from lazyshard.data.sequence_forms import Pack, Pad, Split
    from lazyshard.data.sequences import LazyShardedSequences
    from lazyshard.data.shared import Stats
    from lazyshard.data.steps import Filter, Map, MessageTransform, Step
    from lazyshard.data.streaming_shard import StreamingShard, streaming_shard
    from lazyshard.data.tensors import as_tensor

__all__ = [
    "Batches",
    "BlendDraw",
    "BlendedDataset",
    "Filter",
    "LateRow",
    "LazyShardedDataset",
    "LazyShardedIterable",
    "LazyShardedSequences",
    "LazyShardedStream",
    "Loaded",
    "Map",
    "MessageTransform",
    "Pack",
    "Pad",
    "Split",
    "Stats",
    "Step",
    "StreamingShard",
    "as_tensor",
    "load",
    "resolve_rank",
    "streaming_shard",
]

_HOMES: Final = {
    "batches": ("Batches",),
    "blended": (
        "BlendDraw",
        "BlendedDataset",
    ),
    "dataset": ("LazyShardedDataset",),
    "iterable": (
        "LazyShardedIterable",
        "LazyShardedStream",
    ),
    "loading": (
        "Loaded",
        "load",
    ),
    "rank": ("resolve_rank",),
    "samples": ("LateRow",),
    "sequence_forms": (
        "Pack",
        "Pad",
        "Split",
    ),
    "sequences": ("LazyShardedSequences",),
    "shared": ("Stats",),
    "steps": (
        "Filter",
        "Map",
        "MessageTransform",
        "Step",
    ),
    "streaming_shard": (
        "StreamingShard",
        "streaming_shard",
    ),
    "tensors": ("as_tensor",),
}

__getattr__ = lazily(__name__, _HOMES)
