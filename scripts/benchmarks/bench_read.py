"""Throughput of `LazyShardedDataset` compared with `orjson.loads` over the same lines; first sample; memory; blends.

Any reader of JSON lines must at least parse them: `orjson.loads` over the memory-mapped lines, without digests, order
or index. All figures are CPU time of one process, except for the first sample: wall time of a fresh process, from the
constructor on, without imports.
"""

from __future__ import annotations

import functools
import mmap
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard import BlendedDataset, LazyShardedDataset, Order
from scripts.benchmarks.bench_data import BATCH, chunk_files, make_many_chunks, make_stream
from scripts.benchmarks.bench_harness import Benchmark, Figures, Row, Setting, Side, child
from scripts.benchmarks.bench_process import memory_mb, timed

PARSING: Final = "orjson.loads alone"
WINDOWS: Final = Order(shuffle_window=4)
SHARES: Final = (0.8, 0.2)
_UNIT: Final = "processor us"


def parse(directory: Path) -> int:
    """Parses every line and does nothing else; returns the rows."""
    rows = 0
    for path in chunk_files(directory):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            for line in iter(lines.readline, b""):
                orjson.loads(line)
                rows += 1
    return rows


def opened(directory: Path, **options: Any) -> LazyShardedDataset:
    """Opens a stream for a single rank."""
    return LazyShardedDataset(directory, dp_rank=0, dp_size=1, batch_size=BATCH, **options)


def in_order(directory: Path) -> None:
    """`ds[i]`, one by one."""
    dataset = opened(directory)
    for index in range(len(dataset)):
        dataset[index]


def at_random(directory: Path) -> None:
    """`ds[i]` in an order over the whole stream."""
    dataset = opened(directory)
    for index in random.Random(0).sample(range(len(dataset)), len(dataset)):
        dataset[index]


def in_batches(dataset: LazyShardedDataset | BlendedDataset) -> None:
    """`ds.__getitems__`, as a DataLoader's worker calls it."""
    total = len(dataset)
    for start in range(0, total, BATCH):
        dataset.__getitems__(list(range(start, min(start + BATCH, total))))


def blended(place: Path, rows: int, **options: Any) -> BlendedDataset:
    """A blend of two streams that have as many rows together."""
    parts = [(opened(make_stream(place / f"part_{share}", round(rows * share)), **options), share) for share in SHARES]
    return BlendedDataset(parts, batch_size=BATCH)


def first_sample(directory: str, place: int) -> dict[str, float]:
    """In a fresh process: milliseconds from construction to a sample."""
    import lazyshard

    # Imported when first asked for.
    _ = lazyshard.LazyShardedDataset
    start = time.perf_counter()
    dataset = lazyshard.LazyShardedDataset(directory, dp_rank=0, dp_size=8)
    dataset[place * 8 % len(dataset)]
    return {"ms": (time.perf_counter() - start) * 1e3}


def memory_of_a_pass(directory: str) -> dict[str, float]:
    """In a fresh process: MB resident after a fifth of a pass, and at its end."""
    dataset = opened(Path(directory))
    total, early = len(dataset), 0.0
    for index in range(total):
        dataset[index]
        if index == total // 5:
            early = memory_mb()["resident"]
    return {"early": early, "late": memory_mb()["resident"]}


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides."""
    rows = setting.size(100_000, 2_000)
    place = setting.place

    def reading(text: str, work: Callable[[Path], object]) -> Side:
        return lambda: timed(functools.partial(work, make_stream(place / text, rows, text)), rows)

    def blending(**options: Any) -> Side:
        def work() -> Figures:
            dataset = blended(place, rows, **options)
            # Its table is made before.
            dataset[0]
            return timed(lambda: in_batches(dataset), rows)

        return work

    places = iter(range(0, 1 << 30, 997))

    @functools.cache
    def chunks(count: int) -> str:
        return str(make_many_chunks(place / f"chunks_{count}", count))

    def first(count: int) -> Side:
        return lambda: child("bench_read.first_sample", {"directory": chunks(count), "place": next(places)}, place)

    many = setting.size(20_000, 200)

    def late() -> Figures:
        return child("bench_read.memory_of_a_pass", {"directory": chunks(many)}, place)

    return {
        PARSING: reading("prose", parse),
        "ds[i] in order": reading("prose", in_order),
        "batches of 8": reading("prose", lambda directory: in_batches(opened(directory))),
        "windows of 4 chunks": reading("prose", lambda directory: in_batches(opened(directory, order=WINDOWS))),
        "ds[i] at random": reading("prose", at_random),
        "a blend of two": blending(),
        "a blend of two, windows": blending(order=WINDOWS),
        "orjson.loads alone, plain text": reading("plain", parse),
        "batches of 8, plain text": reading("plain", lambda directory: in_batches(opened(directory))),
        "first sample of 20,000 chunks": first(many),
        "first sample of 20 chunks": first(20),
        "resident at the end of a pass": lambda: {"MB": late()["late"]},
        "after a fifth of it": lambda: {"MB": late()["early"]},
    }


READ: Final = Benchmark(
    "read",
    "a row of 2 KB out of a stream, against parsing alone; the first sample; memory of 20,000 chunks",
    (
        Row("order", "ds[i] in order", PARSING, _UNIT, 0.8),
        Row("batches", "batches of 8", PARSING, _UNIT, 0.8),
        Row("windows", "windows of 4 chunks", PARSING, _UNIT, 0.7),
        Row("random", "ds[i] at random", PARSING, _UNIT, 0.2),
        Row("plain", "batches of 8, plain text", "orjson.loads alone, plain text", _UNIT, 0.7),
        Row("blend", "a blend of two", "batches of 8", _UNIT, 0.95),
        Row("blend-windows", "a blend of two, windows", "windows of 4 chunks", _UNIT, 0.95),
        Row("first-sample", "first sample of 20,000 chunks", "first sample of 20 chunks", "ms", 0.7),
        Row("memory", "resident at the end of a pass", "after a fifth of it", "MB", 0.97),
    ),
    prepare,
)
