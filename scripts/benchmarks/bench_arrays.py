"""Writers and readers of arrays for `scripts/bench encode`: rows with 1 MiB of float32, in batches of 8.

Each package is used as its documentation shows for such arrays, with local uncompressed files, in one process. Runs in
the environment of each package, so imports are local to its code.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.benchmarks.bench_formats import SHARD_BYTES, streaming

ROWS: Final = 128
"""They stay in memory, so that no disk is measured."""

BATCH: Final = 8
SHAPE: Final = (256, 1024)
ROW_BYTES: Final = 1 << 20
_PER_FILE: Final = 32

Batches = Iterator[Any]


def rows(numbers: Any = range(ROWS)) -> Iterator[dict[str, Any]]:
    """Yields rows, the same wherever they are made."""
    for number in numbers:
        yield {"id": number, "features": np.random.default_rng(number).random(SHAPE, np.float32)}


def row(number: int) -> dict[str, Any]:
    """Returns one row."""
    return next(rows([number]))


def write_bytes(place: Path) -> None:
    """A file for so many rows, as the side files of a stream are."""
    place.mkdir()
    for number in range(0, ROWS, _PER_FILE):
        with (place / f"{number // _PER_FILE}.bytes").open("wb") as file:
            file.writelines(found["features"].tobytes() for found in rows(range(number, number + _PER_FILE)))


def _preadv(place: Path, memory: Callable[[int], Any]) -> Batches:
    for number in range(ROWS // _PER_FILE):
        with (place / f"{number}.bytes").open("rb", buffering=0) as file:
            for first in range(0, _PER_FILE, BATCH):
                batch = []
                for at in range(first, first + BATCH):
                    data = memory(at % BATCH)
                    if os.preadv(file.fileno(), [data.data], at * ROW_BYTES) != ROW_BYTES:
                        raise RuntimeError(f"{file.name} is shorter than it was")
                    batch.append(data)
                yield batch


def read_bytes(place: Path) -> Callable[[], Batches]:
    """The floor: one system call per row, into new memory, with a batch of rows in memory."""
    return lambda: _preadv(place, lambda _: np.empty(ROW_BYTES, np.uint8))


def read_bytes_again(place: Path) -> Callable[[], Batches]:
    """The same into memory of which all was touched before."""
    held = [np.zeros(ROW_BYTES, np.uint8) for _ in range(BATCH)]
    return lambda: _preadv(place, held.__getitem__)


def write_lazyshard(place: Path) -> None:
    """A stream with side files."""
    with importlib.import_module("lazyshard").ChunkWriter(place, _PER_FILE, arrays=True) as writer:
        for found in rows():
            writer.write(found)


def read_lazyshard(place: Path) -> Callable[[], Batches]:
    """`LazyShardedDataset`, a batch at a time as a DataLoader asks for it; each row is checked against its digests."""
    ours = importlib.import_module("lazyshard")
    dataset = ours.LazyShardedDataset(
        place, lambda found: found["features"], dp_rank=0, dp_size=1, bad_rows=ours.BadRows("raise")
    )
    return lambda: (dataset.__getitems__(list(range(first, first + BATCH))) for first in range(0, ROWS, BATCH))


def write_mosaicml(place: Path) -> None:
    """MDSWriter with a column of the array's dtype and shape."""
    columns = {"id": "int", "features": "ndarray:float32:" + ",".join(map(str, SHAPE))}
    with streaming().MDSWriter(out=str(place), columns=columns, size_limit=SHARD_BYTES) as writer:
        for found in rows():
            writer.write(found)


def read_mosaicml(place: Path) -> Callable[[], Batches]:
    """`StreamingDataset`, in order, by itself."""
    dataset = streaming().StreamingDataset(local=str(place), batch_size=BATCH, num_canonical_nodes=1, shuffle=False)
    return lambda: _batches(found["features"] for found in dataset)


def write_litdata(place: Path) -> None:
    """`optimize`, one worker."""
    importlib.import_module("litdata").optimize(
        fn=row,
        inputs=list(range(ROWS)),
        output_dir=str(place),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        keep_data_ordered=True,
        verbose=False,
    )


def read_litdata(place: Path) -> Callable[[], Batches]:
    """`StreamingDataset`, in order, by itself."""
    dataset = importlib.import_module("litdata").StreamingDataset(str(place), shuffle=False)
    return lambda: _batches(found["features"] for found in dataset)


def write_datasets(place: Path) -> None:
    """`datasets` with an array feature, saved as Arrow files of as many rows."""
    package = importlib.import_module("datasets")
    package.disable_progress_bars()
    features = package.Features({"id": package.Value("int64"), "features": package.Array2D(SHAPE, "float32")})
    # Its writer makes record batches of so many rows.
    made = package.Dataset.from_generator(rows, features=features, writer_batch_size=BATCH, cache_dir=f"{place}.cache")
    made.save_to_disk(str(place), num_shards=ROWS // _PER_FILE)


def read_datasets(place: Path) -> Callable[[], Batches]:
    """Arrow by `datasets`: memory-mapped, eight rows at a time as numpy arrays."""
    dataset = importlib.import_module("datasets").load_from_disk(str(place)).with_format("numpy")
    return lambda: (dataset[first : first + BATCH]["features"] for first in range(0, ROWS, BATCH))


def write_arrow(place: Path) -> None:
    """Arrow's IPC files, a record batch for each batch."""
    pa: Any = importlib.import_module("pyarrow")
    place.mkdir()
    schema = pa.schema([("id", pa.int64()), ("features", pa.fixed_shape_tensor(pa.float32(), SHAPE))])
    for number in range(0, ROWS, _PER_FILE):
        path = str(place / f"{number // _PER_FILE}.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for first in range(number, number + _PER_FILE, BATCH):
                stacked = np.stack([found["features"] for found in rows(range(first, first + BATCH))])
                tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(stacked)
                writer.write_batch(pa.record_batch([pa.array(range(first, first + BATCH)), tensors], schema=schema))


def _arrow(place: Path, opened: Callable[[Any, str], Any]) -> Batches:
    pa: Any = importlib.import_module("pyarrow")
    for number in range(ROWS // _PER_FILE):
        with opened(pa, str(place / f"{number}.arrow")) as file, pa.ipc.open_file(file) as reader:
            for batch in range(reader.num_record_batches):
                yield reader.get_batch(batch).column("features").to_numpy_ndarray()


def read_arrow(place: Path) -> Callable[[], Batches]:
    """Arrow by itself, its record batches read into memory."""
    return lambda: _arrow(place, lambda pa, path: pa.OSFile(path, "rb"))


def read_arrow_mapped(place: Path) -> Callable[[], Batches]:
    """The same mapped: the arrays are the file's own pages, read-only."""
    return lambda: _arrow(place, lambda pa, path: pa.memory_map(path, "r"))


def _batches(arrays: Iterator[Any]) -> Batches:
    batch = []
    for found in arrays:
        batch.append(found)
        if len(batch) == BATCH:
            yield batch
            batch = []


WRITERS: Final[dict[str, Callable[[Path], None]]] = {
    "bytes": write_bytes,
    "lazyshard": write_lazyshard,
    "litdata": write_litdata,
    "mosaicml-streaming": write_mosaicml,
    "datasets": write_datasets,
    "arrow": write_arrow,
}
"""By the files that they make."""

READERS: Final[dict[str, Callable[[Path], Callable[[], Batches]]]] = {
    "bytes": read_bytes,
    "bytes-again": read_bytes_again,
    "lazyshard": read_lazyshard,
    "litdata": read_litdata,
    "mosaicml-streaming": read_mosaicml,
    "datasets": read_datasets,
    "arrow": read_arrow,
    "arrow-mapped": read_arrow_mapped,
}


def look(batches: Batches) -> tuple[int, int]:
    """Reads one byte of each page of the arrays; returns the rows and the sum of those bytes.

    This also reads arrays that are loaded lazily, such as mapped files.
    """
    count = total = 0
    for batch in batches:
        for array in batch:
            count += 1
            total += int(array.reshape(-1).view(np.uint8)[::4096].sum())
    return count, total


def write(name: str, place: str) -> None:
    """In a process of that package: writes all rows."""
    WRITERS[name](Path(place))


def read(name: str, place: str) -> dict[str, Any]:
    """Returns CPU microseconds per row and a digest of the data; runs in a process of that package.

    Raises:
        RuntimeError: Two passes read different bytes.
    """
    opened = READERS[name](Path(place))
    # A first pass is not counted.
    first = look(opened())
    start = time.process_time()
    counted = look(opened())
    seconds = time.process_time() - start
    if counted != first or counted[0] != ROWS:
        raise RuntimeError(f"{name}: read {counted[0]} rows, and other bytes than before")
    digest = hashlib.blake2b()
    for batch in opened():
        for array in batch:
            digest.update(np.ascontiguousarray(array).data)
    return {"processor us": seconds / ROWS * 1e6, "digest": digest.hexdigest()}
