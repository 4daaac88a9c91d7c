"""The process of `scripts/bench_encode`: passes through a raw stream, one of the same rows encoded, and a cache.

    python bench_encode_process.py SETTINGS

SETTINGS is JSON: `place`, an empty folder; `stream`, raw chat rows; `rounds`. The last line that it prints is JSON:
seconds of processor a pass. A process of its own, since ms-swift says much when it is imported.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard_swift.encoded import EncodedRows, encoders
from lazyshard_swift.encoding import of_producer, pack
from lazyshard_swift.rows import RowEncoder
from scripts.benchmarks.bench_read import BATCH
from scripts.benchmarks.bench_template_process import load_template, make_model


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


def in_batches(directory: Path, encode: Any, **options: Any) -> list[Any]:
    """Returns all samples of a stream, made in batches as a DataLoader's worker makes them."""
    dataset = LazyShardedDataset(directory, encode, dp_rank=0, dp_size=1, on_bad_sample="raise", **options)
    samples: list[Any] = []
    for first in range(0, len(dataset), BATCH):
        samples += dataset.__getitems__(list(range(first, min(first + BATCH, len(dataset)))))
    if options and dataset.stats().not_cached:
        raise RuntimeError("the cache does not take what the template makes")
    return samples


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
    encoded = place / "encoded"
    make_model(place / "model", raw)
    template = load_template(place / "model")
    fly = RowEncoder(template)
    tokens = write_encoded(raw, encoded, fly, template)
    (ready,) = encoders([str(encoded)], template, fly)
    if not isinstance(ready, EncodedRows):
        raise RuntimeError("the encoded stream is not taken for one")
    cache = {"encode_cache": place / "cache", "encode_fingerprint": of_producer(template, None, True)}
    in_batches(raw, fly, **cache)
    found: dict[str, list[float]] = {"on the fly": [], "encoded": [], "cached": []}
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
        if number:
            for name, seconds in zip(found, (on_the_fly, from_encoded, from_cache), strict=True):
                found[name].append(seconds)
    print(json.dumps({"seconds": found, "tokens": tokens / count}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
