"""Grain in `scripts/bench_loaders`: ArrayRecord files of pickled rows.

As its documentation advises for speed: records one by one in their groups, so that any of them is read without its
neighbours; no reading threads, since the files are in memory; batches made in its own worker processes (`mp_prefetch`).
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from scripts.benchmarks.bench_loaders_cases import BATCH, WORKERS, Opened, Settings
from scripts.benchmarks.bench_resume_loaders import chunk_files


def convert(settings: Settings) -> None:
    """Leaves as many files as there are chunks."""
    writers = importlib.import_module("array_record.python.array_record_module")
    Path(settings.native).mkdir()
    for number, path in enumerate(chunk_files(settings.data)):
        out = Path(settings.native, f"{number:05d}.array_record")
        writer = writers.ArrayRecordWriter(str(out), "group_size:1,uncompressed")
        with open(path, "rb", buffering=1 << 20) as file:
            for line in file:
                writer.write(pickle.dumps(orjson.loads(line), pickle.HIGHEST_PROTOCOL))
        writer.close()


def grain(settings: Settings) -> tuple[Opened, bool]:
    """`MapDataset`, read one by one; as an `IterDataset`, with worker processes or without."""
    package = importlib.import_module("grain")
    files = sorted(str(path) for path in Path(settings.native).iterdir())
    drawn = settings.drawn()

    def opened() -> Iterable[Any]:
        dataset: Any = package.MapDataset.source(package.sources.ArrayRecordDataSource(files)).map(pickle.loads)
        if settings.shuffled:
            dataset = dataset.shuffle(seed=0)
        if settings.case == "random":
            return map(dataset.__getitem__, drawn)
        options = package.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        if not settings.in_workers:
            found: Iterable[Any] = dataset.to_iter_dataset(options)
            return found
        batches = dataset.batch(BATCH, batch_fn=list).to_iter_dataset(options)
        found = batches.mp_prefetch(package.MultiprocessingOptions(num_workers=WORKERS))
        return found

    return opened, settings.in_workers


READERS = {"grain": grain}
CONVERTERS = {"grain": convert}
