"""What a configuration says, once it is found to be in order: version 1.

::

    version: 1
    tokenizer:
      path: models/tokenizer              a local directory of a Hugging Face tokenizer
      max_length: 4096                    tokens; longer samples are dropped, or cut with too_long: truncate
    datasets:
      - path: /shared/chat                a stream
        weight: 0.8
        steps:                            in order, each one of the three
          - filter_fn: my_rows:is_long
          - map: {function: my_rows:number, with_indices: true, remove_columns: [id]}
          - message_transform: my_rows:to_messages
      - path: /shared/code
        weight: 0.2
        max_error_count: 10
    dataloader:
      batch_size: 8
      num_workers: 4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["VERSION", "Config", "DatasetConfig", "Function", "LoaderConfig", "StepConfig", "TokenizerConfig"]

VERSION: Final = 1

Function = str | Callable[..., Any]
"""The name of a function; in a dict it may be the function itself."""


@dataclass(frozen=True)
class TokenizerConfig:
    """``tokenizer:``.

    Attributes:
        path: directory of the tokenizer.
        max_length: most tokens of a sample; None for any number.
        too_long: what becomes of a longer one: "drop" or "truncate".
    """

    path: str
    max_length: int | None
    too_long: str


@dataclass(frozen=True)
class StepConfig:
    """One of ``steps:``.

    Attributes:
        kind: "message_transform", "filter_fn" or "map".
        function: what it calls.
        with_indices: whether it is called with the index too.
        remove_columns: columns that a map takes out.
    """

    kind: str
    function: Function
    with_indices: bool
    remove_columns: tuple[str, ...]


@dataclass(frozen=True)
class DatasetConfig:
    """One of ``datasets:``. Attributes as the arguments of `LazyShardedDataset`, but for `path` and `weight`."""

    path: str
    weight: float
    steps: tuple[StepConfig, ...]
    max_error_count: int | None
    unit: str | int
    shuffle_window: int
    max_total_samples: int | None
    samples_per_chunk: int | None
    cache_bytes: int


@dataclass(frozen=True)
class LoaderConfig:
    """``dataloader:``. Attributes as the arguments of torch's `DataLoader`, but for these two.

    Attributes:
        form: "stream" for an iterable, which needs no length, "map" for a map-style data set.
        at_end: what becomes of the samples left over at the end of an epoch.
    """

    form: str
    at_end: str
    batch_size: int
    num_workers: int
    collate_fn: Function | None
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: str | None


@dataclass(frozen=True)
class Config:
    """The whole. Attributes as the arguments of `LazyShardedDataset` and `BlendedDataset`, but for the first three."""

    tokenizer: TokenizerConfig | None
    datasets: tuple[DatasetConfig, ...]
    dataloader: LoaderConfig
    num_samples: int | None
    stopping: str
    micro_batches_per_step: int | None
    seed: int
    max_wait: float
    consumer: str | None
