"""One process of `scripts/bench loaders`: reads all rows once, in the environment of that loader.

Each loader is used as its documentation recommends for speed: files are local, uncompressed and not hashed when read;
batches are made in the workers; shuffles cover 4 chunks, or a buffer with as many rows. Imports are local to each
loader.
"""

from __future__ import annotations

import base64
import importlib
import io
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_formats import Row, all_rows, streaming
from scripts.benchmarks.bench_loaders_rows import MapRows, chunk_files
from scripts.benchmarks.bench_process import processor_s, session_mb

BATCH: Final = 8
WORKERS: Final = 2
WINDOW_CHUNKS: Final = 4
Opened = Callable[[], Iterable[Any]]
"""Constructs a loader and returns its rows, or its batches; only this is measured."""


@dataclass(frozen=True)
class Settings:
    """What the process is told.

    Attributes:
        loader: one of `LOADERS`.
        data: directory of the stream with the rows.
        native: the rows in the format of this loader; "" where it reads them as they are.
        offsets: file that says where each row begins.
        case: order, shuffled, random, loader (two workers), loader-shuffled or loader-decoding.
        drawn: how many rows are read, fewer than all at random.
        rows: how many there are; row i has the id i.
        samples_per_chunk: rows of each chunk file.
        probe: id of the row that is returned as a whole.
    """

    loader: str
    data: str
    native: str
    offsets: str
    case: str
    drawn: int
    rows: int
    samples_per_chunk: int
    probe: int

    @property
    def shuffled(self) -> bool:
        """Whether rows are read in another order than written."""
        return self.case.endswith("shuffled")

    @property
    def in_workers(self) -> bool:
        """Whether worker processes read."""
        return self.case.startswith("loader")

    @property
    def window_rows(self) -> int:
        """Rows that are shuffled together."""
        return min(self.rows, WINDOW_CHUNKS * self.samples_per_chunk)

    @property
    def order(self) -> list[int]:
        """The ids that are read where they are asked for one by one."""
        if self.case == "random":
            return random.Random(0).sample(range(self.rows), self.drawn)
        return list(range(self.rows))


def parsing(settings: Settings) -> tuple[Opened, bool]:
    """`orjson.loads` over the lines: no digests, no order, no index."""
    return lambda: all_rows(chunk_files(settings.data)), False


def map_style(settings: Settings, module: str, loader: str) -> tuple[Opened, bool]:
    """The least data set: by itself, or in a loader of torch's kind."""
    loader_of: Any = getattr(importlib.import_module(module), loader)
    order = settings.order
    if settings.case == "shuffled":
        random.Random(0).shuffle(order)

    def opened() -> Iterable[Any]:
        dataset = MapRows(settings.data, settings.offsets)
        if not settings.in_workers:
            return map(dataset.__getitem__, order)
        found: Iterable[Any] = loader_of(
            dataset, batch_size=BATCH, shuffle=settings.shuffled, num_workers=WORKERS, collate_fn=list
        )
        return found

    return opened, settings.in_workers


def lazyshard(settings: Settings, late: bool = True) -> tuple[Opened, bool]:
    """`ds[i]`, `ds.__getitems__` in batches where shuffled, or torch's DataLoader; every row's digest is checked.

    Args:
        settings: what to read, and how.
        late: whether rows cross from the workers as they lie on disk, to be parsed in the main process.
    """
    ours = importlib.import_module("lazyshard")  # its packages are not in the environments of others
    loader_of = importlib.import_module("torch.utils.data").DataLoader
    # It imports its modules when it is first asked for: imports are not counted.
    dataset_of = ours.LazyShardedDataset
    order, batched = settings.order, settings.in_workers or settings.shuffled

    def opened() -> Iterable[Any]:
        window = WINDOW_CHUNKS if settings.shuffled else 0
        encode = ours.LateRow if late else decode if settings.case.endswith("decoding") else None
        options = {"batch_size": BATCH, "dp_rank": 0, "dp_size": 1, "encode_fn": encode}
        dataset = dataset_of(settings.data, order=ours.Order(shuffle_window=window), **options)
        if settings.in_workers:
            indices = dataset.rank_indices
            found: Iterable[Any] = loader_of(dataset, BATCH, sampler=indices, num_workers=WORKERS, collate_fn=list)
            return found
        if batched:
            return map(dataset.__getitems__, (order[at : at + BATCH] for at in range(0, len(order), BATCH)))
        return map(dataset.__getitem__, order)

    return opened, batched


def decode(row: Row) -> Row:
    """Decodes the photo of a row, and returns the row."""
    importlib.import_module("PIL.Image").open(io.BytesIO(row["media"])).load()
    return row


class _InMemory(list[Row]):
    def __getitem__(self, index: Any) -> Any:
        return decode(super().__getitem__(index))


def decoding(settings: Settings) -> tuple[Opened, bool]:
    """`decode` of rows that are in memory, in workers of torch's DataLoader."""
    rows = _InMemory(importlib.import_module("lazyshard").StreamReader(settings.data))
    loader_of = importlib.import_module("torch.utils.data").DataLoader
    return lambda: loader_of(rows, BATCH, num_workers=WORKERS, collate_fn=list), True


def datasets(settings: Settings) -> tuple[Opened, bool]:
    """`Dataset`, memory-mapped Arrow, by itself or in torch's DataLoader."""
    load = importlib.import_module("datasets").load_from_disk
    loader_of = importlib.import_module("torch.utils.data").DataLoader
    order = settings.order

    def opened() -> Iterable[Any]:
        dataset: Any = load(settings.native)
        if settings.in_workers:
            dataset = loader_of(dataset, BATCH, shuffle=settings.shuffled, num_workers=WORKERS, collate_fn=list)
        elif settings.case == "random":
            return map(dataset.__getitem__, order)
        elif settings.shuffled:
            dataset = dataset.shuffle(seed=0, keep_in_memory=True)
        found: Iterable[Any] = dataset
        return found

    return opened, settings.in_workers


def datasets_streaming(settings: Settings) -> tuple[Opened, bool]:
    """`IterableDataset` over the same files, a shard for each chunk, by itself or in torch's DataLoader."""
    load = importlib.import_module("datasets").load_from_disk
    # It imports torch itself, when it is first iterated: imports are not counted.
    loader_of = importlib.import_module("torch.utils.data").DataLoader
    shards = len(chunk_files(settings.data))

    def opened() -> Iterable[Any]:
        dataset: Any = load(settings.native).to_iterable_dataset(num_shards=shards)
        if settings.shuffled:
            dataset = dataset.shuffle(seed=0, buffer_size=settings.window_rows)
        found: Iterable[Any] = dataset
        return loader_of(dataset, BATCH, num_workers=WORKERS, collate_fn=list) if settings.in_workers else found

    return opened, settings.in_workers


def mosaicml(settings: Settings) -> tuple[Opened, bool]:
    """`StreamingDataset` of MDS, by itself or in its StreamingDataLoader."""
    package = streaming()
    order = settings.order

    def opened() -> Iterable[Any]:
        dataset = package.StreamingDataset(
            local=settings.native,
            batch_size=BATCH,
            num_canonical_nodes=1,
            shuffle=settings.shuffled,
            shuffle_block_size=settings.window_rows,
        )
        if settings.in_workers:
            # It counts the rows of a batch by the first of its columns.
            loader = package.StreamingDataLoader(
                dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=lambda rows: {"rows": rows}
            )
            return (batch["rows"] for batch in loader)
        found: Iterable[Any] = dataset
        return map(dataset.__getitem__, order) if settings.case == "random" else found

    return opened, settings.in_workers


def _with_bytes(row: Row) -> Row:
    # A memoryview of a shard, which does not cross to another process.
    return row | {"media": bytes(row["media"])} if "media" in row else row


def litdata(settings: Settings) -> tuple[Opened, bool]:
    """`StreamingDataset`, by itself or in its StreamingDataLoader."""
    package = importlib.import_module("litdata")
    order = settings.order

    def opened() -> Iterable[Any]:
        options = {"shuffle": settings.shuffled, "drop_last": False, "transform": _with_bytes}
        dataset = package.StreamingDataset(settings.native, **options)
        if settings.in_workers:
            dataset = package.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=list)
        found: Iterable[Any] = dataset
        return map(dataset.__getitem__, order) if settings.case == "random" else found

    return opened, settings.in_workers


def _from_tar(sample: Row) -> Row:
    row: Row = importlib.import_module("orjson").loads(sample["json"])
    if "image" in sample:
        row["image"] = sample["image"].decode("ascii")
    elif "media" in sample:
        row["media"] = sample["media"]
    return row


def webdataset(settings: Settings) -> tuple[Opened, bool]:
    """`WebDataset` of tars, by itself or in its WebLoader."""
    package = importlib.import_module("webdataset")
    shards = sorted(str(path) for path in Path(settings.native).glob("*.tar"))

    def opened() -> Iterable[Any]:
        dataset = package.WebDataset(shards, shardshuffle=len(shards) if settings.shuffled else False, seed=0)
        if settings.shuffled:
            dataset = dataset.shuffle(settings.window_rows)
        found: Any = dataset.map(_from_tar)
        if settings.in_workers:
            found = package.WebLoader(found.batched(BATCH, collation_fn=list), batch_size=None, num_workers=WORKERS)
        rows: Iterable[Any] = found
        return rows

    return opened, settings.in_workers


def energon(settings: Settings) -> tuple[Opened, bool]:
    """Its loader over crude samples of tars, which a cooker parses; in order as for validation."""
    package = importlib.import_module("megatron.energon")

    @package.stateless  # type: ignore[untyped-decorator]
    def cook(sample: Row) -> Any:
        return package.TextSample(**package.basic_sample_keys(sample), text=_from_tar(sample))

    class Rows(package.DefaultTaskEncoder):  # type: ignore[name-defined, misc]
        decoder = None
        cookers = (package.Cooker(cook),)

        @package.stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @package.stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Any]) -> list[Row]:
            return [sample.text for sample in samples]

    def opened() -> Iterable[Any]:
        workers = package.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS if settings.in_workers else 0)
        options = {"split_part": "train", "worker_config": workers, "batch_size": BATCH, "task_encoder": Rows()}
        dataset_of = package.get_val_dataset
        if settings.shuffled:
            options |= {"shuffle_buffer_size": settings.window_rows, "max_samples_per_sequence": 100, "repeat": False}
            dataset_of = package.get_train_dataset
        found: Iterable[Any] = package.get_loader(dataset_of(settings.native, **options))
        return found

    return opened, True


def grain(settings: Settings) -> tuple[Opened, bool]:
    """`MapDataset` of ArrayRecord, one by one; as an `IterDataset`, with worker processes or without."""
    package = importlib.import_module("grain")
    files = sorted(str(path) for path in Path(settings.native).iterdir())
    order = settings.order

    def opened() -> Iterable[Any]:
        dataset: Any = package.MapDataset.source(package.sources.ArrayRecordDataSource(files)).map(pickle.loads)
        if settings.shuffled:
            dataset = dataset.shuffle(seed=0)
        if settings.case == "random":
            return map(dataset.__getitem__, order)
        # No reading threads, since the files are in memory.
        options = package.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        if settings.in_workers:
            batches = dataset.batch(BATCH, batch_fn=list).to_iter_dataset(options)
            dataset = batches.mp_prefetch(package.MultiprocessingOptions(num_workers=WORKERS))
        else:
            dataset = dataset.to_iter_dataset(options)
        found: Iterable[Any] = dataset
        return found

    return opened, settings.in_workers


LOADERS: Final[dict[str, Callable[[Settings], tuple[Opened, bool]]]] = {
    "parsing": parsing,
    "minimal": lambda settings: map_style(settings, "torch.utils.data", "DataLoader"),
    "lazyshard": lazyshard,
    "lazyshard-dicts": lambda settings: lazyshard(settings, late=False),
    "decoding": decoding,
    "torchdata": lambda settings: map_style(settings, "torchdata.stateful_dataloader", "StatefulDataLoader"),
    "datasets": datasets,
    "datasets-streaming": datasets_streaming,
    "mosaicml-streaming": mosaicml,
    "litdata": litdata,
    "webdataset": webdataset,
    "megatron-energon": energon,
    "grain": grain,
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    """Reads everything once; returns what was read and its cost: us, CPU us, MB of all processes at the end."""
    told = Settings(**settings)
    opened, batched = LOADERS[told.loader](told)
    orjson = importlib.import_module("orjson")
    number = ids = 0
    kept: Row = {}
    processor, clock = processor_s(), time.perf_counter()
    rows = itertools.chain.from_iterable(opened()) if batched else opened()
    for row in rows:
        number += 1
        ids += row["id"]
        if row["id"] == told.probe:
            kept = row
    seconds = time.perf_counter() - clock
    used = processor_s() - processor
    # Workers that wait for the next epoch are still there.
    held = session_mb()
    # webdataset adds fields of its own; NumPy's integers are integers too.
    kept = {name: value for name, value in kept.items() if not name.startswith("__")}
    probe = orjson.dumps(kept, lambda data: base64.b64encode(data).decode(), orjson.OPT_SERIALIZE_NUMPY).decode()
    return {
        "rows": number,
        "ids": int(ids),
        "probe": probe,
        "us": seconds * 1e6,
        "processor us": used * 1e6,
        "MB": held,
    }
