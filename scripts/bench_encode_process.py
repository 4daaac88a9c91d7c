"""The process of `scripts/bench_encode`: passes through a raw stream, one of the same rows encoded, and a cache.

    python bench_encode_process.py SETTINGS

SETTINGS is JSON: `place`, an empty folder; `stream`, raw chat rows; `rounds`. The last line that it prints is JSON:
seconds of processor a pass. A process of its own, since ms-swift says much when it is imported.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader, as_tensor
from lazyshard.format.names import arrays_name
from lazyshard_swift.encoded import EncodedRows, encoders
from lazyshard_swift.encoded_values import pack
from lazyshard_swift.fingerprint import of_producer
from lazyshard_swift.rows import RowEncoder
from scripts.bench_read import BATCH
from scripts.bench_template_process import load_template, make_model

FEATURE_ROWS: Final = 200
"""Of 1 MiB: they stay in memory, so that no disk is measured."""

FEATURES_PER_CHUNK: Final = 50


def write_encoded(raw: Path, encoded: Path, encoder: RowEncoder, template: Any) -> int:
    """Encodes all rows of a stream into another one; returns their tokens."""
    reader, tokens = StreamReader(raw), 0
    options: dict[str, Any] = {"arrays": True, "encoding": of_producer(template, None, True)}
    with ChunkWriter(encoded, reader.samples_per_chunk, **options) as writer:
        for number in range(reader.refresh().samples):
            sample = encoder(reader.read(number))
            tokens += sample["length"]
            writer.write(pack(sample), tokens=sample["length"])
    return tokens


def write_features(directory: Path) -> None:
    """Writes rows of 1 MiB of float32 each."""
    numbers = np.random.default_rng(0)
    with ChunkWriter(directory, FEATURES_PER_CHUNK, arrays=True) as writer:
        for row in range(FEATURE_ROWS):
            writer.write({"id": row, "features": numbers.random((256, 1024), np.float32)})


def in_batches(directory: Path, encode: Any, **options: Any) -> list[Any]:
    """Returns all samples of a stream, made in batches as a DataLoader's worker makes them."""
    dataset = LazyShardedDataset(directory, encode, dp_rank=0, dp_size=1, on_bad_sample="raise", **options)
    samples: list[Any] = []
    for first in range(0, len(dataset), BATCH):
        samples += dataset.__getitems__(list(range(first, min(first + BATCH, len(dataset)))))
    if options and dataset.stats().not_cached:
        raise RuntimeError("the cache does not take what the template makes")
    return samples


def read_features(directory: Path) -> int:
    """Reads the features of each row as a tensor; returns their bytes."""
    dataset = LazyShardedDataset(directory, lambda row: as_tensor(row["features"]), dp_rank=0, dp_size=1)
    return sum(dataset[number].nbytes for number in range(len(dataset)))


def read_bytes(directory: Path) -> int:
    """Reads the same bytes, a row at a time, each into memory of its own; returns how many."""
    size = 0
    for chunk in range(FEATURE_ROWS // FEATURES_PER_CHUNK):
        with (directory / arrays_name(chunk)).open("rb", buffering=0) as file:
            for row in range(FEATURES_PER_CHUNK):
                size += os.preadv(file.fileno(), [np.empty(1 << 20, np.uint8).data], row << 20)
    return size


def never(row: Any) -> Any:
    """Stands for the encoder where all is in the cache."""
    raise RuntimeError("a row was encoded although it is in the cache")


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of processor that something takes, and what it returns."""
    # What was made before is not collected in the time of what comes now.
    gc.collect()
    gc.freeze()
    start = time.process_time()
    found = what()
    return time.process_time() - start, found


def main() -> int:
    """Does what the first argument says."""
    settings = json.loads(sys.argv[1])
    raw, place = Path(settings["stream"]), Path(settings["place"])
    encoded, features = place / "encoded", place / "features"
    make_model(place / "model", raw)
    template = load_template(place / "model")
    fly = RowEncoder(template)
    tokens = write_encoded(raw, encoded, fly, template)
    write_features(features)
    (ready,) = encoders([str(encoded)], template, fly)
    if not isinstance(ready, EncodedRows):
        raise RuntimeError("the encoded stream is not taken for one")
    cache = {"encode_cache": place / "cache", "encode_fingerprint": of_producer(template, None, True)}
    in_batches(raw, fly, **cache)
    found: dict[str, list[float]] = {"on the fly": [], "encoded": [], "cached": [], "features": [], "bytes": []}
    for number in range(settings["rounds"] + 1):
        on_the_fly, expected = timed(lambda: in_batches(raw, fly))
        from_encoded, samples = timed(lambda: in_batches(encoded, ready))
        if samples != expected:
            raise RuntimeError("samples of the encoded stream are not those that the template makes")
        # Its memory is free for the next pass, as it was for this one.
        del samples
        from_cache, samples = timed(lambda: in_batches(raw, never, **cache))
        if samples != expected:
            raise RuntimeError("samples of the cache are not those that the template makes")
        count = len(samples)
        del samples, expected
        of_features, size = timed(lambda: read_features(features))
        of_bytes, floor = timed(lambda: read_bytes(features))
        if size != FEATURE_ROWS << 20 or floor != size:
            raise RuntimeError(f"read {size} and {floor} bytes of features")
        if number:
            for name, seconds in zip(found, (on_the_fly, from_encoded, from_cache, of_features, of_bytes), strict=True):
                found[name].append(seconds)
    print(json.dumps({"seconds": found, "tokens": tokens / count}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
