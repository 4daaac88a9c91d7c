"""The least that any reader must do, for `scripts/bench_loaders`: the bytes, parsing; and the least data set there is.

The latter knows where each row begins, and no more: no digests, no order of its own, no growing stream, no state. It is
there by itself, as a third floor, and below torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import importlib
import itertools
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from scripts.benchmarks.bench_loaders_cases import BATCH, WORKERS, Opened, Row, Settings
from scripts.benchmarks.bench_resume_loaders import MapRows, chunk_files

_BLOCK_BYTES: Final = 1 << 20


def read_bytes(settings: Settings) -> tuple[Any, None]:
    """Reads the files and does nothing else; returns bytes in place of rows."""

    def opened() -> int:
        block, total = bytearray(_BLOCK_BYTES), 0
        for path in chunk_files(settings.data):
            with Path(path).open("rb", buffering=0) as file:
                while size := file.readinto(block):
                    total += size
        return total

    return opened, None


def parsed(path: str) -> Iterator[Row]:
    """Yields the rows of a file, which is mapped."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        yield from map(orjson.loads, iter(lines.readline, b""))


def parse(settings: Settings) -> tuple[Opened, bool]:
    """`orjson.loads` over the lines, memory-mapped: no digests, no order, no index."""
    return lambda: itertools.chain.from_iterable(map(parsed, chunk_files(settings.data))), False


def map_style(loader: Any, settings: Settings) -> tuple[Opened, bool]:
    """The least data set: by itself, or in a loader of torch's kind."""
    drawn = settings.drawn()
    if settings.case == "shuffled":
        import random

        random.Random(0).shuffle(drawn)

    def opened() -> Iterable[Any]:
        dataset = MapRows(settings.data, settings.offsets)
        if not settings.in_workers:
            return map(dataset.__getitem__, drawn)
        found: Iterable[Any] = loader(
            dataset, batch_size=BATCH, shuffle=settings.shuffled, num_workers=WORKERS, collate_fn=list
        )
        return found

    return opened, settings.in_workers


def minimal(settings: Settings) -> tuple[Opened, bool]:
    """The least data set in torch's DataLoader."""
    return map_style(importlib.import_module("torch.utils.data").DataLoader, settings)


def torchdata(settings: Settings) -> tuple[Opened, bool]:
    """The least data set in torchdata's StatefulDataLoader; by itself it is the same as `minimal`."""
    return map_style(importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader, settings)


READERS = {"bytes": read_bytes, "orjson": parse, "minimal": minimal, "torchdata": torchdata}
