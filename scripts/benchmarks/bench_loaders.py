"""Throughput of rows to a training loop: lazyshard and other loaders, each in its own format and environment.

Data sets: chat-like text, about 2 KB per row on average; images of about 1 MB in base64; and photos of about 100 KB and
of 1 MB, which every loader stores as bytes, read by two workers only. Five cases: one process in order, shuffled, and
at random; two workers in order and shuffled, in batches of 8 whose rows reach the main process as dicts. Photos are
also decoded in the workers, beside decoding of bytes that are in memory. For every loader, the rows are counted, the
ids are summed, and one row is compared with the source. Wall time is measured from the
construction of the loader to the last row, without imports; `--json` also has the CPU time and the memory (proportional
shares) of all processes.

`minimal` is not a loader but a lower bound: known row offsets, mapped files, parsing with orjson, no checks. Files are
best kept in memory: --dir /dev/shm.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_data import (
    SAMPLES_PER_CHUNK,
    chunk_files,
    make_images,
    make_media,
    make_photos,
    make_stream,
    write_offsets,
)
from scripts.benchmarks.bench_formats import SHARD_BYTES
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Missing, Row, Setting, Side, child

CASES: Final = ("order", "shuffled", "random", "loader", "loader-shuffled")
IMAGE_CHUNKS: Final = 8
DECODING: Final = "loader-decoding"
PHOTOS: Final = {"media": (640, 480), "media-1mb": (2000, 1600)}
"""Data sets of photos: sides in pixels."""

RANDOM_ROWS: Final = {"text": 20_000, "images": 400}
"""Limit of rows that are drawn at random, as some loaders only read a few hundred per second."""

PACKAGES: Final = {
    "parsing": "",
    "minimal": "",
    "lazyshard": "",
    "lazyshard-dicts": "",
    "decoding": "",
    "torchdata": "torchdata",
    "datasets": "datasets",
    "datasets-streaming": "datasets",
    "mosaicml-streaming": "mosaicml-streaming",
    "litdata": "litdata",
    "webdataset": "webdataset",
    "grain": "grain",
    "megatron-energon": "megatron-energon",
}
"""Loaders, and the package whose environment and format each needs."""

NO_RANDOM: Final = ("datasets-streaming", "webdataset", "megatron-energon")
"""Loaders that read nothing but rows in turn."""

IN_WORKERS: Final = ("torchdata", "lazyshard-dicts")
"""Loaders that are only measured with workers: in one process they equal `minimal` and `lazyshard`."""

AS_THEY_ARE: Final = ("", "torchdata")
"""Packages that read the rows as they are."""

LEAST: Final = 0.97
"""Least ratio of speeds: smaller differences are within the noise of repeated runs."""


class Loaders:
    """The loaders as sides.

    Args:
        setting: of the benchmark.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rows = {"text": setting.size(60_000, 2_000), "images": setting.size(400, 16)}
        self._rows |= {"media": setting.size(4_000, 16), "media-1mb": setting.size(400, 16)}
        self._native = functools.cache(self._convert)

    def _stream(self, data: str) -> Path:
        place, rows = self._setting.place / data, self._rows[data]
        if data in PHOTOS:
            return make_photos(place, rows, rows // IMAGE_CHUNKS, PHOTOS[data])
        return make_stream(place, rows) if data == "text" else make_images(place, rows, rows // IMAGE_CHUNKS)

    def _read(self, data: str) -> Path:
        """Returns the stream that lazyshard reads."""
        stream = self._stream(data)
        if data not in PHOTOS:
            return stream
        return make_media(self._setting.place / f"{data}.bytes", stream, self._rows[data] // IMAGE_CHUNKS)

    def _python(self, package: str) -> str:
        return self._setting.python(package) if package else ""

    def _convert(self, data: str, package: str) -> str:
        """Writes the rows in the format of a package; returns where."""
        native = str(self._setting.place / f"{data}.{package}")
        files = [str(path) for path in chunk_files(self._stream(data))]
        settings = {"package": package, "files": files, "out": native, "shard_bytes": SHARD_BYTES}
        child("bench_formats.write", settings, self._setting.place, self._python(package))
        return native

    def side(self, loader: str, data: str, case: str) -> Side:
        """Returns one loader in one case."""
        package = PACKAGES[loader]

        def turn() -> Figures:
            stream, rows = self._stream(data), self._rows[data]
            drawn = list(range(rows))
            if case == "random":
                drawn = random.Random(0).sample(drawn, min(rows, RANDOM_ROWS[data]))
            settings: dict[str, Any] = {
                "loader": loader,
                "data": str(self._read(data)),
                "native": self._native(data, package) if package not in AS_THEY_ARE else "",
                "offsets": str(write_offsets(stream, self._setting.place / f"{data}.offsets")),
                "case": case,
                "drawn": len(drawn),
                "rows": rows,
                "samples_per_chunk": SAMPLES_PER_CHUNK if data == "text" else rows // IMAGE_CHUNKS,
                "probe": drawn[len(drawn) * 2 // 3],
            }
            found = child(
                "bench_loaders_process.read", {"settings": settings}, self._setting.place, self._python(package)
            )
            came = (found.pop("rows"), found.pop("ids"), json.loads(found.pop("probe")))
            expected = (len(drawn), sum(drawn), self._row(stream, settings["probe"], settings["samples_per_chunk"]))
            if came != expected:
                raise (Missing if package else Failed)(f"{loader}, {data}, {case}: returned other rows than there are")
            return {unit: value / len(drawn) if unit.endswith("us") else value for unit, value in found.items()}

        return turn

    @staticmethod
    def _row(stream: Path, number: int, samples_per_chunk: int) -> Any:
        chunk, line = divmod(number, samples_per_chunk)
        with chunk_files(stream)[chunk].open("rb") as file:
            return json.loads(next(text for at, text in enumerate(file) if at == line))


def _loaders(case: str) -> list[str]:
    return [name for name in PACKAGES if case != "random" or name not in NO_RANDOM]


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides: `DATA, CASE: LOADER`."""
    loaders = Loaders(setting)
    return {
        f"{data}, {case}: {name}": loaders.side(name, data, case)
        for data in ("text", "images", *PHOTOS)
        for case in (*CASES, DECODING)
        for name in PACKAGES
    }


def _rows() -> Iterator[Row]:
    """Yields the rows. Of images in one process only a part of the floor is asked for, which parses JSON too."""
    yield Row("images.order", "images, order: lazyshard", "images, order: parsing", "us", 0.9)
    for data, cases in (("text", CASES), ("images", CASES[3:])):
        for case in cases:
            ours = f"{data}, {case}: lazyshard"
            for name in _loaders(case):
                if name not in ("lazyshard", "parsing", "decoding", *(() if case in CASES[3:] else IN_WORKERS)):
                    goal = None if name in ("minimal", "lazyshard-dicts") else LEAST
                    yield Row(f"{data}.{case}.{name}", ours, f"{data}, {case}: {name}", "us", goal)
    for data in PHOTOS:
        for case in CASES[3:]:
            others = [name for name, package in PACKAGES.items() if package not in AS_THEY_ARE]
            for name in ["lazyshard-dicts", *others]:
                ours, goal = f"{data}, {case}: lazyshard", LEAST if name in others else None
                yield Row(f"{data}.{case}.{name}", ours, f"{data}, {case}: {name}", "us", goal)
        ours, alone = (f"{data}, {DECODING}: {name}" for name in ("lazyshard-dicts", "decoding"))
        yield Row(f"{data}.decoding", ours, alone, "us", 0.95)


LOADERS: Final = Benchmark(
    "loaders",
    "rows of 2 KB and of 1 MB, and media, into a training loop, beside other loaders: one process, and two workers",
    tuple(_rows()),
    prepare,
)
