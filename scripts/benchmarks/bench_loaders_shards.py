"""MosaicML streaming and litdata in `scripts/bench_loaders`: shards of the writer's own, about 64 MB each.

As their documentations advise for speed: the files are local, uncompressed and not hashed again when read; the batch
size is told to the data set; each has its own kind of DataLoader.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from scripts.benchmarks.bench_loaders_cases import BATCH, COLUMNS, WORKERS, Opened, Row, Settings
from scripts.benchmarks.bench_resume_loaders import chunk_files

_SHARD_MB = 64


def rows_of(path: str) -> Iterator[Row]:
    """Yields the parsed rows of a file."""
    with open(path, "rb", buffering=1 << 20) as file:
        yield from map(orjson.loads, file)


def _streaming() -> Any:
    # By its bare name, as it names its own neighbours.
    importlib.import_module("bench_producer_peers").stand_in_for_torchvision()
    return importlib.import_module("streaming")


def convert_mosaicml(settings: Settings) -> None:
    """MDSWriter: text as text, messages as JSON."""
    kinds = {"id": "int", "messages": "json", "text": "str", "image": "str"}
    columns = {name: kinds[name] for name in COLUMNS[settings.which]}
    with _streaming().MDSWriter(out=settings.native, columns=columns, size_limit=_SHARD_MB << 20) as writer:
        for row in itertools.chain.from_iterable(map(rows_of, chunk_files(settings.data))):
            writer.write(row)


def mosaicml(settings: Settings) -> tuple[Opened, bool]:
    """`StreamingDataset`, by itself, or in its StreamingDataLoader."""
    streaming = _streaming()
    # What a process that was killed may have left behind.
    streaming.base.util.clean_stale_shared_memory()
    drawn = settings.drawn()

    def opened() -> Iterable[Any]:
        dataset = streaming.StreamingDataset(
            local=settings.native,
            batch_size=BATCH,
            num_canonical_nodes=1,
            shuffle=settings.shuffled,
            shuffle_block_size=settings.window_rows,
        )
        if settings.in_workers:
            # It counts the rows of a batch by the first of its columns.
            loader = streaming.StreamingDataLoader(
                dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=lambda rows: {"rows": rows}
            )
            return (batch["rows"] for batch in loader)
        if settings.case == "random":
            return map(dataset.__getitem__, drawn)
        found: Iterable[Any] = dataset
        return found

    return opened, settings.in_workers


def convert_litdata(settings: Settings) -> None:
    """`optimize`, one worker, which is a process of its own."""
    importlib.import_module("litdata").optimize(
        fn=rows_of,
        inputs=chunk_files(settings.data),
        output_dir=settings.native,
        chunk_bytes=f"{_SHARD_MB}MB",
        num_workers=1,
        keep_data_ordered=True,
        verbose=False,
    )


def litdata(settings: Settings) -> tuple[Opened, bool]:
    """`StreamingDataset`, by itself, or in its StreamingDataLoader."""
    package = importlib.import_module("litdata")
    drawn = settings.drawn()

    def opened() -> Iterable[Any]:
        dataset = package.StreamingDataset(settings.native, shuffle=settings.shuffled, drop_last=False)
        if settings.in_workers:
            found: Iterable[Any] = package.StreamingDataLoader(
                dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=list
            )
            return found
        return map(dataset.__getitem__, drawn) if settings.case == "random" else dataset

    return opened, settings.in_workers


READERS = {"mosaicml-streaming": mosaicml, "litdata": litdata}
CLEANERS = {"mosaicml-streaming": lambda: _streaming().base.util.clean_stale_shared_memory()}
CONVERTERS = {"mosaicml-streaming": convert_mosaicml, "litdata": convert_litdata}
