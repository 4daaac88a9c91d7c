"""The process of `scripts/bench encode`: passes through a raw stream, one of the same rows encoded, and a cache.

With ms-swift's own template and a small tokenizer that has learnt the words of the rows.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from swift import get_processor, get_template
from transformers import AutoTokenizer

from lazyshard import BadRows, ChunkWriter, EncodeCache, LazyShardedDataset, StreamReader
from lazyshard_swift.rows import EncodedRows, RowEncoder, encoders, of_producer, pack
from scripts.benchmarks.bench_data import BATCH, chunk_files
from tests.swift.cpu import tiny_model

_VOCABULARY: Final = 16_000
"""Tokens: enough for four or five bytes of the rows in each, as usual tokenizers have it."""

_LEARNT_ROWS: Final = 1_000
_LONGEST: Final = 1 << 20
"""Tokens of a row; none has as many."""


def load_template(model: Path, stream: Path) -> Any:
    """Makes the folder of a model with a tokenizer trained on the rows; returns its template for training."""
    tiny_model.main(str(model), "1")
    with chunk_files(stream)[0].open("rb") as file:
        rows = [json.loads(line) for line in itertools.islice(file, _LEARNT_ROWS)]
    texts = [message["content"] for row in rows for message in row["messages"]]
    AutoTokenizer.from_pretrained(model).train_new_from_iterator(texts, _VOCABULARY).save_pretrained(model)
    template = get_template(get_processor(str(model), model_type="qwen3"), template_type="qwen2_5", max_length=_LONGEST)
    template.set_mode("train")
    return template


def write_encoded(raw: Path, encoded: Path, encoder: RowEncoder, template: Any) -> None:
    """Encodes all rows of a stream into another one."""
    reader = StreamReader(raw)
    options: dict[str, Any] = {"arrays": True, "encoding": of_producer(template, None, True)}
    with ChunkWriter(encoded, reader.samples_per_chunk, **options) as writer:
        for number in range(reader.refresh().samples):
            sample = encoder(reader.read(number))
            writer.write(pack(sample), tokens=sample["length"])


def in_batches(directory: Path, encode: Any, **options: Any) -> list[Any]:
    """Returns all samples of a stream, made in batches as a DataLoader's worker makes them."""
    dataset = LazyShardedDataset(directory, encode, dp_rank=0, dp_size=1, bad_rows=BadRows("raise"), **options)
    samples: list[Any] = []
    for first in range(0, len(dataset), BATCH):
        samples += dataset.__getitems__(list(range(first, min(first + BATCH, len(dataset)))))
    if options and dataset.stats().not_cached:
        raise RuntimeError("the cache does not take what the template makes")
    return samples


def never(row: Any) -> Any:
    """Replaces the encoder if all rows are in the cache."""
    raise RuntimeError("a row was encoded although it is in the cache")


class Meter:
    """Calls an encoder and sums its CPU seconds."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self._encode = encode
        self.seconds = 0.0

    def __call__(self, row: Any) -> Any:
        """Returns what the encoder returns."""
        start = time.process_time()
        try:
            return self._encode(row)
        finally:
            self.seconds += time.process_time() - start


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds of a call, and its result."""
    # Collect garbage of earlier calls outside of the measurement.
    gc.collect()
    gc.freeze()
    start = time.process_time()
    found = what()
    return time.process_time() - start, found


def passes(stream: str, place: str, rounds: int) -> dict[str, list[float]]:
    """Returns microseconds of processor a row by what was done, one for each round behind the first.

    Raises:
        RuntimeError: two of them did not make the same samples.
    """
    raw, encoded = Path(stream), Path(place) / "encoded"
    template = load_template(Path(place) / "model", raw)
    fly = RowEncoder(template)
    write_encoded(raw, encoded, fly, template)
    (ready,) = encoders([str(encoded)], template, fly)
    if not isinstance(ready, EncodedRows):
        raise RuntimeError("the encoded stream is not taken for one")
    cache = {"cache": EncodeCache(directory=Path(place) / "cache", fingerprint=of_producer(template, None, True))}
    in_batches(raw, fly, **cache)
    found: dict[str, list[float]] = {"on the fly": [], "of that loading": [], "encoded": [], "cached": []}
    for number in range(rounds + 1):
        meter = Meter(fly)
        on_the_fly, expected = timed(functools.partial(in_batches, raw, meter))
        taken = [on_the_fly, on_the_fly - meter.seconds]
        count = len(expected)
        for work in (lambda: in_batches(encoded, ready), lambda: in_batches(raw, never, **cache)):
            seconds, samples = timed(work)
            if samples != expected:
                raise RuntimeError("other samples than those that the template makes")
            # Its memory is free for the next pass, as it was for this one.
            del samples
            taken.append(seconds)
        if number:
            for values, seconds in zip(found.values(), taken, strict=True):
                values.append(seconds / count * 1e6)
    return found
